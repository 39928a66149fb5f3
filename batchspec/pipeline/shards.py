"""A worker's open shards: rows go into the journal as they end, and a shard that has all its rows becomes a part."""

from __future__ import annotations

import bisect
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import pyarrow as pa

from batchspec.config import RunConfig
from batchspec.io.inputs import InputSet
from batchspec.io.journal import JournalWriter, decode_row, encode_row, is_failure, read_journal, remove_journal
from batchspec.io.reader import InputReader
from batchspec.io.schema import ResultRow, ResultSchema
from batchspec.io.store import open_store, storage_faults
from batchspec.io.writer import commit_part
from batchspec.pipeline.kept import KeptRows, load_kept_rows, remove_kept_rows
from batchspec.pipeline.messages import Shard, WorkerSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows in one input file."""

    file_index: int
    start_row: int
    num_rows: int
    first_row_index: int


def segments(inputs: InputSet, shard: Shard) -> Iterator[Segment]:
    """The pieces of the input files that make up a shard, in order."""
    first_rows = [file.first_row_index for file in inputs.files]
    file_index = max(bisect.bisect_right(first_rows, shard.start) - 1, 0)
    row_index = shard.start
    while row_index < shard.stop:
        file = inputs.files[file_index]
        start_row = row_index - file.first_row_index
        num_rows = min(file.num_rows - start_row, shard.stop - row_index)
        if num_rows > 0:
            yield Segment(file_index, start_row, num_rows, row_index)
            row_index += num_rows
        file_index += 1


def read_segments(inputs: InputSet, reader: InputReader, shard: Shard) -> Iterator[tuple[Segment, pa.RecordBatch]]:
    """The rows of a shard in batches, each with where it lies."""
    for whole in segments(inputs, shard):
        start_row = whole.start_row
        for batch in reader.iter_batches(whole.file_index, whole.start_row, whole.num_rows):
            first_row_index = whole.first_row_index + start_row - whole.start_row
            yield Segment(whole.file_index, start_row, batch.num_rows, first_row_index), batch
            start_row += batch.num_rows


@dataclass(slots=True)
class OpenShard:
    """A shard under way. `suspects` are rows that were in a worker when it died: they are decoded last, each alone.
    It `waits_for_others` once all that is left of it to admit belongs to another engine."""

    shard: Shard
    journal: JournalWriter
    records: dict[int, bytes]
    kept: KeptRows
    suspects: frozenset[int] = field(default_factory=frozenset)
    waits_for_others: bool = False

    def is_done(self, row_index: int) -> bool:
        return row_index in self.records or row_index in self.kept.row_indices

    @property
    def complete(self) -> bool:
        return len(self.records) + len(self.kept.row_indices) == self.shard.num_rows


class ShardBook:
    """The open shards of one worker."""

    def __init__(self, spec: WorkerSpec, part_metadata: Mapping[str, str]) -> None:
        self._spec = spec
        self._part_metadata = part_metadata
        self._store = open_store(spec.output)
        self._inputs = spec.inputs
        self._schema = result_schema(spec.config, spec.inputs)
        self._reader = InputReader(spec.inputs)
        self._open: dict[int, OpenShard] = {}

    def open(self, shard: Shard) -> OpenShard:
        """Take a shard on, with what earlier workers finished of it."""
        attempt, retry_errors = self._spec.attempt, self._spec.config.run.retry_errors
        with storage_faults(self._store):
            journal = read_journal(self._store, shard.index)
            kept = load_kept_rows(self._store, shard.index, self._schema)
            writer = JournalWriter(self._store, shard.index, attempt, f"w{self._spec.worker}.{os.getpid()}")
        records = {
            row_index: record
            for row_index, record in journal.records.items()
            if not (retry_errors and _is_earlier_failure(record, attempt)) and row_index not in kept.row_indices
        }
        suspects = frozenset(journal.deaths) - records.keys()
        opened = OpenShard(shard, writer, records, kept, suspects)
        self._open[shard.index] = opened
        return opened

    def finish(self, opened: OpenShard, row: ResultRow) -> bool:
        """Keep a row that has ended. True where it was the last of its shard, whose part is now there."""
        record = encode_row(row)
        with storage_faults(self._store):
            opened.journal.append(record)
        opened.records[row.outcome.row_index] = record
        return self.commit_if_complete(opened)

    def commit_if_complete(self, opened: OpenShard) -> bool:
        if not opened.complete:
            return False
        shard = opened.shard
        with storage_faults(self._store):
            metadata = {**self._part_metadata, "shard": str(shard.index)}
            ours = commit_part(self._store, shard.index, self._schema.arrow, self._tables(opened), metadata)
            if not ours:
                logger.warning("shard %d: its part was there already; ours is dropped", shard.index)
            opened.journal.close()
            remove_journal(self._store, shard.index)
            remove_kept_rows(self._store, shard.index)
        del self._open[shard.index]
        return True

    def set_aside(self, opened: OpenShard) -> None:
        """Leave an incomplete shard to another worker, with its rows so far in the journal."""
        with storage_faults(self._store):
            opened.journal.close()
        del self._open[opened.shard.index]

    def flush_if_due(self) -> None:
        for opened in list(self._open.values()):
            opened.journal.flush_if_due()

    def close(self) -> None:
        with storage_faults(self._store):
            for opened in self._open.values():
                opened.journal.close()
        self._reader.close()

    def _tables(self, opened: OpenShard) -> Iterator[pa.Table]:
        """The part, piece by piece: input rows joined with their outcomes by `row_index`, in between the kept rows."""
        for segment, batch in read_segments(self._inputs, self._reader, opened.shard):
            source_file = self._inputs.files[segment.file_index].name
            rows = range(segment.first_row_index, segment.first_row_index + segment.num_rows)
            for is_kept, run in groupby(rows, key=lambda row_index: row_index in opened.kept.row_indices):
                row_indices = list(run)
                if is_kept:
                    yield opened.kept.rows(row_indices)
                    continue
                offset = row_indices[0] - segment.first_row_index
                input_rows = pa.Table.from_batches([batch.slice(offset, len(row_indices))])
                results = [decode_row(opened.records[row_index]) for row_index in row_indices]
                yield self._schema.build_table(input_rows, source_file, segment.start_row + offset, results)


def result_schema(config: RunConfig, inputs: InputSet) -> ResultSchema:
    """The schema of every part of a run."""
    return ResultSchema(inputs.schema, config.input, config.output.output_prefix)


def _is_earlier_failure(record: bytes, attempt: int) -> bool:
    return is_failure(record) and json.loads(record)["run"]["attempt"] < attempt
