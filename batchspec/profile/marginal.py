"""The rule that routes: propose a position iff it pays for its time.

Rows of all classes share a step, so the question is marginal. A step of n rows yields Y tokens in T seconds. One more
position costs t seconds and yields a token with probability P (it is reached and accepted), so it raises Y / T iff
P > t Y / T, the break-even. Doubt counts against speculation: P is a lower bound. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from batchspec.config import MAX_MATCH_TOKENS, MAX_SPECULATIVE_TOKENS
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.records import AcceptanceCell, Profile, StepCost
from batchspec.stats import add_per_pos
from batchspec.types import Method, Route

# Conditional acceptance is pulled towards the mean over classes with the weight of this many observations, and then
# lowered by this many standard deviations.
_PRIOR_WEIGHT = 8.0
_DOUBT = 1.0

# What a position must bring beyond its measured cost, as a share of it: costs are measured too.
_MARGIN = 0.1

# A whole step must gain more than this by speculating, else nobody speculates at that occupancy.
_LEAST_GAIN = 0.005

_ROUNDS = 12


@dataclass(frozen=True)
class Option:
    """One way of proposing for a class: `share` of its steps propose here, P_1 >= P_2 >= ... by position.

    `per_depth` says whether each position costs a forward of the draft model for the rows that draft so deep.
    """

    share: float
    reach: tuple[float, ...]
    match_tokens: int | None

    @property
    def per_depth(self) -> bool:
        return self.match_tokens is None


@dataclass(frozen=True)
class ClassOptions:
    """What is known of a class: its weight among live rows, and per method the options that make it up."""

    request_class: str
    weight: float
    context_tokens: float
    by_method: Mapping[Method, tuple[Option, ...]]


@dataclass(frozen=True)
class Decision:
    """A class at an occupancy: how to decode it, the probability that a position must have to pay, what it was given
    as its first position's, and the tokens per step that follow."""

    request_class: str
    occupancy: int
    route: Route
    break_even: float
    first_position_acceptance: float
    tokens_per_step: float


def class_options(profile: Profile, doubt: float = _DOUBT) -> tuple[ClassOptions, ...]:
    """Probabilities of reaching and accepting each position, by class, method and match length, `doubt` standard
    deviations below their estimate (0 to predict, more to decide)."""
    total_steps = sum(sum(s.output_tokens) for s in profile.samples)
    pooled = _pool(profile.acceptance)
    options = []
    for sample in profile.samples:
        by_method: dict[Method, list[Option]] = {}
        for cell in profile.acceptance:
            if cell.request_class == sample.request_class and cell.num_class_steps:
                share = cell.num_steps / cell.num_class_steps
                reach = _reach(cell, pooled[(cell.method, cell.match_tokens)], doubt)
                by_method.setdefault(Method(cell.method), []).append(Option(share, reach, cell.match_tokens))
        if Method.LOOKUP_THEN_DRAFT in by_method:
            by_method[Method.LOOKUP_THEN_DRAFT] += by_method.get(Method.PROMPT_LOOKUP, [])
        options.append(
            ClassOptions(
                sample.request_class,
                sum(sample.output_tokens) / max(1, total_steps),
                sample.mean_context_tokens,
                {method: tuple(found) for method, found in by_method.items()},
            )
        )
    return tuple(options)


def any_class(profile: Profile, doubt: float = _DOUBT) -> ClassOptions:
    """All classes together, for rows of a class that was not measured. Weighs nothing in the usual mix."""
    merged: dict[tuple[str, int | None], AcceptanceCell] = {}
    for cell in profile.acceptance:
        key = (cell.method, cell.match_tokens)
        before = merged.get(key)
        merged[key] = replace(cell, request_class=ANY_CLASS) if before is None else _add(before, cell)
    total_steps = {m: 0 for m, _ in merged}
    for method in total_steps:
        by_class = {c.request_class: c.num_class_steps for c in profile.acceptance if c.method == method}
        total_steps[method] = sum(by_class.values())
    cells = tuple(replace(cell, num_class_steps=total_steps[method]) for (method, _), cell in merged.items())
    samples = [s for s in profile.samples if s.num_rows]
    sample = replace(
        samples[0],
        request_class=ANY_CLASS,
        input_tokens=tuple(n for s in samples for n in s.input_tokens),
        output_tokens=tuple(n for s in samples for n in s.output_tokens),
    )
    pooled = class_options(replace(profile, samples=(sample,), acceptance=cells), doubt)
    return replace(pooled[0], weight=0.0)


