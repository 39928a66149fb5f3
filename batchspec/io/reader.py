"""Streams input rows in bounded memory, whatever the row-group shape."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from batchspec.errors import InputError
from batchspec.io.footer import Footer, Segment
from batchspec.io.inputs import InputFile, InputSet
from batchspec.io.sources import open_source, reading

MAX_BATCH_ROWS = 256
TARGET_BATCH_BYTES = 8 * 2**20
READ_BUFFER_BYTES = 2**20


class InputReader:
    """Reads row ranges of an input. One per worker: it keeps the last file open.

    Ranges may come in any order; rising ranges of a file cost one pass over it in all.
    """

    def __init__(self, inputs: InputSet) -> None:
        self._inputs = inputs
        self._stream: _FileStream | None = None

    def iter_batches(self, file_index: int, start_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield `num_rows` rows of file `file_index` from `start_row` on, in order, in the schema of the whole input.

        Batches hold at most 256 rows and rarely more than a few MB. Exhaust or drop the iterator before the next call.
        Raises InputError where the file is damaged or no longer what was resolved.
        """
        file = self._inputs.files[file_index]
        with reading(file.path, f"{file.name}, rows {start_row} to {start_row + num_rows - 1}"):
            if self._stream is None or self._stream.file != file:
                self.close()
                self._stream = _FileStream(file)
            for batch in self._stream.read(start_row, num_rows):
                yield _to_schema(batch, self._inputs.schema, file)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> InputReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _FileStream:
    """One open file, and how far it is decoded: Parquet cannot be entered in the middle of a row group, so that a
    row group once begun is decoded on as long as the ranges asked for rise."""

    def __init__(self, file: InputFile) -> None:
        self.file = file
        self._opened = open_source(file.path)
        self._footer = Footer(self._opened, file.name)
        if self._footer.fingerprint != file.fingerprint:
            raise InputError(f"{file.name} has changed since the run began; to start again, add --overwrite")
        # pyarrow cannot join the pieces of a nested dictionary column that several row groups hold
        self._one_by_one = any(_has_dictionary_inside(field.type) for field in self._footer.schema)
        self._segment = Segment(None, [0])
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._pending: pa.RecordBatch | None = None  # decoded, but not given out
        self._next_row = 0  # the first row of what is not given out
        self._end_row = 0  # where the row groups that `_batches` decodes end

    def read(self, start_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        row, stop_row = start_row, start_row + num_rows
        while row < stop_row:
            if not self._next_row <= row < self._end_row:
                self._begin(row, stop_row)
            batch = next(self._batches, None) if self._pending is None else self._pending
            if batch is None:
                raise InputError(f"{self.file.name} is damaged: rows before row {self._end_row} are missing")
            begin = min(row - self._next_row, batch.num_rows)
            end = min(begin + stop_row - row, batch.num_rows)
            self._pending = batch.slice(end) if end < batch.num_rows else None
            self._next_row += end
            if begin < end:
                row += end - begin
                yield batch.slice(begin, end - begin)

    def close(self) -> None:
        self._opened.close()

    def _begin(self, row: int, stop_row: int) -> None:
        """Start to decode at the row group of `row`, through the one that ends at `stop_row` or after, or the last of
        the segment."""
        if not self._segment.bounds[0] <= row < self._segment.bounds[-1]:
            self._segment = self._footer.segment(row)
        metadata, bounds = self._segment
        first = bisect_right(bounds, row) - 1
        stop = first + 1 if self._one_by_one else min(bisect_left(bounds, stop_row), metadata.num_row_groups)
        groups = range(first, stop)
        parquet = pq.ParquetFile(self._opened, metadata=metadata, buffer_size=READ_BUFFER_BYTES)
        self._batches = parquet.iter_batches(_batch_rows(metadata, groups), row_groups=list(groups), use_threads=False)
        self._pending = None
        self._next_row, self._end_row = bounds[groups.start], bounds[groups.stop]


def _has_dictionary_inside(kind: pa.DataType) -> bool:
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(pt.is_dictionary(child) or _has_dictionary_inside(child) for child in inner)


def _batch_rows(metadata: pq.FileMetaData, groups: range) -> int:
    """How many rows to decode at a time, so that long rows do not fill the memory."""
    sizes = [(metadata.row_group(i).total_byte_size, metadata.row_group(i).num_rows) for i in groups]
    bytes_per_row = max(num_bytes / max(1, num_rows) for num_bytes, num_rows in sizes)
    return int(min(MAX_BATCH_ROWS, max(1, TARGET_BATCH_BYTES / max(1, bytes_per_row))))


def _to_schema(batch: pa.RecordBatch, schema: pa.Schema, file: InputFile) -> pa.RecordBatch:
    """The batch with the columns of the whole input: those of its directories, and nulls where the file has none."""
    partition = dict(file.partition)
    columns = []
    for field in schema:
        if field.name in batch.schema.names:
            column = batch.column(field.name)
            columns.append(column if column.type.equals(field.type) else column.cast(field.type))
        else:
            columns.append(pa.repeat(pa.scalar(partition.get(field.name), field.type), batch.num_rows))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
