"""Everything a report says of one run, as strict JSON: page, terminal and notebook show these numbers and no others."""

from __future__ import annotations

from typing import Any

from batchspec.accounting.cost import ROW_LINES
from batchspec.report.drift import drift
from batchspec.report.run import ERROR_ROWS, LATENCIES, Run
from batchspec.stats import ratio

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def describe(run: Run) -> dict[str, Any]:
    """The run in numbers. Money is null without a price, a ratio without a denominator."""
    return {
        "name": run.name,
        "output": run.output,
        "run_id": run.run_id,
        "created_at": run.created_at,
        "settings": dict(run.settings),
        "answer": answer(run),
        "summary": dict(run.summary),
        "groups": _groups(run),
        "components": components(run),
        "acceptance": _acceptance(run),
        "first_rejection": _first_rejections(run),
        "latency": _latency(run),
        "timeline": _timeline(run),
        "saving": run.summary.get("saving"),
        "drift": [] if run.profile is None else drift(run.profile["acceptance"], run.acceptance),
        "audit": None if run.audit is None else dict(run.audit),
    }


def answer(run: Run) -> list[str]:
    """What one wants to know first, a sentence each: saving, money, exactness."""
    return [_speculation(run), _money(run), _exactness(run)]


def _speculation(run: Run) -> str:
    classes, saving = run.summary["classes"], run.summary.get("saving")
    num_speculating = sum(figures["spec_decode_num_drafts"] > 0 for figures in classes.values())
    if saving is not None:
        word, share = ("saved", saving["share"]) if saving["share"] >= 0 else ("lost", -saving["share"])
        low, high = sorted((saving["low"], saving["high"]), reverse=saving["share"] < 0)
        sign = 1 if saving["share"] >= 0 else -1
        return (
            f"Speculation {word} {share:.1%} ({sign * low:.1%} to {sign * high:.1%}), net of measuring it; "
            f"{num_speculating} of {len(classes)} classes speculate."
        )
    if num_speculating == 0:
        return f"No class speculates (of {len(classes)}): every row was decoded target-only."
    return (
        f"{num_speculating} of {len(classes)} classes speculate; what that saved was not measured "
        "(generate --holdout 0.02 measures it)."
    )


def _money(run: Run) -> str:
    summary = run.summary
    rows = (
        f"{summary['rows']:,} rows, {summary['error_rows']:,} of them errors, {summary['output_tokens']:,} tokens out"
    )
    if summary["cost_usd"] is None:
        return f"{rows}, {summary['device_seconds']:,.1f} device seconds; no price was given (--price-per-hour)."
    if summary["usd_per_million_output_tokens"] is None:
        return f"{rows}, {summary['cost_usd']:,.4f} USD."
    return (
        f"{rows}, {summary['cost_usd']:,.4f} USD: {summary['usd_per_million_output_tokens']:,.3f} USD per million "
        f"output tokens, {summary['active_usd_per_million_output_tokens']:,.3f} of it while rows were decoded."
    )


def _exactness(run: Run) -> str:
    audit = run.audit
    if audit is None:
        return "Not audited: `batchspec verify` checks a sample against the model."
    if audit["faults"]:
        return f"AUDIT FAILED: {audit['faults']:,} faults in {audit['tokens']:,} sampled tokens."
    return f"Audit: no fault in {audit['tokens']:,} sampled tokens ({audit['near_ties']:,} near-ties)."


def components(run: Run) -> list[dict[str, Any]]:
    """Where the metered time went: the rows of each class, every other line, the rest. They add up to the whole."""
    summary = run.summary
    seconds = {f"rows: {name}": figures["device_seconds"] for name, figures in summary["classes"].items()}
    seconds |= summary["line_device_seconds"]
    seconds["unattributed"] = summary["unattributed_seconds"]
    return [_priced(run, name, value) for name, value in seconds.items() if value or name == "unattributed"]


def _priced(run: Run, name: str, seconds: float) -> dict[str, Any]:
    price, summary = run.price_per_hour, run.summary
    cost = None if price is None else seconds / 3600 * price
    return {
        "name": name,
        "device_seconds": seconds,
        "share": ratio(seconds, summary["device_seconds"]),
        "cost_usd": cost,
        "usd_per_million_output_tokens": None if cost is None else ratio(cost * 1e6, summary["output_tokens"]),
    }