def _add(left: AcceptanceCell, right: AcceptanceCell) -> AcceptanceCell:
    return replace(
        left,
        num_steps=left.num_steps + right.num_steps,
        accepted_per_pos=add_per_pos(left.accepted_per_pos, right.accepted_per_pos),
        rejections_per_pos=add_per_pos(left.rejections_per_pos, right.rejections_per_pos),
    )


def _pool(cells: Sequence[AcceptanceCell]) -> dict[tuple[str, int | None], tuple[float, ...]]:
    """Conditional acceptance per position over all classes: what a class with few observations is pulled to."""
    sums: dict[tuple[str, int | None], list[list[float]]] = {}
    for cell in cells:
        table = sums.setdefault((cell.method, cell.match_tokens), [[0.0, 0.0] for _ in range(MAX_SPECULATIVE_TOKENS)])
        for position, (accepted, rejected) in enumerate(_counts(cell)):
            table[position][0] += accepted
            table[position][1] += accepted + rejected
    return {key: tuple(a / n if n else 0.0 for a, n in table) for key, table in sums.items()}


def _counts(cell: AcceptanceCell) -> list[tuple[int, int]]:
    return list(zip(cell.accepted_per_pos, cell.rejections_per_pos, strict=True))


def _reach(cell: AcceptanceCell, pooled: tuple[float, ...], doubt: float) -> tuple[float, ...]:
    """P_1, P_2, ...: running products of the conditional acceptances, each lowered by the doubt in it."""
    reach, product = [], 1.0
    for position, (accepted, rejected) in enumerate(_counts(cell)):
        weight = accepted + rejected + _PRIOR_WEIGHT
        mean = (accepted + _PRIOR_WEIGHT * pooled[position]) / weight
        product *= max(0.0, mean - doubt * sqrt(mean * (1 - mean) / (weight + 1)))
        reach.append(product)
    return tuple(reach)


def decide(
    options: Sequence[ClassOptions], cost: StepCost, occupancy: int, methods: frozenset[Method]
) -> list[Decision]:
    """The best route of every class when `occupancy` rows of the usual mix are live.

    Break-even and step depend on each other; a few rounds settle them.
    """
    context = sum(c.weight * c.context_tokens for c in options)
    plain = occupancy / cost.step_seconds(occupancy, occupancy, context)
    rate, positions = plain, float(occupancy)
    depth_rows = [0.0] * MAX_SPECULATIVE_TOKENS
    choices: dict[str, tuple[Method, dict[int | None, int]]] = {}
    for _ in range(_ROUNDS):
        per_position = _slope(cost, positions, occupancy, context)
        choices = {
            c.request_class: _choose(c, cost, occupancy, rate, per_position, depth_rows, methods) for c in options
        }
        tokens, extra, depth_rows, asked = _expect(options, choices, occupancy)
        seconds = cost.step_seconds(occupancy, occupancy + extra, context) + asked * cost.per_lookup
        seconds += sum(cost.draft.at(rows) for rows in depth_rows if rows > 0) if cost.draft else 0.0
        positions = (positions + occupancy + extra) / 2
        rate = (rate + max(plain, tokens / seconds)) / 2
    break_even = _slope(cost, positions, occupancy, context) * rate
    if tokens / seconds <= plain * (1 + _LEAST_GAIN):
        choices = {c.request_class: (Method.TARGET_ONLY, {}) for c in options}
    return [_decision(c, *choices[c.request_class], occupancy, break_even) for c in options]


def _slope(cost: StepCost, positions: float, occupancy: int, context: float) -> float:
    """Seconds that one more position costs, around here (over a change of a quarter of the rows, at least one), with
    the margin on top."""
    change = max(1.0, occupancy / 4)
    more = cost.step_seconds(occupancy, positions + change, context) - cost.step_seconds(occupancy, positions, context)
    return max(0.0, more / change) * (1 + _MARGIN)


