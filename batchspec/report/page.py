"""A report as one self-contained page: no network, no script, plots as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchspec.errors import MissingDependencyError
from batchspec.report.run import LATENCIES
from batchspec.text import number

LATENCY_LABELS = (
    ("first token, s", 1.0),
    ("per output token, ms", 1e3),
    ("end to end, s", 1.0),
    ("tokens per update", 1.0),
)


def render(report: Mapping[str, Any]) -> str:
    """The page. Raises MissingDependencyError without the `report` extra."""
    try:
        import jinja2
        import markupsafe

        from batchspec.report import plots
    except ImportError as error:
        raise MissingDependencyError(
            f"--html needs {error.name}: pip install 'batchspec[report]' (jinja2 and matplotlib)"
        ) from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "number": number,
        "signed": lambda value, digits: f"{value:+,.{digits}f}",
        "percent": lambda share: "-" if share is None else f"{share:.1%}",
        "cell": _cell,
        "last_part": lambda path: str(path).rstrip("/").rsplit("/", 1)[-1],
    }

    def figure(plot: plots.Plot) -> markupsafe.Markup:
        template = (
            '<figure{wide} role="img" aria-label="{title}. {note}"><figcaption>{title}<small>{note}</small>'
            "</figcaption>{svg}</figure>"
        )
        wide = markupsafe.Markup(' class="wide"' if plot.wide else "")
        return markupsafe.Markup(template).format(
            wide=wide, title=plot.title, note=plot.note, svg=markupsafe.Markup(plot.svg)
        )

    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    comparison = report["comparison"]
    return environment.from_string(source).render(
        runs=[_shown(run, plots.plots_of(run)) for run in report["runs"]],
        comparison=comparison,
        comparison_plot=plots.comparison_plot(report["runs"], comparison) if comparison else None,
        verdict=verdict(report) if comparison else "",
        figure=figure,
    )


def verdict(report: Mapping[str, Any]) -> str:
    """What the last run costs against the first, in a sentence."""
    total, runs, unit = report["comparison"]["total"], report["runs"], report["comparison"]["unit"]
    first, last, change = total["values"][0], total["values"][-1], total["changes"][-1]
    if not first or abs(change) < 0.0005 * first:
        return f"{runs[-1]['name']} costs what {runs[0]['name']} cost: {last:,.3f} {unit}."
    most = max(report["comparison"]["components"], key=lambda row: row["changes"][-1] * (1 if change > 0 else -1))
    relation = f"{change / first:.1%} more than" if change > 0 else f"{-change / first:.1%} less than"
    if last > 2 * first:
        relation = f"{last / first:.1f} times as much as"
    return (
        f"{runs[-1]['name']} costs {relation} {runs[0]['name']}: {last:,.3f} instead of "
        f"{first:,.3f} {unit}, most of it in {most['name']} ({most['changes'][-1]:+,.3f})."
    )


def _shown(run: Mapping[str, Any], plots: Mapping[str, Any]) -> dict[str, Any]:
    summary = run["summary"]
    priced = summary["cost_usd"] is not None
    cards = [
        (number(summary["usd_per_million_output_tokens"], 3), "USD per million output tokens, all metered time"),
        (number(summary["active_usd_per_million_output_tokens"], 3), "USD per million while rows were decoded"),
        (number(summary["cost_usd"], 4), "USD in all"),
        (number(summary["output_tokens_per_second"], 1), "output tokens per second while decoding"),
        (number(summary["tokens_per_target_step"], 2), "tokens per target step"),
        (f"{summary['error_rows']:,} of {summary['rows']:,}", "error rows"),
    ]
    return {
        **run,
        "plots": plots,
        "cards": [{"value": value, "label": label} for value, label in cards if value != "-"],
        "unit": "USD per million tokens" if priced else "device seconds per 1,000 tokens",
        "unit_key": "usd_per_million_output_tokens" if priced else "device_seconds_per_1000_output_tokens",
        "waiting": [
            {
                "label": label,
                "method": of_method["method"],
                "values": [None if v is None else v * scale for v in of_method[name].values()],
            }
            for name, (label, scale) in zip(LATENCIES, LATENCY_LABELS, strict=True)
            for of_method in run["latency"]
        ],
    }


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value, 3)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
