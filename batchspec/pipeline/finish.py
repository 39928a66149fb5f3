"""The end of a job: every row is there exactly once, and the summary says what they took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import pyarrow.parquet as pq

from batchspec.accounting.summary import JobSummary
from batchspec.accounting.totals import RowTotals, sum_rows
from batchspec.config import RunConfig
from batchspec.errors import BatchspecError
from batchspec.io.inputs import InputSet
from batchspec.io.store import Store, storage_faults
from batchspec.io.writer import is_part_name, part_name
from batchspec.pipeline.attempts import Attempt
from batchspec.pipeline.plan import Manifest


def check_complete(store: Store, manifest: Manifest) -> None:
    """Raise BatchspecError, with the numbers, unless the parts hold every input row exactly once."""
    expected = {part_name(shard.index): shard.num_rows for shard in manifest.shards}
    with storage_faults(store):
        found = {name: _num_rows(store, name) for name in store.names("") if is_part_name(name)}
    wrong = [
        f"{name}: {found.get(name)} rows, {expected.get(name)} expected"
        for name in sorted(expected.keys() | found.keys())
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        raise BatchspecError(
            f"{store.root} is not whole: {'; '.join(wrong[:5])}. Run the same command again to answer what is missing."
        )


def sum_result_rows(store: Store, manifest: Manifest, config: RunConfig, inputs: InputSet) -> RowTotals:
    """The result rows of the whole job by class and method."""
    prefix, own_column = config.output.output_prefix, config.input.request_class_column
    class_column = own_column if own_column in inputs.schema.names else f"{prefix}request_class"
    with storage_faults(store):
        return sum_rows(_opened_parts(store, manifest), prefix=prefix, class_column=class_column)


def job_summary(rows: RowTotals, attempts: Sequence[Attempt], output: str) -> JobSummary:
    """The whole job. What the batch was, and whether results depend on it, is said of all engines that took part."""
    engines = [engine for attempt in attempts for engine in attempt.engines]
    invariances = {engine["batch_invariant"] for engine in engines}
    return JobSummary(
        rows=rows,
        attempts=[attempt.time for attempt in attempts],
        output=output,
        batch_invariant=False if False in invariances else invariances == {True} or None,
        max_batch=max((engine["max_batch"] for engine in engines), default=None),
    )


def _num_rows(store: Store, name: str) -> int:
    with store.open(name) as file:
        return int(pq.read_metadata(file).num_rows)


def _opened_parts(store: Store, manifest: Manifest) -> Iterator[BinaryIO]:
    for shard in manifest.shards:
        with store.open(part_name(shard.index)) as file:
            yield file
