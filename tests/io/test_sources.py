import errno

import pyarrow as pa
import pytest

from batchspec.errors import BatchspecError, InputError
from batchspec.io.sources import find_sources, public_name, reading

SIGNED = "https://user:pass@host/data/in.parquet?X-Amz-Signature=5ecret"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/a b?.parquet", "/data/a b?.parquet"),
        (SIGNED, "https://host/data/in.parquet"),
        ("s3://bucket/key=1/in.parquet", "s3://bucket/key=1/in.parquet"),
        ("/data/caf\udce9", r"/data/caf\udce9"),
    ],
)
def test_public_names(path: str, name: str) -> None:
    assert public_name(path) == name


@pytest.mark.parametrize(
    ("path", "raised", "expected", "message"),
    [
        ("/x", PermissionError(errno.EACCES, "Permission denied"), InputError, "NAME may not be read"),
        (
            "/x",
            OSError(errno.EIO, "Input/output error"),
            BatchspecError,
            r"cannot read NAME: \[Errno 5\] Input/output error",
        ),
        ("/x", OSError("Corrupt snappy compressed data."), InputError, "NAME cannot be decoded.*snappy"),
        ("/x", pa.ArrowInvalid("bad page"), InputError, "NAME cannot be decoded; the file may be damaged: bad page"),
        ("/x", InputError("as it is"), InputError, "as it is"),
        ("/x", TypeError("a fault of ours"), TypeError, "a fault of ours"),
        (SIGNED, OSError(f"404 for {SIGNED}"), BatchspecError, "cannot read NAME: OSError$"),
        (SIGNED, pa.ArrowInvalid("bad page"), InputError, "NAME cannot be decoded.*bad page"),
        (SIGNED, RuntimeError(f"no credentials for {SIGNED}"), BatchspecError, "cannot read NAME: RuntimeError$"),
    ],
)
def test_what_libraries_raise_gets_its_place_in_the_error_tree(
    path: str, raised: Exception, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message) as error, reading(path, "NAME"):
        raise raised
    assert type(error.value) is expected


def test_signatures_and_passwords_stay_out_of_messages() -> None:
    # whether or not the library for the protocol is there, this address cannot be had
    with pytest.raises(BatchspecError) as error:
        find_sources(SIGNED.replace("host", "127.0.0.1:9"))
    assert "https://127.0.0.1:9/data/in.parquet" in str(error.value)
    assert "5ecret" not in str(error.value)
    assert "pass" not in str(error.value)
