"""A profile in words and tables: the verdict first."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import takewhile

from batchspec.profile.curves import depth_curves, occupancies, occupancy_curves
from batchspec.profile.marginal import Decision
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.records import Profile, Trial
from batchspec.profile.routing import job_policy
from batchspec.types import Method

_SHORT = {Method.PROMPT_LOOKUP: "lookup", Method.DRAFT_MODEL: "draft", Method.LOOKUP_THEN_DRAFT: "both"}


def format_profile(profile: Profile, methods: frozenset[Method]) -> str:
    """The verdict, then the routes by class and live rows, then the trials. At most 100 columns for usual labels."""
    lines = _phase_lines(profile, methods) if profile.one_route_per_engine else _route_lines(profile, methods)
    lines += ["", *_occupancy_lines(profile, methods), "", *_depth_lines(profile, methods)]
    return "\n".join([*lines, "", *_sample_lines(profile), *map(_trial, profile.trials)])


def _route_lines(profile: Profile, methods: frozenset[Method]) -> list[str]:
    """Where every step takes the routes of its live rows."""
    policy = MeasuredPolicy(profile, methods, profile.max_batch)
    counts = occupancies(profile.max_batch)
    table = [policy.decisions(count) for count in counts]
    labels = [sample.request_class for sample in profile.samples]
    lines = [verdict(table, counts, labels), ""]
    width = max(len(label) for label in [*labels, "class", "break-even"])
    lines.append(f"{'live rows':<{width}}  " + "".join(f"{count:>14}" for count in counts))
    lines.append(f"{'break-even':<{width}}  " + "".join(f"{row[ANY_CLASS].break_even:>14.2f}" for row in table))
    lines += [f"{label:<{width}}  " + "".join(f"{_cell(row[label]):>14}" for row in table) for label in labels]
    return [
        *lines,
        "",
        "cells: method, most tokens proposed, acceptance of the first (- target-only, both lookup_then_draft)",
    ]


def _phase_lines(profile: Profile, methods: frozenset[Method]) -> list[str]:
    """Where a route is an engine: what a long job loads, by its largest batch."""
    counts = occupancies(profile.max_batch)
    policies = {count: job_policy(profile, methods, count) for count in counts}
    labels = [sample.request_class for sample in profile.samples]
    width = max(len(label) for label in [*labels, "--max-batch"])
    routes = {label: [policies[count].route(label, count) for count in counts] for label in labels}
    lines = [f"{'--max-batch':<{width}}  " + "".join(f"{count:>14}" for count in counts)]
    for label, found in routes.items():
        cells = [f"{_SHORT[r.method]} {r.num_speculative_tokens}" if r.num_speculative_tokens else "-" for r in found]
        lines.append(f"{label:<{width}}  " + "".join(f"{cell:>14}" for cell in cells))
    first = "Do not speculate here: no class gains at any batch."
    if not profile.acceptance:
        first = "No engine that speculates was measured: raise --budget."
    if any(route.num_speculative_tokens for found in routes.values() for route in found):
        first = "A long job speculates where a cell says so; every route in a column is an engine of its own."
    return [first, "", *lines, "", "cells: method, tokens proposed (- target-only)"]


def _occupancy_lines(profile: Profile, methods: frozenset[Method]) -> list[str]:
    curves = occupancy_curves(profile, methods)
    lines = [f"{'throughput / target-only':<26}" + "".join(f"{n:>8}" for n in curves[0].live_rows) + "   crossover"]
    for curve in curves:
        crossover = "none" if curve.crossover is None else f"{curve.crossover:.0f} live rows"
        lines.append(f"{curve.setting:<26}" + "".join(f"{r:>8.2f}" for r in curve.ratios) + f"   {crossover}")
    return lines


def _depth_lines(profile: Profile, methods: frozenset[Method]) -> list[str]:
    """Tokens per step, and speed-up with few and with many live rows, over the draft length."""
    lines = []
    for curve in depth_curves(profile, methods, sorted({1, profile.max_batch})):
        lines.append(f"{f'{curve.method.value}, k':<34}" + "".join(f"{k:>8}" for k in curve.depths))
        rows = {"tokens per row and step": curve.tokens_per_step}
        rows |= {f"speed-up, {n} live": ratios for n, ratios in curve.speed_ups.items()}
        lines += [f"  {name:<32}" + "".join(f"{value:>8.2f}" for value in values) for name, values in rows.items()]
    return lines


def _sample_lines(profile: Profile) -> list[str]:
    counts = ", ".join(f"{s.request_class} {s.num_rows}" for s in profile.samples)
    tokens = sum(sum(s.output_tokens) for s in profile.samples)
    measured = f"measured in {profile.measuring_seconds:.0f} s on {tokens:,} output tokens of {counts} rows"
    lines = textwrap.wrap(measured, 100) + [f"skipped: {item}" for item in profile.skipped]
    if profile.memory_bytes:
        sizes = (f"{name.replace('_', ' ')} {size / 2**20:,.2f}" for name, size in sorted(profile.memory_bytes.items()))
        lines += textwrap.wrap(f"memory in MiB: {', '.join(sizes)}", 100)
    return lines


def _trial(trial: Trial) -> str:
    took = f"{trial.seconds:.1f} s, predicted {trial.predicted_seconds:.1f} s"
    return f"trial: {trial.setting} at batch {trial.max_batch}: {took}"


def verdict(table: Sequence[Mapping[str, Decision]], counts: Sequence[int], labels: Sequence[str]) -> str:
    """One sentence: how many classes speculate up to how many live rows."""
    speculating = [[label for label in labels if row[label].route.method is not Method.TARGET_ONLY] for row in table]
    if not any(speculating):
        return "Do not speculate here: no class gains at any number of live rows."
    most = max(map(len, speculating))
    first = next(place for place, found in enumerate(speculating) if len(found) == most)
    run = list(takewhile(lambda found: len(found) == most, speculating[first:]))
    upto = counts[first + len(run) - 1]
    span = f"up to {upto}" if first == 0 else f"at {counts[first]} to {upto}"
    last = max(count for count, found in zip(counts, speculating, strict=True) if found)
    if last == counts[-1]:
        tail = f"at {last} still {len(speculating[-1])}"
    else:
        tail = f"above {last} none does" if last == upto else f"up to {last} some do, above that none"
    if most == len(labels) and len(run) == len(counts):
        return f"All {len(labels)} classes speculate, at every number of live rows up to {upto}."
    never = [label for label in labels if not any(label in found for found in speculating)]
    nobody = f"; never: {', '.join(never)}" if never else ""
    return f"{most} of {len(labels)} classes speculate {span} live rows; {tail}{nobody}."


def _cell(decision: Decision) -> str:
    route = decision.route
    if route.method is Method.TARGET_ONLY:
        return f"- {decision.first_position_acceptance:.2f}"
    return f"{_SHORT[route.method]} {route.num_speculative_tokens} {decision.first_position_acceptance:.2f}"
