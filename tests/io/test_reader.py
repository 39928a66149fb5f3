from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from input_tables import parse, read, resolve, unchecked_strings, write

from batchspec.config import InputConfig
from batchspec.errors import BatchspecError, InputError
from batchspec.io import footer, reader
from batchspec.io.parser import RowParser
from batchspec.io.reader import InputReader
from batchspec.types import Request, SamplingParams


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    ranges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=6),
    per_segment=st.sampled_from([1, 3, 2000]),
    batch_rows=st.sampled_from([1, 4, 256]),
)
def test_p15_any_range_of_any_row_group_shape_in_any_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: list[int],
    ranges: list[tuple[int, int]],
    per_segment: int,
    batch_rows: int,
) -> None:
    monkeypatch.setattr(footer, "ROW_GROUPS_PER_SEGMENT", per_segment)
    monkeypatch.setattr(reader, "MAX_BATCH_ROWS", batch_rows)
    schema = pa.schema({"prompt": pa.string()})
    count = 0
    with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
        for size in groups:
            rows = [str(i) for i in range(count, count + size)]
            writer.write_table(pa.table({"prompt": rows}, schema=schema))
            count += size
    with InputReader(resolve(tmp_path / "in.parquet")) as rows_of:
        for start, length in ranges:
            start = min(start, count)
            length = min(length, count - start)
            batches = list(rows_of.iter_batches(0, start, length))
            assert [row for batch in batches for row in batch["prompt"].to_pylist()] == [
                str(i) for i in range(start, start + length)
            ]
            assert all(0 < batch.num_rows <= batch_rows for batch in batches)


def test_p15_one_huge_row_group_is_read_in_small_batches_and_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in.parquet", {"prompt": [f"{i} " * 200 for i in range(20_000)]})
    opened = []
    real = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda *args, **kwargs: opened.append(args) or real(*args, **kwargs))
    with InputReader(resolve(path)) as rows_of:
        before = pa.total_allocated_bytes()
        peak = rows = 0
        for shard in range(0, 20_000, 1000):
            for batch in rows_of.iter_batches(0, shard, 500):
                rows += batch.num_rows
                peak = max(peak, pa.total_allocated_bytes() - before)
    assert rows == 10_000
    assert len(opened) == 1
    assert peak < 8 * 2**20 < resolve(path).files[0].uncompressed_bytes / 2


def test_p15_many_one_row_groups_hold_only_a_few_parsed_footers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footer, "ROW_GROUPS_PER_SEGMENT", 50)
    path = write(tmp_path / "in.parquet", {"prompt": [str(i) for i in range(2000)]}, row_group_size=1)
    one = write(tmp_path / "one.parquet", {"prompt": [str(i) for i in range(2000)]})
    parsed = []
    real = pq.ParquetFile
    monkeypatch.setattr(
        pq,
        "ParquetFile",
        lambda file, metadata, **kw: parsed.append(metadata.num_row_groups) or real(file, metadata=metadata, **kw),
    )
    assert read(resolve(path)).equals(read(resolve(one)))
    assert max(parsed) == 50


def test_long_rows_come_in_smaller_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", {"prompt": [f"{i}" + "x" * 2**20 for i in range(40)]}, use_dictionary=False)
    with InputReader(resolve(path)) as rows_of:
        sizes = [batch.num_rows for batch in rows_of.iter_batches(0, 0, 40)]
    assert sizes == [7, 7, 7, 7, 7, 5]


def test_p13_empty_row_groups_in_the_middle(tmp_path: Path) -> None:
    schema = pa.schema({"prompt": pa.string()})
    with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
        for rows in (["a"], [], [], ["b", "c"], []):
            writer.write_table(pa.table({"prompt": rows}, schema=schema))
    assert read(resolve(tmp_path))["prompt"].to_pylist() == ["a", "b", "c"]


MESSAGES = [[{"role": "system", "content": "x"}, {"role": "user", "content": f"{i} ü"}] for i in range(300)]
STRUCTS = pa.array(MESSAGES)
MAPS = pa.array([[list(m.items()) for m in row] for row in MESSAGES], pa.list_(pa.map_(pa.string(), pa.string())))


@pytest.mark.parametrize(
    "column",
    [
        STRUCTS,
        STRUCTS.cast(pa.large_list(pa.struct({"role": pa.large_string(), "content": pa.large_string()}))),
        STRUCTS.cast(pa.list_(pa.struct({"role": pa.dictionary(pa.int32(), pa.string()), "content": pa.string()}))),
        STRUCTS.cast(pa.list_(pa.struct({"role": pa.binary(), "content": pa.binary()}))),
        STRUCTS.cast(pa.list_(STRUCTS.type.value_type, 2)),
        MAPS,
        MAPS.cast(pa.large_list(pa.map_(pa.string(), pa.large_string()))),
    ],
    ids=lambda column: str(column.type)[:60],
)
def test_p02_nested_messages_in_any_layout_reach_the_request_as_plain_lists_and_dicts(
    tmp_path: Path, column: pa.Array
) -> None:
    inputs = resolve(write(tmp_path / "in.parquet", {"messages": column}, row_group_size=100))
    table = read(inputs)
    assert table["messages"].type == column.type
    rows = [
        row
        for batch in table.to_batches(max_chunksize=64)
        for row in RowParser(InputConfig(), SamplingParams()).parse(batch, 0)
    ]
    assert [row.messages for row in rows if isinstance(row, Request)] == MESSAGES


