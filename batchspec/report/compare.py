"""Several runs side by side: what changed, in money per million output tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADLINES = (
    ("rows", "rows"),
    ("error_rows", "error rows"),
    ("output_tokens", "output tokens"),
    ("cost_usd", "cost, USD"),
    ("usd_per_million_output_tokens", "USD per million output tokens"),
    ("active_usd_per_million_output_tokens", "  of it while rows were decoded"),
    ("device_seconds", "device seconds"),
    ("output_tokens_per_second", "output tokens per second"),
    ("tokens_per_target_step", "tokens per target step"),
    ("acceptance_rate", "acceptance rate"),
    ("max_batch", "largest batch"),
)


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The runs (as `describe` gives them) against the first of them; None for a single run.

    `components` add up to the whole price of a million output tokens, so their changes add up to its change. A
    component that a run does not have is 0 there. Without prices they are device seconds per million output tokens.
    """
    if len(runs) < 2:
        return None
    priced = all(run["summary"]["usd_per_million_output_tokens"] is not None for run in runs)
    per_million = [_per_million(run, priced) for run in runs]
    names = list(dict.fromkeys(name for components in per_million for name in components))
    return {
        "unit": "USD per million output tokens" if priced else "device seconds per million output tokens",
        "headlines": [{"name": label, "values": [run["summary"][key] for run in runs]} for key, label in HEADLINES],
        "saving": [run["saving"] for run in runs],
        "components": [_change(name, [c.get(name, 0.0) for c in per_million]) for name in names],
        "total": _change("total", [sum(c.values()) for c in per_million]),
        "settings": _changed_settings(runs),
    }


def _per_million(run: Mapping[str, Any], priced: bool) -> dict[str, float]:
    tokens = run["summary"]["output_tokens"]
    if priced:
        return {c["name"]: c["usd_per_million_output_tokens"] for c in run["components"]}
    return {c["name"]: c["device_seconds"] * 1e6 / max(tokens, 1) for c in run["components"]}


def _change(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {"name": name, "values": list(values), "changes": [value - values[0] for value in values]}


def _changed_settings(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for run in runs for name in run["settings"]))
    rows = [{"name": name, "values": [run["settings"].get(name) for run in runs]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]
