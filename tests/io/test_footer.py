from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from input_tables import write

from batchspec.errors import InputError
from batchspec.io import footer
from batchspec.io.footer import Footer


def read_in_segments(path: Path) -> tuple[pa.Table, int]:
    """The rows of the file by way of its segments, and how many there were."""
    with pa.OSFile(str(path)) as file:
        whole = Footer(file, "in.parquet")
        tables, row = [], 0
        while row < whole.num_rows:
            segment = whole.segment(row)
            assert segment.bounds[0] == row
            assert segment.metadata.num_row_groups == len(segment.bounds) - 1
            tables.append(pq.ParquetFile(file, metadata=segment.metadata).read())
            row = segment.bounds[-1]
        return pa.concat_tables(tables), len(tables)


@pytest.mark.parametrize(
    ("per_segment", "segments"), [(2000, 1), (130, 1), (129, 2), (128, 2), (20, 7), (14, 10), (1, 130)]
)
def test_a_footer_is_cut_into_footers_that_pyarrow_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_segment: int, segments: int
) -> None:
    table = pa.table(
        {
            "prompt": [f"p{i}" for i in range(260)],
            "n": range(260),
            "when": pa.array(range(260), pa.timestamp("ns", "Europe/Berlin")),
            "nested": [[{"a": 1.5, "b": None}]] * 260,
            "flag": [True, None] * 130,
        }
    )
    pq.write_table(
        table, tmp_path / "in.parquet", row_group_size=2, write_page_index=True, sorting_columns=[pq.SortingColumn(1)]
    )
    monkeypatch.setattr(footer, "ROW_GROUPS_PER_SEGMENT", per_segment)
    read, count = read_in_segments(tmp_path / "in.parquet")
    assert read.equals(table)
    assert count == segments


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=30), per_segment=st.integers(1, 8))
def test_every_row_is_in_the_segment_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], per_segment: int
) -> None:
    monkeypatch.setattr(footer, "ROW_GROUPS_PER_SEGMENT", per_segment)
    schema = pa.schema({"n": pa.int64()})
    path, row = tmp_path / "in.parquet", 0
    with pq.ParquetWriter(path, schema) as writer:
        for size in sizes:
            writer.write_table(pa.table({"n": range(row, row + size)}, schema=schema))
            row += size
    with pa.OSFile(str(path)) as file:
        whole = Footer(file, "in.parquet")
        assert whole.num_rows == sum(sizes)
        assert whole.uncompressed_bytes == sum(
            pq.read_metadata(path).row_group(i).total_byte_size for i in range(pq.read_metadata(path).num_row_groups)
        )
        for row in range(whole.num_rows):
            segment = whole.segment(row)
            assert segment.bounds[0] <= row < segment.bounds[-1]
            rows = pq.ParquetFile(file, metadata=segment.metadata).read()["n"].to_pylist()
            assert rows == list(range(segment.bounds[0], segment.bounds[-1]))


def test_the_fingerprint_follows_footer_and_size(tmp_path: Path) -> None:
    def fingerprint(**columns: list[str]) -> str:
        with pa.OSFile(str(write(tmp_path / "in.parquet", columns))) as file:
            return Footer(file, "in.parquet").fingerprint

    assert fingerprint(prompt=["a"]) == fingerprint(prompt=["a"])
    assert len({fingerprint(prompt=["a"]), fingerprint(prompt=["b"]), fingerprint(question=["a"])}) == 3


def test_the_schema_comes_without_the_metadata_of_its_writer(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"]}).replace_schema_metadata({"pandas": "{}"})
    pq.write_table(table, tmp_path / "in.parquet")
    with pa.OSFile(str(tmp_path / "in.parquet")) as file:
        assert Footer(file, "in.parquet").schema.metadata is None


@pytest.mark.parametrize("size", [0, 11, 12, 100])
def test_what_is_no_parquet_file(size: int) -> None:
    with pytest.raises(InputError, match="zeros is not a Parquet file"):
        Footer(pa.BufferReader(bytes(size)), "zeros")
