"""What a profile says a job will take: the live rows of a worker, stepped through in expectation. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import MAX_SPECULATIVE_TOKENS
from batchspec.ngrams import grade_of
from batchspec.profile.options import ClassOptions, Option, any_class, class_options
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.records import ClassSample, Profile, StepCost
from batchspec.types import Completion, Method, Route
from batchspec.workload import label_of

# Steps are skipped over in one go while the live set does not change, but no further than this.
_MOST_STEPS_AT_ONCE = 16


@dataclass(frozen=True)
class Step:
    """Tokens that a row of a class gains, and the positions and draft steps it brings, in one step."""

    tokens: float
    positions: float
    draft_depths: tuple[float, ...]
    asks_lookup: bool


def predict_seconds(
    profile: Profile, rows: Sequence[ClassSample], route_of: Callable[[str, int], Route], max_batch: int
) -> float:
    """Decode seconds (prefill in, load out) of these rows, each class at each number of live rows routed like that."""
    options = {c.request_class: c for c in mean_options(profile)}
    return simulate(profile, rows, max_batch, lambda label, n: expected_step(options[label], route_of(label, n)))


def mean_options(profile: Profile) -> tuple[ClassOptions, ...]:
    """Acceptance as estimated, nothing taken off for doubt; `*` for classes that the profile does not know."""
    return (*class_options(profile, doubt=0.0), any_class(profile, doubt=0.0))


def target_only_seconds(cost: StepCost, row: Completion) -> float:
    """Device seconds that an answered row would take without speculation, beside as many rows as it had."""
    live, context = max(1.0, row.mean_live_sequences), row.input_tokens + row.output_tokens / 2
    prefill = (row.input_tokens - row.cached_input_tokens) * cost.prefill_per_token
    return prefill + max(0, row.output_tokens - 1) * cost.step_seconds(live, live, context) / live


def attribution_rule(cost: StepCost, max_batch: int) -> StepAttributionRule:
    """The split of a step's seconds by what steps cost here: a straight line through a batch of one position a row and
    one of two."""
    per_position = (cost.target.at(2 * max_batch) - cost.target.at(max_batch)) / max_batch
    per_step = max(0.0, cost.target.at(max_batch) - max_batch * per_position)
    return StepAttributionRule(per_step, max(cost.per_sequence, 1e-9), max(0.0, per_position), cost.per_kv_token)


def predicted_tokens_per_step(profile: Profile, routes: Mapping[str, Route]) -> dict[str, float]:
    """Tokens per row and target step that the profile expects of each class on its route."""
    options = {c.request_class: c for c in mean_options(profile)}
    of_label = {label: options.get(label_of(label), options[ANY_CLASS]) for label in routes}
    return {label: expected_step(of_label[label], route).tokens for label, route in routes.items()}


def expected_step(c: ClassOptions, route: Route) -> Step:
    """What a route gives a class per step, by its measured acceptance."""
    tokens, positions, depths = 1.0, 1.0, [0.0] * MAX_SPECULATIVE_TOKENS
    for option in c.of_route(route):
        k = _depth(option, route)
        tokens += option.share * sum(option.reach[:k])
        positions += option.share * k
        if option.per_depth:
            for depth in range(k):
                depths[depth] += option.share
    return Step(tokens, positions, tuple(depths), route.method in (Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT))


def step_seconds(cost: StepCost, rows: Sequence[tuple[float, Step]], context_tokens: float) -> float:
    """Seconds of a step of these rows, each given with how many of its kind there are."""
    occupancy = sum(count for count, _ in rows)
    seconds = cost.step_seconds(occupancy, sum(count * step.positions for count, step in rows), context_tokens)
    seconds += cost.per_lookup * sum(count * step.asks_lookup for count, step in rows)
    for depth in range(MAX_SPECULATIVE_TOKENS):
        drafting = sum(count * step.draft_depths[depth] for count, step in rows)
        seconds += cost.draft_step_seconds(drafting, context_tokens) if drafting > 0 else 0.0
    return seconds


@dataclass(frozen=True)
class BatchStep:
    """A step of a whole batch: the tokens that it writes, the positions that it computes, the rows that draft at each
    depth, and its seconds, with what a draft model has to read of prompts for the tokens that are written."""

    tokens: float
    positions: float
    draft_rows: tuple[float, ...]
    seconds: float


def batch_step(
    cost: StepCost, classes: Sequence[ClassOptions], occupancy: int, routes: Mapping[str, Route]
) -> BatchStep:
    """A step of these classes' own mix at this many live rows, each class on its route."""
    options = [c for c in classes if c.weight > 0]
    whole = sum(c.weight for c in options)
    rows = [(occupancy * c.weight / whole, expected_step(c, routes[c.request_class])) for c in options]
    context = sum(c.weight * c.context_tokens for c in options) / whole
    seconds = step_seconds(cost, rows, context)
    for c, (count, step) in zip(options, rows, strict=True):
        if any(step.draft_depths):
            seconds += count * step.tokens * c.catch_up * cost.draft_prefill_per_token
    return BatchStep(
        tokens=sum(count * step.tokens for count, step in rows),
        positions=sum(count * step.positions for count, step in rows),
        draft_rows=tuple(
            sum(count * step.draft_depths[depth] for count, step in rows) for depth in range(MAX_SPECULATIVE_TOKENS)
        ),
        seconds=seconds,
    )


