"""The plots of a report, each an SVG made from the report's numbers. Colours are Okabe and Ito's, told apart by all."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from batchspec.accounting.cost import ROW_LINES
from batchspec.report.run import LATENCIES

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#7f7f7f",
)
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)
METHOD_COLOURS = {
    "target_only": GREY,
    "prompt_lookup": BLUE,
    "draft_model": GREEN,
    "lookup_then_draft": ORANGE,
    "error": RED,
}
LINE_COLOURS = {"prefill": SKY, "draft": ORANGE, "verify": BLUE, "overhead": PURPLE}
MARKERS = "osD^vP*X"
MAX_BARS = 24
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "batchspec",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """`note` says how to read it; `wide` takes the whole width of the page."""

    title: str
    note: str
    svg: str
    wide: bool = False


def plots_of(run: Mapping[str, Any]) -> dict[str, list[Plot]]:
    """The plots of one run by section; what the run has no data for is left out."""
    with mpl.rc_context(STYLE):
        return {
            "money": [*_saving(run), _cost(run), _metered_time(run), *_drift(run)],
            "acceptance": [*_acceptance(run), *_first_rejection(run)],
            "time": [*_timeline(run), *_waiting(run)],
            "errors": [*_errors(run)],
        }


def comparison_plot(runs: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any]) -> Plot:
    """What each component adds to the price of the last run, against the first."""
    moved = [row for row in comparison["components"] if abs(row["changes"][-1]) >= 5e-4]
    rows = sorted(moved, key=lambda row: abs(row["changes"][-1]))[-MAX_BARS:]
    with mpl.rc_context(STYLE):
        figure, axes = _figure(len(rows), width=9.6)
        changes = [row["changes"][-1] for row in rows]
        bars = axes.barh(range(len(rows)), changes, color=[RED if change > 0 else BLUE for change in changes])
        axes.bar_label(bars, [f"{change:+,.3f}" for change in changes], padding=3)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.axvline(0, color="#1a1a1a", linewidth=0.8)
        axes.margins(x=0.15)
        axes.set_xlabel(comparison["unit"])
        title = f"{runs[-1]['name']} against {runs[0]['name']}"
        return Plot(title, "To the right: dearer. The bars add up to the whole change.", _svg(figure), wide=True)


def _cost(run: Mapping[str, Any]) -> Plot:
    priced = run["summary"]["cost_usd"] is not None
    key = "usd_per_million_output_tokens" if priced else "device_seconds_per_1000_output_tokens"
    groups = [group for group in run["groups"] if group[key] is not None]
    groups = sorted(groups, key=lambda group: group["device_seconds"])[-MAX_BARS:]
    groups.sort(key=lambda group: group[key])
    figure, axes = _figure(len(groups))
    left = [0.0] * len(groups)
    for line in ROW_LINES:
        parts = [g[key] * g[f"{line}_seconds"] / g["device_seconds"] if g["device_seconds"] else 0.0 for g in groups]
        axes.barh(range(len(groups)), parts, left=left, color=LINE_COLOURS[line], label=line)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    for place, group in enumerate(groups):
        axes.annotate(f"{group[key]:,.3f}", (left[place], place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(groups)), [f"{g['request_class']}\n{g['method']}" for g in groups])
    axes.margins(x=0.14)
    axes.legend(loc="lower right")
    unit = "USD per million output tokens" if priced else "device seconds per 1,000 output tokens"
    axes.set_xlabel(unit)
    return Plot(f"Cost by class and method, {unit}", "Rows' own time, by what it was spent on.", _svg(figure))


def _saving(run: Mapping[str, Any]) -> list[Plot]:
    """Shares of cost saved, of the whole job and of classes where they were measured."""
    saving = run["saving"]
    if saving is None:
        return []
    rows = [("all rows", saving), *sorted(saving.get("classes", {}).items())][::-1]
    figure, axes = _figure(len(rows))
    for place, (_, one) in enumerate(rows):
        colour = BLUE if one["low"] > 0 else RED if one["high"] < 0 else GREY
        axes.plot([one["low"] * 100, one["high"] * 100], [place, place], color=colour, linewidth=3)
        axes.plot(one["share"] * 100, place, "o", color=colour, markersize=8)
        label = f"{one['share']:+.1%}"
        axes.annotate(label, (one["high"] * 100, place), (6, 0), textcoords="offset points", va="center")
    axes.axvline(0, color="#1a1a1a", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.margins(x=0.15, y=0.3)
    axes.set_xlabel("saved, % of the cost without speculation")
    note = "Measured against blocks of steps without speculation. Lines are intervals."
    return [Plot("Saving by speculation", note, _svg(figure))]


def _drift(run: Mapping[str, Any]) -> list[Plot]:
    rows = run["drift"][:MAX_BARS][::-1]
    if not rows:
        return []
    figure, axes = _figure(len(rows))
    for place, row in enumerate(rows):
        axes.plot([row["profile_acceptance"], row["measured_acceptance"]], [place, place], color=GREY, linewidth=1.5)
    places = range(len(rows))
    axes.plot([r["profile_acceptance"] for r in rows], places, "D", color=ORANGE, label="profile", markersize=7)
    axes.plot([r["measured_acceptance"] for r in rows], places, "o", color=BLUE, label="this run", markersize=7)
    axes.set_yticks(places, [f"{row['request_class']}\n{row['method']}" for row in rows])
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.legend(loc="best")
    axes.set_xlabel("share of first proposed tokens that held")
    return [
        Plot("Drift against the profile", "A long line: the profile no longer describes the traffic.", _svg(figure))
    ]


def _acceptance(run: Mapping[str, Any]) -> list[Plot]:
    if not run["acceptance"]:
        return []
    figure, axes = _figure(8)
    axes.grid(axis="both")
    keys = list(dict.fromkeys((a["request_class"], a["method"]) for a in run["acceptance"]))
    for number, key in enumerate(keys[:MAX_BARS]):
        points = [a for a in run["acceptance"] if (a["request_class"], a["method"]) == key]
        axes.plot(
            [point["position"] for point in points],
            [point["conditional_acceptance"] for point in points],
            marker=MARKERS[number % len(MARKERS)],
            color=PALETTE[number % len(PALETTE)],
            label=f"{key[0]}, {key[1]}",
        )
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position in the proposal")
    axes.set_ylabel("accepted, of those judged")
    axes.legend(loc="lower right", fontsize=8)
    note = "Chance that a proposed token holds, given that all before it did."
    return [Plot("Acceptance by position", note, _svg(figure))]


def _first_rejection(run: Mapping[str, Any]) -> list[Plot]:
    rows = run["first_rejection"]
    if not rows:
        return []
    last = max((row["position"] or 0 for row in rows), default=0)
    figure, axes = _figure(8)
    axes.grid(axis="y")
    axes.grid(visible=False, axis="x")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        of_method = [row for row in rows if row["method"] == method]
        places = [(row["position"] or last + 1) + (number - (len(methods) - 1) / 2) * width for row in of_method]
        shares = [100 * (row["share"] or 0.0) for row in of_method]
        bars = axes.bar(places, shares, width, color=METHOD_COLOURS.get(method, SKY), label=method)
        axes.bar_label(bars, [f"{share:.0f} %" for share in shares], padding=2, fontsize=8)
    axes.set_xticks(range(1, last + 2), [*map(str, range(1, last + 1)), "none"])
    axes.set_xlabel("position of the first refused token")
    axes.set_ylabel("% of proposals")
    axes.legend(loc="best")
    return [Plot("First rejection", "None: every token held, or the row ended first.", _svg(figure))]


def _metered_time(run: Mapping[str, Any]) -> Plot:
    lines = {f"rows: {line}": sum(group[f"{line}_seconds"] for group in run["groups"]) for line in ROW_LINES}
    lines |= run["summary"]["line_device_seconds"]
    lines["unattributed"] = run["summary"]["unattributed_seconds"]
    shown = [(name, seconds) for name, seconds in lines.items() if abs(seconds) >= 5e-4][::-1]
    whole = run["summary"]["device_seconds"] or 1.0
    figure, axes = _figure(len(shown))
    colours = [LINE_COLOURS.get(name.removeprefix("rows: "), GREY) for name, _ in shown]
    bars = axes.barh(range(len(shown)), [seconds for _, seconds in shown], color=colours)
    axes.bar_label(bars, [f"{seconds:,.1f} s, {seconds / whole:.1%}" for _, seconds in shown], padding=3)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.margins(x=0.25)
    axes.set_xlabel("device seconds")
    return Plot("Metered time by line", "Coloured: decoding rows. Grey: everything else that was paid.", _svg(figure))


def _timeline(run: Mapping[str, Any]) -> list[Plot]:
    points = run["timeline"]
    if len(points) < 2:
        return []
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    speed, live = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    seconds = [point["seconds"] for point in points]
    speed.fill_between(
        seconds, [p["output_tokens_per_second"] or 0.0 for p in points], step="pre", color=BLUE, alpha=0.75
    )
    speed.set_ylabel("tokens/s")
    live.fill_between(seconds, [point["live_rows"] for point in points], step="pre", color=ORANGE, alpha=0.85)
    live.set_ylabel("live rows")
    live.set_xlabel("seconds since the job began")
    for axes in (speed, live):
        axes.grid(axis="y")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    note = "Tokens count when their row ends."
    return [Plot("Throughput and occupancy over the job", note, _svg(figure), wide=True)]


def _waiting(run: Mapping[str, Any]) -> list[Plot]:
    methods = run["latency"]
    if not methods:
        return []
    titles = ("first token, s", "per output token, ms", "end to end, s", "tokens per update")
    figure = Figure(figsize=(9.6, 1.3 + 0.42 * len(methods)), layout="constrained")
    for number, (axes, name, title) in enumerate(zip(figure.subplots(1, 4), LATENCIES, titles, strict=True)):
        for place, of_method in enumerate(methods[::-1]):
            values = [v * (1e3 if "ms" in title else 1) for v in of_method[name].values() if v is not None]
            if values:
                colour = METHOD_COLOURS.get(of_method["method"], SKY)
                axes.plot([values[0], values[-1]], [place, place], color=colour, linewidth=2)
                for value, marker in zip(values, "oDs", strict=False):
                    axes.plot(value, place, marker, color=colour, markersize=6)
        labels = [of_method["method"] for of_method in methods[::-1]] if number == 0 else [""] * len(methods)
        axes.set_yticks(range(len(methods)), labels)
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.set_xlim(left=0)
        axes.margins(x=0.1)
        axes.set_title(title, fontsize=9.5)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    return [Plot("Waiting times", "Circle p50, diamond p95, square p99, by method.", _svg(figure), wide=True)]


def _errors(run: Mapping[str, Any]) -> list[Plot]:
    kinds = sorted(run["summary"]["error_types"].items(), key=lambda item: item[1])[-MAX_BARS:]
    if not kinds:
        return []
    figure, axes = _figure(len(kinds))
    bars = axes.barh(range(len(kinds)), [count for _, count in kinds], color=RED)
    axes.bar_label(bars, [f"{count:,}" for _, count in kinds], padding=3)
    axes.set_yticks(range(len(kinds)), [kind for kind, _ in kinds])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.1)
    axes.set_xlabel("rows")
    return [Plot("Error rows by kind", "Each is a row of the output, with error_type and error_message.", _svg(figure))]


def _figure(num_bars: int, width: float = 5.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, max(2.4, 1.0 + 0.36 * num_bars)), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure) -> str:
    """The drawing without XML prolog and metadata, as it stands in a page."""
    drawn = io.StringIO()
    FigureCanvasSVG(figure).print_svg(drawn, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]
