"""Result rows summed by class and method, read back from the parts of an output.

Parts are read one at a time, counters and times only, so memory does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchspec.accounting.cost import usd_per_million
from batchspec.io.parser import text_forms
from batchspec.stats import DecodeStats, ratio
from batchspec.workload import RequestClassifier

ERROR_ROWS = "error"
"""Stands where the method would, for rows that could not be answered."""

_KEYS = ("request_class", "method", "error_type")
_SUMMED = (
    "input_tokens",
    "output_tokens",
    "num_target_steps",
    "num_draft_steps",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "num_discarded_tokens",
    "device_seconds",
    "cost_usd",
)
_TOTALS = ("rows", "rows_without_cost", "live_sequence_steps", *_SUMMED)
_PARTS_PER_MERGE = 64


@dataclass(frozen=True, slots=True)
class Totals:
    """Some rows of a job, summed. Tokens are those of answered rows; seconds and cost include error rows.

    `stats` has no counters by position. `cost_usd` is None where any of the rows has no price.
    """

    rows: int = 0
    error_rows: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    device_seconds: float = 0.0
    cost_usd: float | None = 0.0
    live_sequence_steps: float = 0.0
    stats: DecodeStats = field(default_factory=DecodeStats)

    def __add__(self, other: Totals) -> Totals:
        unpriced = self.cost_usd is None or other.cost_usd is None
        return Totals(
            rows=self.rows + other.rows,
            error_rows=self.error_rows + other.error_rows,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            device_seconds=self.device_seconds + other.device_seconds,
            cost_usd=None if unpriced else (self.cost_usd or 0.0) + (other.cost_usd or 0.0),
            live_sequence_steps=self.live_sequence_steps + other.live_sequence_steps,
            stats=self.stats + other.stats,
        )

    @property
    def mean_live_sequences(self) -> float | None:
        """The batch that a target step of these rows ran in, on average over the rows' steps."""
        return ratio(self.live_sequence_steps, self.stats.num_target_steps)

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "error_rows": self.error_rows,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_device_second": ratio(self.output_tokens, self.device_seconds),
            "num_target_steps": self.stats.num_target_steps,
            "spec_decode_num_drafts": self.stats.num_drafts,
            "spec_decode_num_draft_tokens": self.stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.stats.num_accepted_tokens,
            "acceptance_rate": self.stats.acceptance_rate,
            "mean_acceptance_length": self.stats.mean_acceptance_length,
            "tokens_per_target_step": self.stats.tokens_per_target_step(self.output_tokens),
            "mean_live_sequences": self.mean_live_sequences,
            "device_seconds": self.device_seconds,
            "cost_usd": self.cost_usd,
            "active_usd_per_million_output_tokens": usd_per_million(self.cost_usd, self.output_tokens),
        }


@dataclass(frozen=True, slots=True)
class RowTotals:
    """All rows of an output: by (class, method), and the number of error rows of each kind."""

    groups: Mapping[tuple[str, str], Totals] = field(default_factory=dict)
    error_types: Mapping[str, int] = field(default_factory=dict)

    @property
    def job(self) -> Totals:
        return sum(self.groups.values(), start=Totals())

    def by_class(self) -> dict[str, Totals]:
        return self._by(0)

    def by_method(self) -> dict[str, Totals]:
        return self._by(1)

    def _by(self, key: int) -> dict[str, Totals]:
        merged: dict[str, Totals] = {}
        for names, totals in self.groups.items():
            merged[names[key]] = merged.get(names[key], Totals()) + totals
        return merged


def sum_rows(
    parts: Iterable[str | Path | BinaryIO], *, prefix: str = "", class_column: str = "request_class"
) -> RowTotals:
    """Sum the result rows of `parts`, taken one at a time, by class and method.

    `prefix` stands before the result columns' names; `class_column` is the whole name of the column with the classes
    (the input's own, where it has one).
    """
    columns = {"request_class": class_column} | {
        name: prefix + name for name in ("method", "error_type", "mean_live_sequences", *_SUMMED)
    }
    sums: list[pa.Table] = []
    for part in parts:
        with pq.ParquetFile(part) as file:
            table = file.read(columns=list(columns.values()))
        sums.append(_sum_by_key(_totals_of_rows({name: table[column] for name, column in columns.items()})))
        if len(sums) == _PARTS_PER_MERGE:
            sums = [_sum_by_key(pa.concat_tables(sums))]
    if not sums:
        return RowTotals()
    return _row_totals(_sum_by_key(pa.concat_tables(sums)).to_pylist())


def _totals_of_rows(columns: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    """Result rows as totals of one row each."""
    label = RequestClassifier().label
    classes = text_forms(columns["request_class"].combine_chunks())
    is_error = pc.is_valid(columns["error_type"])
    totals = {name: columns[name].fill_null(0) for name in _SUMMED}
    for name in ("input_tokens", "output_tokens"):
        totals[name] = pc.if_else(is_error, 0, totals[name])
    live_sequences = columns["mean_live_sequences"].fill_null(0.0)
    return pa.table(
        {
            "request_class": pa.array([label(text) for text in classes], pa.string()),
            "method": pc.if_else(is_error, ERROR_ROWS, columns["method"].cast(pa.string())),
            "error_type": columns["error_type"].cast(pa.string()),
            "rows": pa.repeat(1, len(is_error)),
            "rows_without_cost": columns["cost_usd"].is_null().cast(pa.int64()),
            "live_sequence_steps": pc.multiply(live_sequences, totals["num_target_steps"].cast(pa.float64())),
            **totals,
        }
    )


def _sum_by_key(totals: pa.Table) -> pa.Table:
    summed = totals.group_by(list(_KEYS)).aggregate([(name, "sum") for name in _TOTALS])
    return pa.table({name: summed[name] for name in _KEYS} | {name: summed[f"{name}_sum"] for name in _TOTALS})


def _row_totals(summed: Iterable[Mapping[str, Any]]) -> RowTotals:
    groups: dict[tuple[str, str], Totals] = {}
    error_types: dict[str, int] = {}
    for record in sorted(summed, key=lambda record: [str(record[key] or "") for key in _KEYS]):
        error_type = record["error_type"]
        if error_type is not None:
            error_types[error_type] = error_types.get(error_type, 0) + record["rows"]
        totals = Totals(
            rows=record["rows"],
            error_rows=record["rows"] if error_type is not None else 0,
            input_tokens=record["input_tokens"],
            output_tokens=record["output_tokens"],
            device_seconds=record["device_seconds"],
            cost_usd=None if record["rows_without_cost"] else record["cost_usd"],
            live_sequence_steps=record["live_sequence_steps"],
            stats=DecodeStats(
                num_target_steps=record["num_target_steps"],
                num_draft_steps=record["num_draft_steps"],
                num_drafts=record["spec_decode_num_drafts"],
                num_draft_tokens=record["spec_decode_num_draft_tokens"],
                num_accepted_tokens=record["spec_decode_num_accepted_tokens"],
                num_discarded_tokens=record["num_discarded_tokens"],
            ),
        )
        key = (record["request_class"], record["method"])
        groups[key] = groups.get(key, Totals()) + totals
    return RowTotals(groups, error_types)
