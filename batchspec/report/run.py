"""What a report is made from: the records of one finished job, and its rows as a frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from batchspec.accounting.cost import ROW_LINES
from batchspec.io.parser import text_forms
from batchspec.io.results import load_results
from batchspec.workload import RequestClassifier

ERROR_ROWS = "error"

LATENCIES = ("first_token_seconds", "time_per_output_token_seconds", "e2e_seconds", "tokens_per_target_step")
_PER_POS = ("spec_decode_num_accepted_tokens_per_pos", "num_rejections_per_pos")
_COLUMNS = (
    "method",
    "error_type",
    "output_tokens",
    "device_seconds",
    "cost_usd",
    "spec_decode_num_drafts",
    *(f"{line}_seconds" for line in ROW_LINES),
    *LATENCIES,
    *_PER_POS,
)


@dataclass(frozen=True)
class Run:
    """A finished job. `summary` is its `_SUCCESS`; `attempts` are their records, oldest first; `audit` is what
    `verify` kept, `profile` the profile that it was routed by. `rows` has one line per row, `acceptance` the tokens
    accepted and rejected at each position, by class and method (see `read_rows`)."""

    output: str
    run_id: str
    created_at: str
    summary: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    audit: Mapping[str, Any] | None
    profile: Mapping[str, Any] | None
    rows: pd.DataFrame
    acceptance: Mapping[tuple[str, str], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]

    @property
    def name(self) -> str:
        return PurePosixPath(self.output).name

    @property
    def price_per_hour(self) -> float | None:
        """What a device-hour cost on average over the attempts, USD; None where an attempt has no price."""
        cost, seconds = self.summary["cost_usd"], self.summary["device_seconds"]
        return None if cost is None or not seconds else cost / seconds * 3600


def read_rows(
    output: str, prefix: str, class_name: str
) -> tuple[pd.DataFrame, dict[tuple[str, str], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]]:
    """The rows of an output (columns without the prefix; `request_class` is the label), and by class and method how
    many proposals were accepted and rejected at each position."""
    names = [class_name, *(prefix + name for name in _COLUMNS)]
    table = load_results(output, names).select(names).rename_columns(["request_class", *_COLUMNS])
    label = RequestClassifier().label
    classes = [label(text) for text in text_forms(table.column("request_class").combine_chunks())]
    frame = table.drop_columns(["request_class", *_PER_POS]).to_pandas()
    frame.insert(0, "request_class", pd.Categorical(classes))
    frame["method"] = frame["method"].fillna(ERROR_ROWS).astype("category")
    groups = frame.groupby(["request_class", "method"], observed=True).ngroup().to_numpy()
    keys = frame[["request_class", "method"]].drop_duplicates()
    accepted, rejected = (_sum_by_position(table.column(name), groups) for name in _PER_POS)
    by_key = {
        (str(request_class), str(method)): (accepted[groups[index]], rejected[groups[index]])
        for index, request_class, method in keys.itertuples()
    }
    return frame, {key: counts for key, counts in sorted(by_key.items()) if counts[0].any() or counts[1].any()}


def _sum_by_position(lists: pa.ChunkedArray, groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counters by position, summed over the rows of each group: [groups, positions]."""
    column = lists.combine_chunks()
    lengths = np.array(column.value_lengths().fill_null(0))
    values = np.array(column.flatten())
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(values)) - np.repeat(starts, lengths)
    sums = np.zeros((groups.max(initial=-1) + 1, int(lengths.max(initial=0))), dtype=np.int64)
    np.add.at(sums, (np.repeat(groups, lengths), positions), values)
    return sums