def test_p02_a_large_row_group_of_long_nested_messages_streams(tmp_path: Path) -> None:
    count = 50_000
    text = pa.array([f"{i} " + "words " * 50 for i in range(count)])
    messages = pa.ListArray.from_arrays(
        pa.array(range(count + 1), pa.int32()),
        pa.StructArray.from_arrays([pa.repeat("user", count), text], ["role", "content"]),
    )
    path = write(tmp_path / "in.parquet", {"messages": messages}, row_group_size=count)
    with InputReader(resolve(path)) as rows_of:
        before = pa.total_allocated_bytes()
        last, peak = "", 0
        for batch in rows_of.iter_batches(0, 0, count):
            last = batch["messages"][-1].as_py()[0]["content"]
            peak = max(peak, pa.total_allocated_bytes() - before)
    assert last == text[-1].as_py()
    assert peak < 8 * 2**20


@pytest.mark.parametrize("index_type", [pa.int8(), pa.int32()])
def test_p03_dictionary_columns_are_the_same_as_plain_strings(tmp_path: Path, index_type: pa.DataType) -> None:
    plain = {"prompt": [f"p{i % 5}" for i in range(700)], "request_class": [f"c{i % 3}" for i in range(700)]}
    encoded = {name: pa.array(values).cast(pa.dictionary(index_type, pa.string())) for name, values in plain.items()}
    inputs = resolve(write(tmp_path / "in.parquet", encoded, row_group_size=100))
    table = read(inputs)
    assert table.schema.field("request_class").type == encoded["request_class"].type
    assert table.to_pydict() == plain
    batch = table.combine_chunks().to_batches()[0]
    assert RowParser(InputConfig(), SamplingParams()).parse(batch, 0) == parse(plain)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([2**60 + 1, None], pa.int64()),
        pa.array([2**64 - 1, None], pa.uint64()),
        pa.array(["1.50", None]).cast(pa.decimal128(10, 2)),
        pa.array([[1.5, None], None], pa.list_(pa.float32())),
        pa.array([b"0123456789abcdef", None], pa.binary(16)),
        pa.array([b"0123456789abcdef", None], pa.uuid()),
        pa.array(["a", None]).dictionary_encode(),
        pa.array(["a", None], pa.string_view()),
        pa.array([{"x": [{"y": 1}]}, None]),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        pa.array([1, None], pa.duration("ns")),
        pa.array([1, None], pa.time64("ns")),
        pa.array([1.5, None], pa.float16()),
        pa.nulls(2),
    ],
    ids=lambda column: str(column.type),
)
def test_p14_exotic_columns_are_read_as_they_were_written(tmp_path: Path, column: pa.Array) -> None:
    write(tmp_path / "1.parquet", {"prompt": ["a", "b"], "x": column})
    write(tmp_path / "2.parquet", {"prompt": ["c"]})
    table = read(resolve(tmp_path))
    assert table.schema.field("x").type == column.type
    assert table["x"].combine_chunks().slice(0, 2).equals(column)
    assert table["x"][2].as_py() is None


def test_p08_invalid_utf8_passes_through_untouched(tmp_path: Path) -> None:
    bytes_in = [b"fine", b"caf\xe9", None]
    path = write(tmp_path / "in.parquet", {"prompt": ["a", "b", "c"], "note": unchecked_strings(bytes_in)})
    assert read(resolve(path))["note"].cast(pa.binary()).to_pylist() == bytes_in


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", {"prompt": ["a"]})
    inputs = resolve(path)
    write(path, {"prompt": ["b"]})
    with pytest.raises(InputError, match=r"in.parquet has changed since the run began"):
        read(inputs)


def test_a_file_that_is_gone_may_come_back(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", {"prompt": ["a"]})
    inputs = resolve(path)
    path.unlink()
    with pytest.raises(BatchspecError, match=r"cannot read .*in.parquet, rows 0 to 0: .*No such file") as raised:
        read(inputs)
    assert raised.value.exit_code == 1


def test_damaged_pages_are_named_with_file_and_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", {"prompt": [f"text {i}" for i in range(1000)]}, compression="snappy")
    inputs = resolve(path)
    damaged = bytearray(path.read_bytes())
    damaged[4:400] = b"\xff" * 396
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"in.parquet, rows 0 to 999 cannot be decoded; the file may be damaged"):
        read(inputs)


def test_reading_past_the_end_is_an_error_not_fewer_rows(tmp_path: Path) -> None:
    inputs = resolve(write(tmp_path / "in.parquet", {"prompt": ["a"]}))
    with (
        InputReader(inputs) as rows_of,
        pytest.raises(InputError, match=r"in.parquet is damaged: its row groups end at row 1"),
    ):
        list(rows_of.iter_batches(0, 0, 2))


def test_one_reader_serves_several_files_and_a_dropped_iterator(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.parquet", {"prompt": [f"{name}{i}" for i in range(600)]})
    with InputReader(resolve(tmp_path)) as rows_of:

        def first(file: int, row: int) -> Any:
            return next(rows_of.iter_batches(file, row, 300))["prompt"][0].as_py()

        assert [first(0, 0), first(0, 10), first(1, 299), first(0, 5)] == ["a0", "a10", "b299", "a5"]
