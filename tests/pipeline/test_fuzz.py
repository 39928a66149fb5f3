"""Generated tables of every shape: the exit code and the rows are as documented, and there is never a traceback."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from batchspec.cli import main
from batchspec.io.results import load_results
from tests.pipeline.threads import workers_as_threads

PROMPT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())]
OTHER_TYPES: list[tuple[pa.DataType, SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.timestamp("ns", "Europe/Berlin"), st.integers(0, 2**60)),
    (pa.decimal128(20, 3), st.decimals(-1000, 1000, places=3)),
    (pa.list_(pa.int8()), st.lists(st.integers(-128, 127), max_size=3)),
    (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.text(max_size=3)}),
    ),
    (pa.binary(), st.binary(max_size=8)),
    (pa.map_(pa.string(), pa.int32()), st.lists(st.tuples(st.text(max_size=3), st.integers(0, 9)), max_size=2)),
    (pa.null(), st.none()),
]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["", "  \n", "<|im_end|>", "\x00", "x" * 70_000, "\ufeffbom", "e\u0301", "\U0001f600" * 20]),
)
NAMES = st.one_of(
    st.sampled_from(
        [
            "request_id",
            "request_class",
            "max_new_tokens",
            "temperature",
            "stop",
            "output_text",
            "prompt",
            "Prompt",
            "a b",
            "é",
        ]
    ),
    st.text(min_size=1, max_size=5),
)
ROLES = st.sampled_from(["user", "assistant", "system", "wizard"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.none() | ROLES, "content": st.none() | TEXTS}), max_size=3)
MESSAGES_TYPE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@st.composite
def column(draw: Callable[..., Any], num_rows: int) -> pa.Array:
    kind, values = draw(st.sampled_from(OTHER_TYPES))
    return pa.array(draw(st.lists(st.none() | values, min_size=num_rows, max_size=num_rows)), kind)


@st.composite
def prompt_column(draw: Callable[..., Any], num_rows: int) -> pa.Array:
    kind = draw(st.sampled_from(PROMPT_TYPES))
    texts = draw(st.lists(st.none() | TEXTS, min_size=num_rows, max_size=num_rows))
    if kind == pa.binary():
        return pa.array(
            [None if text is None else text.encode() + b"\xff" * (i % 2) for i, text in enumerate(texts)], kind
        )
    if pa.types.is_dictionary(kind):
        return pa.array(texts, pa.string()).dictionary_encode().cast(pa.dictionary(pa.int32(), pa.string()))
    return pa.array(texts, kind)


@st.composite
def tables(draw: Callable[..., Any]) -> pa.Table:
    num_rows = draw(st.integers(0, 6))
    names, arrays = [], []
    if draw(st.integers(0, 9)):
        names.append("prompt")
        arrays.append(draw(prompt_column(num_rows)))
    if not draw(st.integers(0, 3)):
        names.append("messages")
        arrays.append(
            pa.array(draw(st.lists(st.none() | MESSAGES, min_size=num_rows, max_size=num_rows)), MESSAGES_TYPE)
        )
    for name in draw(st.lists(NAMES, max_size=3)):
        names.append(name)
        arrays.append(draw(column(num_rows)))
    return pa.Table.from_arrays(arrays, names)


@st.composite
def files(draw: Callable[..., Any]) -> dict[str, Any]:
    """How a table is written."""
    return {
        "row_group_size": draw(st.sampled_from([1, 2, 1000])),
        "compression": draw(st.sampled_from(["none", "snappy", "zstd"])),
        "use_dictionary": draw(st.booleans()),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
    }


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def check(table: pa.Table, how: dict[str, Any]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        pq.write_table(table, folder / "in.parquet", **how)
        code, out, err = run("generate", str(folder / "in.parquet"), "--engine", "fake", "--max-new-tokens", "8")
        output = folder / "in.generated"
        assert "Traceback" not in err
        if code == 2:
            assert out == ""
            assert err.strip()
            assert not list(output.glob("part-*"))
            return
        summary = json.loads(out.splitlines()[-1])
        results = load_results(str(output))
        assert (summary["rows"], results.num_rows) == (table.num_rows, table.num_rows)
        assert results["row_index"].to_pylist() == list(range(table.num_rows))
        num_errors = results.num_rows - results["error_type"].null_count
        assert code == (3 if num_errors else 0)
        assert summary["error_rows"] == num_errors
        for row in results.select(["error_type", "output_text", "output_token_ids"]).to_pylist():
            assert (
                (row["error_type"] is None) == (row["output_text"] is not None) == (row["output_token_ids"] is not None)
            )
        written = pq.read_table(folder / "in.parquet")
        for name in written.column_names:
            assert results[name].to_pylist() == written[name].to_pylist()
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True, scope="module")
def workers_are_threads() -> Iterator[None]:
    with workers_as_threads():
        yield


common = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=100, **common)
@given(table=tables(), how=files())
def test_any_table_gives_documented_rows_and_exit_code(table: pa.Table, how: dict[str, Any]) -> None:
    check(table, how)


@pytest.mark.slow
@settings(max_examples=2000, **common)
@given(table=tables(), how=files())
def test_two_thousand_tables_give_documented_rows_and_exit_codes(table: pa.Table, how: dict[str, Any]) -> None:
    check(table, how)
