from pathlib import Path

import datasets
import pytest
from input_tables import read, resolve, write

from batchspec.errors import BatchspecError, InputError


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset repository that `datasets` finds without a network, and caches of our own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    return tmp_path / "org" / "name"


def test_a_dataset_becomes_one_parquet_file_in_the_cache(repository: Path) -> None:
    messages = [[{"role": "user", "content": "b"}]]
    write(repository / "train.parquet", {"prompt": ["a"], "messages": messages})
    inputs = resolve("hf://org/name")
    [file] = inputs.files
    assert file.name == "hf://org/name"
    assert file.path.startswith(str(repository.parents[1] / "cache/datasets/org--name-train-"))
    assert read(inputs).to_pydict() == {"prompt": ["a"], "messages": messages}
    written = Path(file.path).stat().st_mtime_ns
    assert resolve("hf://org/name") == inputs
    assert Path(file.path).stat().st_mtime_ns == written
    assert [path.name for path in Path(file.path).parent.iterdir()] == [Path(file.path).name]


def test_several_splits_want_a_choice(repository: Path) -> None:
    write(repository / "train.parquet", {"prompt": ["a"]})
    write(repository / "test.parquet", {"prompt": ["b", "c"]})
    with pytest.raises(InputError, match="choose one: hf://org/name:train, hf://org/name:test"):
        resolve("hf://org/name")
    assert resolve("hf://org/name:test").num_rows == 2
    with pytest.raises(InputError, match="cannot load hf://org/name:dev"):
        resolve("hf://org/name:dev")


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (datasets.exceptions.DatasetNotFoundError("not there"), InputError, "cannot load hf://org/name: .*not there"),
        (ConnectionError("no route"), BatchspecError, "cannot reach the Hub for hf://org/name: no route"),
    ],
)
def test_what_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], message: str
) -> None:
    def load_dataset(name: str, split: str | None) -> None:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(expected, match=message) as error:
        resolve("hf://org/name")
    assert type(error.value) is expected
