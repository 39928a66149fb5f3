"""The end of a job: every row is there exactly once, and the summary, which is published, says what they took."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pyarrow.parquet as pq

from batchspec.accounting.cost import ROW_LINES
from batchspec.accounting.saving import Spent, measured_saving
from batchspec.accounting.summary import JobSummary
from batchspec.accounting.table import format_table
from batchspec.accounting.totals import RowTotals, sum_rows
from batchspec.accounting.usage import Usage, combine
from batchspec.config import RunConfig
from batchspec.errors import BatchspecError, TooManyErrorRows
from batchspec.io.inputs import InputSet
from batchspec.io.store import Store, storage_faults
from batchspec.io.writer import is_part_name, part_name
from batchspec.pipeline.attempts import Attempt
from batchspec.pipeline.plan import Manifest, json_line
from batchspec.pipeline.profiling import read_profile_copy
from batchspec.profile.predict import predicted_tokens_per_step
from batchspec.profile.routing import job_policy
from batchspec.types import Method


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


def charge_killed_attempts(
    store: Store, manifest: Manifest, attempts: Sequence[Attempt], config: RunConfig
) -> list[Attempt]:
    """The attempts as they have to be counted. A killed attempt's record is some seconds old, and rows that ended
    after it prove that more time was metered: their seconds are added."""
    if all(attempt.end_reason is not None for attempt in attempts):
        return list(attempts)
    row_seconds = _row_seconds_by_attempt(store, manifest, config.output.output_prefix)
    return [
        attempt if attempt.end_reason is not None else _with_row_seconds(attempt, row_seconds.get(attempt.attempt, 0.0))
        for attempt in attempts
    ]


def job_summary(rows: RowTotals, attempts: Sequence[Attempt], store: Store) -> JobSummary:
    """The whole job. What the batch was, and whether results depend on it, is said of all engines that took part."""
    engines = [engine for attempt in attempts for engine in attempt.engines]
    pairs = [pair for attempt in attempts for pair in attempt.holdout_pairs]
    held_share = sum(held_tokens for held_tokens, *_ in pairs) / max(1, rows.job.output_tokens)
    invariances = {engine["batch_invariant"] for engine in engines}
    return JobSummary(
        rows=rows,
        attempts=[attempt.time for attempt in attempts],
        output=store.root,
        batch_invariant=False if False in invariances else invariances == {True} or None,
        saving=measured_saving(pairs, held_share, _spent(attempts)),
        predicted_tokens_per_target_step=_predicted(rows, store),
        usage=combine(Usage(**attempt.usage) for attempt in attempts),
        max_batch=max((engine["max_batch"] for engine in engines), default=None),
    )


def _predicted(rows: RowTotals, store: Store) -> dict[str, float]:
    """What the profile that the output keeps expects of each class, at the mean number of live rows."""
    profile, live = read_profile_copy(store), rows.job.mean_live_sequences
    if profile is None or live is None:
        return {}
    methods = frozenset(Method(cell.method) for cell in profile.acceptance)
    policy = job_policy(profile, methods, profile.max_batch, rows.job.rows)
    return predicted_tokens_per_step(profile, {label: policy.route(label, round(live)) for label in rows.by_class()})


def _spent(attempts: Sequence[Attempt]) -> Spent:
    lines: Counter[str] = Counter()
    for attempt in attempts:
        lines.update(attempt.line_seconds)
    decode_seconds = sum(lines[line] for line in ROW_LINES if line != "prefill")
    return Spent(sum(attempt.metered_seconds for attempt in attempts), decode_seconds, lines["profile"])


def _row_seconds_by_attempt(store: Store, manifest: Manifest, prefix: str) -> Counter[int]:
    seconds: Counter[int] = Counter()
    columns = [f"{prefix}attempt", f"{prefix}device_seconds"]
    with storage_faults(store):
        for file in _opened_parts(store, manifest):
            table = pq.read_table(file, columns=columns).rename_columns(["attempt", "seconds"])
            for sums in table.group_by("attempt").aggregate([("seconds", "sum")]).to_pylist():
                seconds[sums["attempt"]] += sums["seconds_sum"]
    return seconds


def _with_row_seconds(attempt: Attempt, row_seconds: float) -> Attempt:
    lines = dict(attempt.line_seconds)
    missing = max(0.0, row_seconds - sum(lines.get(line, 0.0) for line in ROW_LINES))
    lines[ROW_LINES[0]] = lines.get(ROW_LINES[0], 0.0) + missing
    return replace(attempt, metered_seconds=attempt.metered_seconds + missing, line_seconds=lines)


def _num_rows(store: Store, name: str) -> int:
    with store.open(name) as file:
        return int(pq.read_metadata(file).num_rows)


def _opened_parts(store: Store, manifest: Manifest) -> Iterator[BinaryIO]:
    for shard in manifest.shards:
        with store.open(part_name(shard.index)) as file:
            yield file


def refuse_too_many_errors(summary: JobSummary, max_error_rate: float) -> None:
    """Raise TooManyErrorRows where more than this share of a finished job's rows are error rows."""
    job = summary.rows.job
    if job.error_rows > max_error_rate * job.rows:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.rows.error_types.items())
        raise TooManyErrorRows(
            f"{job.error_rows} of {job.rows} rows are error rows ({kinds}), more than --max-error-rate "
            f"{max_error_rate:g} allows. Every row is in {summary.output}: see error_type and error_message there."
        )


def publish_summary(summary: JobSummary, summary_file: str | None) -> None:
    """Print the summary: a table on stderr, and JSON as the last line of stdout and into a file where one is named."""
    figures = summary.as_json()
    line = json_line(figures)
    print(format_table(figures), file=sys.stderr)
    sys.stdout.write(line)
    sys.stdout.flush()
    if summary_file is not None:
        try:
            Path(summary_file).expanduser().write_text(line, encoding="utf-8")
        except OSError as error:
            raise BatchspecError(f"cannot write --summary-file {summary_file}: {error.strerror}") from error