def _choose(
    c: ClassOptions,
    cost: StepCost,
    occupancy: int,
    rate: float,
    per_position: float,
    depth_rows: Sequence[float],
    methods: frozenset[Method],
) -> tuple[Method, dict[int | None, int]]:
    """The method, and how deep per option, whose expected tokens exceed their cost in tokens by the most."""
    best: tuple[float, Method, dict[int | None, int]] = (0.0, Method.TARGET_ONLY, {})
    for method in sorted(methods & c.by_method.keys()):
        gain, depths = 0.0, {}
        asks_lookup = method is not Method.DRAFT_MODEL
        gain -= rate * cost.per_lookup if asks_lookup else 0.0
        for option in c.by_method[method]:
            depth, worth = 0, 0.0
            running = 0.0
            for position, p in enumerate(option.reach):
                price = rate * (per_position + _draft_share(cost, option, occupancy, depth_rows[position]))
                running += p - price
                if running > worth:
                    depth, worth = position + 1, running
                elif not option.per_depth:
                    break
            depths[option.match_tokens] = depth
            gain += option.share * worth
        if gain > best[0] and any(depths.values()):
            best = (gain, method, depths)
    return best[1], best[2]


def _draft_share(cost: StepCost, option: Option, occupancy: int, rows_so_deep: float) -> float:
    """A row's share of the draft forward that serves all rows drafting so deep: at first as if all did."""
    if not option.per_depth or cost.draft is None:
        return 0.0
    rows = max(1.0, rows_so_deep or occupancy)
    return cost.draft.at(rows) / rows


def _expect(
    options: Sequence[ClassOptions], choices: Mapping[str, tuple[Method, dict[int | None, int]]], occupancy: int
) -> tuple[float, float, list[float], float]:
    """Expected tokens, extra positions, rows drafting at each depth, and rows asking lookup, in a step."""
    tokens, extra, asked = float(occupancy), 0.0, 0.0
    depth_rows = [0.0] * MAX_SPECULATIVE_TOKENS
    for c in options:
        method, depths = choices[c.request_class]
        rows = c.weight * occupancy
        asked += rows if method in (Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT) else 0.0
        for option in c.by_method.get(method, ()):
            depth = depths.get(option.match_tokens, 0)
            tokens += rows * option.share * sum(option.reach[:depth])
            extra += rows * option.share * depth
            if option.per_depth:
                for position in range(depth):
                    depth_rows[position] += rows * option.share
    return tokens, extra, depth_rows, asked


def _decision(
    c: ClassOptions, method: Method, depths: dict[int | None, int], occupancy: int, break_even: float
) -> Decision:
    used = [o for o in c.by_method.get(method, ()) if depths.get(o.match_tokens, 0)]
    share = sum(o.share for o in used)
    first = sum(o.share * o.reach[0] for o in used) / share if share else _best_first(c)
    by_match = tuple(depths.get(m, 0) for m in range(MAX_MATCH_TOKENS + 1))
    k = max(depths.values(), default=0)
    reason = (
        f"profile: {method.value} pays at {occupancy} live rows"
        if k
        else f"profile: no proposal reaches the break-even of {break_even:.2f} at {occupancy} live rows"
    )
    lookup = any(by_match)
    route = Route(
        method,
        k,
        reason,
        min_match_tokens=min_match_tokens(c),
        num_tokens_by_match=by_match if lookup else (),
        num_draft_tokens=depths.get(None, 0),
    )
    tokens_per_step = 1 + sum(o.share * sum(o.reach[: depths.get(o.match_tokens, 0)]) for o in used)
    return Decision(c.request_class, occupancy, route, break_even, first, tokens_per_step)


def _best_first(c: ClassOptions) -> float:
    return max((o.reach[0] for found in c.by_method.values() for o in found if o.reach), default=0.0)


def min_match_tokens(c: ClassOptions) -> int:
    """The least match that was measured: one index serves every occupancy."""
    found = [o.match_tokens for options in c.by_method.values() for o in options if o.match_tokens is not None]
    return min(found, default=2)