def throughput(
    cost: StepCost, classes: Sequence[ClassOptions], occupancy: int, route_of: Callable[[str, int], Route]
) -> tuple[float, float]:
    """Tokens per row and step, and decode tokens per second, of these classes' own mix at this many live rows."""
    step = batch_step(
        cost, classes, occupancy, {c.request_class: route_of(c.request_class, occupancy) for c in classes}
    )
    return step.tokens / occupancy, step.tokens / step.seconds


def _depth(option: Option, route: Route) -> int:
    k = route.num_speculative_tokens
    if option.grade is not None:
        matches = option.grade >= grade_of(route.min_match_tokens, 0)
        return min(k, route.tokens_for_match(option.grade)) if matches else 0
    return k if route.num_draft_tokens is None else min(k, route.num_draft_tokens)


def simulate(
    profile: Profile, rows: Sequence[ClassSample], max_batch: int, step_of: Callable[[str, int], Step]
) -> float:
    """Seconds until all rows are answered: `max_batch` live at a time, classes taken in turn, each row advancing by
    its class's expected tokens per step."""
    cost = profile.step_cost
    waiting = _interleaved(rows)
    live: list[tuple[float, str, float]] = []  # tokens left, class, context
    seconds = 0.0
    while waiting or live:
        while waiting and len(live) < max_batch:
            label, input_tokens, output_tokens = waiting.pop()
            drafts = any(step_of(label, len(live) + 1).draft_depths)
            seconds += input_tokens * (cost.prefill_per_token + drafts * cost.draft_prefill_per_token)
            live.append((output_tokens - 1.0, label, input_tokens + output_tokens / 2))
        occupancy = len(live)
        steps = {label: step_of(label, occupancy) for label in {label for _, label, _ in live}}
        context = sum(size for _, _, size in live) / occupancy
        each = step_seconds(cost, [(1.0, steps[label]) for _, label, _ in live], context)
        soonest = min(left / steps[label].tokens for left, label, _ in live)
        count = min(_MOST_STEPS_AT_ONCE, max(1.0, soonest))
        seconds += count * each
        live = [
            (left - count * steps[label].tokens, label, size)
            for left, label, size in live
            if left > count * steps[label].tokens
        ]
    return seconds


def _interleaved(rows: Sequence[ClassSample]) -> list[tuple[str, int, int]]:
    """(class, input tokens, output tokens) of every row, the classes mixed evenly; popped from the end."""
    placed = [
        (index / sample.num_rows, sample.request_class, sample.input_tokens[index], sample.output_tokens[index])
        for sample in rows
        for index in range(sample.num_rows)
    ]
    return [(label, i, o) for _, label, i, o in sorted(placed, reverse=True)]