def _groups(run: Run) -> list[dict[str, Any]]:
    """Class by method: rows, tokens, and what they cost."""
    kept = ("rows", "error_rows", "output_tokens", "device_seconds", "cost_usd", "acceptance_rate")
    return [
        {
            "request_class": name,
            "method": method,
            **{key: figures[key] for key in kept},
            "share": ratio(figures["device_seconds"], run.summary["device_seconds"]),
            "tokens_per_target_step": figures["tokens_per_target_step"],
            "mean_live_sequences": figures["mean_live_sequences"],
            "usd_per_million_output_tokens": figures["active_usd_per_million_output_tokens"],
            "device_seconds_per_1000_output_tokens": ratio(figures["device_seconds"] * 1e3, figures["output_tokens"]),
            **{f"{line}_seconds": _line_seconds(run, name, method, line) for line in ROW_LINES},
        }
        for name, of_class in run.summary["classes"].items()
        for method, figures in of_class["methods"].items()
    ]


def _line_seconds(run: Run, request_class: str, method: str, line: str) -> float:
    rows = run.rows
    chosen = rows[(rows["request_class"] == request_class) & (rows["method"] == method)]
    return float(chosen[f"{line}_seconds"].sum())


def _acceptance(run: Run) -> list[dict[str, Any]]:
    """By class, method and position: proposals judged there, and the share of them that held."""
    return [
        {
            "request_class": name,
            "method": method,
            "position": position + 1,
            "judged": int(held + refused),
            "conditional_acceptance": ratio(int(held), int(held + refused)),
        }
        for (name, method), (accepted, rejected) in run.acceptance.items()
        for position, (held, refused) in enumerate(zip(accepted, rejected, strict=False))
        if held + refused
    ]


def _first_rejections(run: Run) -> list[dict[str, Any]]:
    """By method: at which position proposals were first refused; position null: nowhere before their end."""
    drafts = run.rows.groupby("method", observed=True)["spec_decode_num_drafts"].sum()
    found: list[dict[str, Any]] = []
    for method in sorted({method for _, method in run.acceptance}):
        rejected: dict[int, int] = {}
        for (_, of_group), (_, refused) in run.acceptance.items():
            if of_group == method:
                for position, count in enumerate(refused.tolist(), start=1):
                    rejected[position] = rejected.get(position, 0) + count
        num_drafts = int(drafts[method])
        counts: list[tuple[int | None, int]] = [*((p, c) for p, c in rejected.items() if c)]
        counts.append((None, num_drafts - sum(rejected.values())))
        found += [
            {"method": method, "position": position, "drafts": count, "share": ratio(count, num_drafts)}
            for position, count in counts
        ]
    return found


def _latency(run: Run) -> list[dict[str, Any]]:
    """By method, over answered rows: quantiles of waiting times, and of tokens per update (target step)."""
    answered = run.rows[run.rows["method"] != ERROR_ROWS]
    return [
        {
            "method": str(method),
            "rows": len(rows),
            **{name: {label: _number(rows[name].quantile(q)) for label, q in QUANTILES.items()} for name in LATENCIES},
        }
        for method, rows in answered.groupby("method", observed=True)
    ]


def _timeline(run: Run) -> list[dict[str, Any]]:
    """Tokens per second and live rows over the job, from the samples that attempts keep; attempts one after another."""
    points: list[dict[str, Any]] = []
    offset = 0.0
    for attempt in run.attempts:
        before = (0.0, 0, 0)
        for elapsed, rows, tokens, live in attempt["timeline"]:
            seconds = elapsed - before[0]
            points.append(
                {
                    "attempt": attempt["attempt"],
                    "seconds": offset + elapsed,
                    "rows": rows,
                    "live_rows": live,
                    "output_tokens_per_second": ratio(tokens - before[2], seconds),
                }
            )
            before = (elapsed, rows, tokens)
        offset += attempt["refreshed_at"] - attempt["started_at"]
    return points


def _number(value: Any) -> float | None:
    return None if value != value else float(value)  # NaN is the only value that differs from itself
