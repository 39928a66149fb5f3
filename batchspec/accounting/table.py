"""A job's summary for a terminal. It is made from the JSON summary, so a stored one reads like a fresh one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from batchspec.text import TABLE_WIDTH, fit, number, printable

MAX_TABLE_ROWS = 40
_HEADINGS = ("rows", "out tokens", "tok/dev-s", "accepted", "tok/step", "USD/M out")
_CELL_WIDTHS = (10, 14, 9, 8, 8, 9)


def format_table(summary: Mapping[str, Any]) -> str:
    """A table by class and method and what it adds up to, at most 100 columns wide.

    `tok/dev-s` are output tokens per device second of the rows, `USD/M out` is the cost of that time per million.
    """
    lines = [
        _line("class", "method", _HEADINGS),
        *_group_lines(summary["classes"]),
        _line("all rows", "", _cells(summary)),
        "",
    ]
    for note in _notes(summary):
        lines += textwrap.wrap(note, TABLE_WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _group_lines(classes: Mapping[str, Any]) -> list[str]:
    """The groups that took most device time, in the order of their names, and how many others there are."""
    groups = [
        (name, method, figures) for name, of_class in classes.items() for method, figures in of_class["methods"].items()
    ]
    by_time = sorted(groups, key=lambda group: group[2]["device_seconds"], reverse=True)
    lines = [
        _line(name, method, _cells(figures)) for name, method, figures in sorted(by_time[:MAX_TABLE_ROWS], key=_names)
    ]
    smaller = [figures for _, _, figures in by_time[MAX_TABLE_ROWS:]]
    if smaller:
        counts = (f"{sum(figures[name] for figures in smaller):,}" for name in ("rows", "output_tokens"))
        lines.append(_line(f"({len(smaller)} smaller)", "", (*counts, "", "", "", "")))
    return lines


def _names(group: tuple[str, str, Any]) -> tuple[str, str]:
    return group[:2]


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{figures['rows']:,}",
        f"{figures['output_tokens']:,}",
        number(figures["output_tokens_per_device_second"], 1),
        number(figures["acceptance_rate"], 3),
        number(figures["tokens_per_target_step"], 2),
        number(figures["active_usd_per_million_output_tokens"], 3),
    )


def _line(name: str, method: str, cells: Sequence[str]) -> str:
    right = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _CELL_WIDTHS, strict=True))
    return f"{fit(printable(name), 18)} {fit(method, 17)} {right}".rstrip()


def _notes(summary: Mapping[str, Any]) -> list[str]:
    yes_no = {True: "yes", False: "no", None: "not known"}
    device_seconds = [
        f"{summary['row_device_seconds']:.1f} rows",
        *(f"{seconds:.1f} {name}" for name, seconds in summary["line_device_seconds"].items()),
        f"{summary['unattributed_seconds']:.1f} unattributed",
    ]
    notes = [
        f"{summary['rows']:,} rows, {summary['error_rows']:,} of them errors; {summary['input_tokens']:,} input and "
        f"{summary['output_tokens']:,} output tokens in {summary['decode_wall_seconds']:.1f} s of decoding "
        f"({summary['wall_seconds']:.1f} s in all): {number(summary['output_tokens_per_second'], 1)} tokens/s.",
        f"Batch: at most {summary['max_batch'] or '-'}, {number(summary['mean_live_sequences'], 1)} live on average, "
        f"{summary['peak_live_sequences'] or '-'} at the peak; results independent of it (batch_invariant): "
        f"{yes_no[summary['batch_invariant']]}.",
        f"Metered: {summary['device_seconds']:.1f} device seconds = {' + '.join(device_seconds)}.",
    ]
    if summary["cost_usd"] is None:
        notes.append("Cost: not known; give --price-per-hour (USD per device-hour).")
    else:
        notes.append(
            f"Cost: {summary['cost_usd']:,.4f} USD; per million output tokens "
            f"{number(summary['usd_per_million_output_tokens'], 3)} over all metered time, "
            f"{number(summary['active_usd_per_million_output_tokens'], 3)} over the rows' time."
        )
    if summary["saving"] is not None:
        saving = summary["saving"]
        notes.append(
            f"Saved: {saving['share']:.1%} of what target-only would have taken (90 % interval {saving['low']:.1%} to "
            f"{saving['high']:.1%}, {saving['pairs']} held-out blocks; net of measuring)."
        )
    if summary["error_types"]:
        kinds = ", ".join(f"{printable(kind)} {count:,}" for kind, count in summary["error_types"].items())
        notes.append(f"Error rows: {kinds}.")
    if summary["peak_memory_bytes"] is not None:
        count = summary["num_preemptions"]
        waited = f"; {count:,} times a row gave its KV cache back" if count else ""
        notes.append(f"Memory: a worker held up to {summary['peak_memory_bytes'] / 2**30:.1f} GiB{waited}.")
    return [*notes, *(f"Route: {event}." for event in summary["route_events"])]
