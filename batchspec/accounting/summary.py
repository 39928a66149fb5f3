"""The summary of a job: its rows by class and method, beside the metered time and its cost."""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from batchspec.accounting.cost import Ledger, MeteredTime, cost_usd, usd_per_million
from batchspec.accounting.totals import RowTotals, Totals, sum_rows
from batchspec.stats import ratio

TABLE_WIDTH = 100
MAX_TABLE_ROWS = 40


@dataclass(frozen=True, slots=True)
class AttemptTime:
    """What one attempt at the job took: wall clock, device seconds of all its workers, and its price (USD per
    device-hour). `decode_wall_seconds` runs from the first row admitted to the last row retired."""

    wall_seconds: float
    decode_wall_seconds: float
    metered: MeteredTime
    price_per_hour: float | None = None

    @property
    def cost_usd(self) -> float | None:
        return cost_usd(self.metered.total_seconds, self.price_per_hour)


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The whole job: its rows, and the attempts that made them."""

    rows: RowTotals
    attempts: Sequence[AttemptTime]
    output: str
    batch_invariant: bool | None
    max_batch: int | None

    @property
    def wall_seconds(self) -> float:
        return sum(attempt.wall_seconds for attempt in self.attempts)

    @property
    def decode_wall_seconds(self) -> float:
        return sum(attempt.decode_wall_seconds for attempt in self.attempts)

    @property
    def output_tokens_per_second(self) -> float | None:
        return ratio(self.rows.job.output_tokens, self.decode_wall_seconds)

    @property
    def ledger(self) -> Ledger:
        metered = sum((attempt.metered for attempt in self.attempts), start=MeteredTime())
        return Ledger.balance(metered, self.rows.job.device_seconds)

    @property
    def cost_usd(self) -> float | None:
        """All metered time at the price of its attempt; None where an attempt has no price."""
        costs = [attempt.cost_usd for attempt in self.attempts]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if known and len(known) == len(costs) else None

    @property
    def prices_per_million(self) -> dict[str, float | None]:
        """USD per million tokens: over all metered time, and (`active_`) over the time of rows alone."""
        job = self.rows.job
        tokens = {
            "output": job.output_tokens,
            "input": job.input_tokens,
            "total": job.input_tokens + job.output_tokens,
        }
        active_cost = job.cost_usd if self.cost_usd is not None else None
        return {
            **{f"usd_per_million_{kind}_tokens": usd_per_million(self.cost_usd, n) for kind, n in tokens.items()},
            **{f"active_usd_per_million_{kind}_tokens": usd_per_million(active_cost, n) for kind, n in tokens.items()},
        }

    def as_json(self) -> dict[str, Any]:
        """The summary as strict JSON values: null where something is not known, never NaN."""
        job, ledger = self.rows.job, self.ledger
        groups = self.rows.groups
        return {
            "rows": job.rows,
            "error_rows": job.error_rows,
            "error_types": dict(self.rows.error_types),
            "input_tokens": job.input_tokens,
            "output_tokens": job.output_tokens,
            "wall_seconds": self.wall_seconds,
            "decode_wall_seconds": self.decode_wall_seconds,
            "output_tokens_per_second": self.output_tokens_per_second,
            "max_batch": self.max_batch,
            "mean_live_sequences": job.mean_live_sequences,
            "acceptance_rate": job.stats.acceptance_rate,
            "tokens_per_target_step": job.stats.tokens_per_target_step(job.output_tokens),
            "device_seconds": ledger.metered_seconds,
            "row_device_seconds": ledger.row_seconds,
            "line_device_seconds": dict(ledger.line_seconds),
            "unattributed_seconds": ledger.unattributed_seconds,
            "unattributed_share": ledger.unattributed_share,
            "price_per_hour": sorted({a.price_per_hour for a in self.attempts if a.price_per_hour is not None}),
            "cost_usd": self.cost_usd,
            **self.prices_per_million,
            "methods": {name: totals.as_json() for name, totals in self.rows.by_method().items()},
            "classes": {
                name: totals.as_json()
                | {"methods": {method: groups[key, method].as_json() for key, method in groups if key == name}}
                for name, totals in self.rows.by_class().items()
            },
            "batch_invariant": self.batch_invariant,
            "attempts": len(self.attempts),
            "output": self.output,
        }

    def to_line(self) -> str:
        """One line of strict JSON."""
        return json.dumps(self.as_json(), allow_nan=False, ensure_ascii=False)


def summarize(
    parts: Iterable[str | Path | BinaryIO],
    attempts: Sequence[AttemptTime],
    output: str,
    *,
    batch_invariant: bool | None = None,
    max_batch: int | None = None,
    prefix: str = "",
    class_column: str = "request_class",
) -> JobSummary:
    """Sum the result rows of `parts` (see `sum_rows`) and set them beside the time of the attempts that made them."""
    rows = sum_rows(parts, prefix=prefix, class_column=class_column)
    return JobSummary(rows, tuple(attempts), output, batch_invariant, max_batch)


def format_table(summary: JobSummary) -> str:
    """The summary for a terminal: a table by class and method, and what it adds up to, at most 100 columns wide."""
    job, ledger = summary.rows.job, summary.ledger
    lines = [
        _table_line("class", "method", ("rows", "out tokens", "tok/dev-s", "accepted", "tok/step", "USD/M out")),
        *(_totals_line(names, totals) for names, totals in _shown_groups(summary.rows.groups)),
        _totals_line(("all rows", ""), job),
        "",
    ]
    notes = [
        f"{job.rows:,} rows, {job.error_rows:,} of them errors; {job.input_tokens:,} input and "
        f"{job.output_tokens:,} output tokens in {summary.decode_wall_seconds:.1f} s of decoding "
        f"({summary.wall_seconds:.1f} s in all): {_number(summary.output_tokens_per_second, 1)} tokens/s.",
        f"Batch: at most {summary.max_batch or '-'}, {_number(job.mean_live_sequences, 1)} live on average; "
        f"results independent of it (batch_invariant): {_yes_no(summary.batch_invariant)}.",
        f"Metered: {ledger.metered_seconds:.1f} device seconds = {ledger.row_seconds:.1f} rows + "
        + " + ".join(f"{seconds:.1f} {name}" for name, seconds in ledger.line_seconds.items())
        + f" + {ledger.unattributed_seconds:.1f} unattributed.",
        _cost_note(summary),
    ]
    if summary.rows.error_types:
        kinds = ", ".join(f"{_printable(kind)} {count:,}" for kind, count in summary.rows.error_types.items())
        notes.append(f"Error rows: {kinds}.")
    for note in notes:
        lines += textwrap.wrap(note, TABLE_WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _shown_groups(groups: Mapping[tuple[str, str], Totals]) -> list[tuple[tuple[str, str], Totals]]:
    """The groups that took most device time, in the order of their names, and the sum of the others."""
    by_time = sorted(groups.items(), key=lambda item: item[1].device_seconds, reverse=True)
    shown = sorted(by_time[:MAX_TABLE_ROWS], key=lambda item: item[0])
    rest = by_time[MAX_TABLE_ROWS:]
    if rest:
        shown.append(((f"({len(rest)} smaller)", ""), sum((totals for _, totals in rest), start=Totals())))
    return shown


def _totals_line(names: tuple[str, str], totals: Totals) -> str:
    figures = totals.as_json()
    cells = (
        f"{totals.rows:,}",
        f"{totals.output_tokens:,}",
        _number(figures["output_tokens_per_device_second"], 1),
        _number(figures["acceptance_rate"], 3),
        _number(figures["tokens_per_target_step"], 2),
        _number(figures["active_usd_per_million_output_tokens"], 3),
    )
    return _table_line(*names, cells)


def _table_line(name: str, method: str, cells: Sequence[str]) -> str:
    widths = (10, 14, 9, 8, 8, 9)
    right = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{_fit(_printable(name), 18)} {_fit(method, 17)} {right}".rstrip()


def _printable(text: str) -> str:
    """Labels come from the input: keep control characters away from the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _fit(text: str, width: int) -> str:
    """`text` in exactly `width` columns; wide characters take two of them."""
    kept, used = "", 0
    total = sum(_columns(char) for char in text)
    for char in text:
        if used + _columns(char) > width - (total > width):
            return kept + "…" + " " * (width - used - 1)
        kept, used = kept + char, used + _columns(char)
    return kept + " " * (width - used)


def _columns(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]


def _cost_note(summary: JobSummary) -> str:
    if summary.cost_usd is None:
        return "Cost: not known; give --price-per-hour (USD per device-hour)."
    prices = summary.prices_per_million
    return (
        f"Cost: {summary.cost_usd:,.4f} USD; per million output tokens "
        f"{_number(prices['usd_per_million_output_tokens'], 3)} over all metered time, "
        f"{_number(prices['active_usd_per_million_output_tokens'], 3)} over the rows' time."
    )
