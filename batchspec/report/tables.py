"""A report for a terminal: the answer first, then tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchspec.report.run import LATENCIES
from batchspec.text import TABLE_WIDTH, columns, number, printable

MAX_POSITIONS = 8
SHOWN_SECONDS = 0.05
_GROUP_WIDTHS = (18, 17, -8, -11, -9, -7, -9, -9)
_LATENCY_NAMES = ("first token, s", "per output token, ms", "end to end, s", "tokens per update")


def format_report(report: Mapping[str, Any]) -> str:
    """The report (`runs`, and `comparison` of several) as text."""
    lines: list[str] = []
    if report["comparison"] is not None:
        lines += [*_comparison(report["runs"], report["comparison"]), ""]
    for run in report["runs"]:
        lines += [*_run(run), ""]
    return "\n".join(lines).rstrip()


def _run(run: Mapping[str, Any]) -> Iterator[str]:
    yield printable(f"{run['name']}: run {run['run_id']} of {run['created_at']}")
    for sentence in run["answer"]:
        yield textwrap.fill(printable(sentence), TABLE_WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield ""
    yield from _groups(run)
    yield from _time(run)
    yield from _acceptance(run)
    yield from _latency(run)
    yield from _drift(run)
    errors = run["summary"]["error_types"]
    if errors:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in errors.items())
        yield textwrap.fill(f"Error rows: {printable(kinds)}.", TABLE_WIDTH)


def _groups(run: Mapping[str, Any]) -> Iterator[str]:
    priced = run["summary"]["cost_usd"] is not None
    unit, key = (
        ("USD/M out", "usd_per_million_output_tokens")
        if priced
        else ("dev-s/1k", "device_seconds_per_1000_output_tokens")
    )
    yield columns(("class", "method", "rows", "out tokens", unit, "time", "accepted", "tok/step"), _GROUP_WIDTHS)
    for group in run["groups"]:
        cells = (
            group["request_class"],
            group["method"],
            f"{group['rows']:,}",
            f"{group['output_tokens']:,}",
            number(group[key], 3),
            _percent(group["share"]),
            number(group["acceptance_rate"], 3),
            number(group["tokens_per_target_step"], 2),
        )
        yield columns(cells, _GROUP_WIDTHS)
    yield ""


def _time(run: Mapping[str, Any]) -> Iterator[str]:
    yield columns(("metered time", "device s", "share", "USD", "USD/M out"), (28, -11, -8, -10, -10))
    for part in run["components"]:
        if abs(part["device_seconds"]) < SHOWN_SECONDS and part["name"] != "unattributed":
            continue
        cells = (
            part["name"],
            f"{part['device_seconds']:,.1f}",
            _percent(part["share"]),
            number(part["cost_usd"], 4),
            number(part["usd_per_million_output_tokens"], 3),
        )
        yield columns(cells, (28, -11, -8, -10, -10))
    yield ""


def _acceptance(run: Mapping[str, Any]) -> Iterator[str]:
    if not run["acceptance"]:
        return
    widths = (18, 17, *[-6] * MAX_POSITIONS)
    yield columns(("accepted at", "position", *map(str, range(1, MAX_POSITIONS + 1))), widths)
    for key in dict.fromkeys((a["request_class"], a["method"]) for a in run["acceptance"]):
        by_position = {
            a["position"]: a["conditional_acceptance"]
            for a in run["acceptance"]
            if (a["request_class"], a["method"]) == key
        }
        yield columns((*key, *(number(by_position.get(p + 1), 2) for p in range(MAX_POSITIONS))), widths)
    yield ""


def _latency(run: Mapping[str, Any]) -> Iterator[str]:
    widths = (20, 17, -12, -12, -12)
    yield columns(("", "method", "p50", "p95", "p99"), widths)
    for name, label in zip(LATENCIES, _LATENCY_NAMES, strict=True):
        scale = 1e3 if "ms" in label else 1.0
        for of_method in run["latency"]:
            values = [None if v is None else v * scale for v in of_method[name].values()]
            yield columns((label, of_method["method"], *(number(value, 2) for value in values)), widths)
    yield ""


def _drift(run: Mapping[str, Any]) -> Iterator[str]:
    if not run["drift"]:
        return
    widths = (18, 17, -10, -10, -10)
    yield columns(("acceptance", "method", "profile", "measured", "drift"), widths)
    for row in run["drift"]:
        change = row["measured_acceptance"] - row["profile_acceptance"]
        cells = (number(row["profile_acceptance"], 3), number(row["measured_acceptance"], 3), f"{change:+.3f}")
        yield columns((row["request_class"], row["method"], *cells), widths)
    yield ""


def _comparison(runs: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any]) -> Iterator[str]:
    width = max(10, min(16, (TABLE_WIDTH - 32) // len(runs) - 1))
    widths = (31, *[-width] * len(runs))
    yield columns(("side by side", *(_right(run["name"], width) for run in runs)), widths)
    for row in comparison["headlines"]:
        yield columns((row["name"], *(_value(value) for value in row["values"])), widths)
    for row in comparison["settings"]:
        yield columns((row["name"], *(_right(str(value), width) for value in row["values"])), widths)
    yield ""
    yield f"What changed, in {comparison['unit']}, against {printable(runs[0]['name'])}:"
    for row in (*comparison["components"], comparison["total"]):
        cells = [number(row["values"][0], 3), *(f"{change:+,.3f}" for change in row["changes"][1:])]
        yield columns((row["name"], *cells), widths)


def _right(text: str, width: int) -> str:
    return printable(text)[-width:]


def _value(value: float | int | None) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value, 3)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
