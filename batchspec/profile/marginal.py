"""The rule that routes: propose a position iff it pays for its time.

Rows of all classes share a step, so the question is marginal. A step of n rows yields Y tokens in T seconds. One more
position costs t seconds and yields a token with probability P (it is reached and accepted), so it raises Y / T iff
P > t Y / T, the break-even. Doubt counts against speculation: P is a lower bound. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchspec.config import MAX_MATCH_TOKENS, MAX_SPECULATIVE_TOKENS
from batchspec.profile.options import ClassOptions, Option
from batchspec.profile.records import StepCost
from batchspec.types import Method, Route

# What a position must bring beyond its measured cost, as a share of it: costs are measured too.
_MARGIN = 0.1

# A whole step must gain more than this by speculating, else nobody speculates at that occupancy.
_LEAST_GAIN = 0.005

_ROUNDS = 12


@dataclass(frozen=True)
class Decision:
    """A class at an occupancy: how to decode it, the mean probability that the positions proposed must have to pay
    (drafting included), what it was given as its first position's, and the tokens per step that follow."""

    request_class: str
    occupancy: int
    route: Route
    break_even: float
    first_position_acceptance: float
    tokens_per_step: float


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
        seconds += sum(cost.draft_step_seconds(rows, context) for rows in depth_rows if rows > 0)
        positions = (positions + occupancy + extra) / 2
        rate = (rate + max(plain, tokens / seconds)) / 2
    per_position = _slope(cost, positions, occupancy, context)
    prices = [rate * (per_position + _draft_share(cost, occupancy, rows, context)) for rows in depth_rows]
    if tokens / seconds <= plain * (1 + _LEAST_GAIN):
        choices = {c.request_class: (Method.TARGET_ONLY, {}) for c in options}
    return [_decision(c, *choices[c.request_class], occupancy, rate * per_position, prices) for c in options]


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
        if method is not Method.PROMPT_LOOKUP:  # a token more or less a step, the prompt is read once
            gain -= rate * cost.draft_prefill_per_token * c.catch_up
        for option in c.by_method[method]:
            depth, worth = 0, 0.0
            running = 0.0
            for position, p in enumerate(option.reach):
                drafting = (
                    _draft_share(cost, occupancy, depth_rows[position], c.context_tokens) if option.per_depth else 0.0
                )
                price = rate * (per_position + drafting)
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


def _draft_share(cost: StepCost, occupancy: int, rows_so_deep: float, context: float) -> float:
    """A row's share of the draft forward that serves all rows drafting so deep: at first as if all did."""
    rows = max(1.0, rows_so_deep or occupancy)
    return cost.draft_step_seconds(rows, context) / rows


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
    c: ClassOptions,
    method: Method,
    depths: dict[int | None, int],
    occupancy: int,
    break_even: float,
    draft_prices: Sequence[float],
) -> Decision:
    """`break_even` is the price of a position that lookup proposes, `draft_prices` those of drafted ones by depth."""
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
    proposed = [o.share * depths[o.match_tokens] for o in used]
    paid = [o.share * sum(_prices(o, depths[o.match_tokens], break_even, draft_prices)) for o in used]
    lookup = method in (Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT)
    route = Route(
        method,
        k,
        reason,
        min_match_tokens=min_match_tokens(c),
        num_tokens_by_match=by_match if lookup else (),
        num_draft_tokens=depths.get(None, 0),
    )
    tokens_per_step = 1 + sum(o.share * sum(o.reach[: depths.get(o.match_tokens, 0)]) for o in used)
    needed = sum(paid) / sum(proposed) if k else break_even
    return Decision(c.request_class, occupancy, route, needed, first, tokens_per_step)


def _prices(option: Option, depth: int, break_even: float, draft_prices: Sequence[float]) -> Sequence[float]:
    return draft_prices[:depth] if option.per_depth else [break_even] * depth


def _best_first(c: ClassOptions) -> float:
    return max((o.reach[0] for found in c.by_method.values() for o in found if o.reach), default=0.0)


def min_match_tokens(c: ClassOptions) -> int:
    """The least match that was measured: one index serves every occupancy."""
    found = [o.match_tokens for options in c.by_method.values() for o in options if o.match_tokens is not None]
    return min(found, default=2)
