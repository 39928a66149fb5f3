"""The rule that routes: propose a position iff it pays for its time.

Rows of all classes share a step, so the question is marginal. A step of n rows yields Y tokens in T seconds. One more
position costs t seconds and yields a token with probability P (it is reached and accepted), so it raises Y / T iff
P > t Y / T, the break-even. Doubt counts against speculation: P is a lower bound. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchspec.config import MAX_SPECULATIVE_TOKENS
from batchspec.ngrams import NUM_GRADES
from batchspec.profile.options import ClassOptions, Option
from batchspec.profile.predict import batch_step
from batchspec.profile.records import StepCost
from batchspec.types import Method, Route

_ASKING = (Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT)
_DRAFTING = (Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT)

# What a position must bring beyond its measured cost, as a share of it: costs are measured too.
_MARGIN = 0.05

# A whole step must gain more than this by speculating, else nobody speculates at that occupancy.
_LEAST_GAIN = 0.005

# Rounds until choices and prices agree, unless they do before: then the rate changes by less than this share.
_ROUNDS = 12
_SETTLED = 5e-3


@dataclass(frozen=True)
class Decision:
    """How to decode a class, the mean probability that the positions proposed must have to pay (for all that the method
    takes), and what its first position was given."""

    request_class: str
    route: Route
    break_even: float
    first_position_acceptance: float


def decide(
    options: Sequence[ClassOptions], cost: StepCost, occupancy: int, methods: frozenset[Method]
) -> list[Decision]:
    """The best route of every class when `occupancy` rows of the usual mix are live.

    A draft model's forwards are cheap for a row where others pay for them, too, so there may be several ways in which
    nobody gains by changing alone. The methods are tried together, one by one, and together again from the best of
    these; the fastest step wins.
    """
    plain = _settle(options, cost, occupancy, frozenset(), _plain_prices(options, cost, occupancy))
    together = _settle(options, cost, occupancy, methods, plain.prices)
    found = [together]
    if len(methods) > 1:
        found += [_settle(options, cost, occupancy, frozenset({m}), plain.prices) for m in sorted(methods)]
        best_start = max(found, key=_speed)
        if best_start is not together:
            found.append(_settle(options, cost, occupancy, methods, best_start.prices))
    best = max(found, key=_speed)
    if best.tokens_per_second <= plain.tokens_per_second * (1 + _LEAST_GAIN):
        return [_plain_decision(c, occupancy, best.prices) for c in options]
    return [best.decisions[c.request_class] for c in options]


@dataclass(frozen=True)
class _Prices:
    """What decides whether a position pays: tokens per second, and those where nobody speculates, seconds of one more
    position, and how many rows share a draft model's forward at each depth (0: nobody knows yet)."""

    tokens_per_second: float
    plain_tokens_per_second: float
    positions: float
    per_position: float
    draft_rows: Sequence[float]


@dataclass(frozen=True)
class _Settled:
    """Decisions by class, the speed of the step that they make, and the prices that follow of it."""

    decisions: Mapping[str, Decision]
    tokens_per_second: float
    prices: _Prices


def _speed(settled: _Settled) -> float:
    return settled.tokens_per_second


def _settle(
    options: Sequence[ClassOptions], cost: StepCost, occupancy: int, methods: frozenset[Method], prices: _Prices
) -> _Settled:
    """Every class's choice among these methods. Prices and the step depend on each other; a few rounds settle them."""
    plain_rate = prices.plain_tokens_per_second
    before: Mapping[str, Decision] = {}
    for _ in range(_ROUNDS):
        decisions = {c.request_class: _choose(c, cost, occupancy, prices, methods) for c in options}
        routes = {label: decision.route for label, decision in decisions.items()}
        step = batch_step(cost, options, occupancy, routes)
        speed = step.tokens / step.seconds
        rate = (prices.tokens_per_second + max(plain_rate, speed)) / 2
        positions = (prices.positions + step.positions) / 2
        is_settled = decisions.keys() == before.keys() and abs(rate / prices.tokens_per_second - 1) < _SETTLED
        prices = _Prices(
            rate, plain_rate, positions, _per_position(options, cost, occupancy, positions), step.draft_rows
        )
        if is_settled and all(_depths(d.route) == _depths(before[label].route) for label, d in decisions.items()):
            break
        before = decisions
    return _Settled(decisions, speed, prices)


def _depths(route: Route) -> tuple[object, ...]:
    return route.method, route.min_match_tokens, route.num_tokens_by_grade, route.num_draft_tokens


def _plain_prices(options: Sequence[ClassOptions], cost: StepCost, occupancy: int) -> _Prices:
    """Where nobody speculates."""
    rate = occupancy / cost.step_seconds(occupancy, occupancy, _context(options))
    per_position = _per_position(options, cost, occupancy, occupancy)
    return _Prices(rate, rate, float(occupancy), per_position, [0.0] * MAX_SPECULATIVE_TOKENS)


def _per_position(options: Sequence[ClassOptions], cost: StepCost, occupancy: int, positions: float) -> float:
    """Seconds that one more position costs, with the margin on top: over all that steps range, since proposals come
    in bursts and cost is not a straight line."""
    context = _context(options)
    spread = max(1.0, occupancy / 4, positions - occupancy)
    low, high = max(float(occupancy), positions - spread), positions + spread
    more = cost.step_seconds(occupancy, high, context) - cost.step_seconds(occupancy, low, context)
    return max(0.0, more / (high - low)) * (1 + _MARGIN)


def _context(options: Sequence[ClassOptions]) -> float:
    return sum(c.weight * c.context_tokens for c in options)


def _choose(c: ClassOptions, cost: StepCost, occupancy: int, prices: _Prices, methods: frozenset[Method]) -> Decision:
    """The setting, and how deep per option, whose expected tokens exceed their cost in tokens by the most."""
    rate = prices.tokens_per_second
    best, decision = 0.0, _plain_decision(c, occupancy, prices)
    copied = [rate * prices.per_position] * MAX_SPECULATIVE_TOKENS
    drafted = [rate * seconds for seconds in _drafted_seconds(c, cost, occupancy, prices)]
    for setting in sorted(c.by_setting):
        method, least_match = setting
        if method not in methods:
            continue
        # the draft model reads the prompt once, and all tokens that the row writes pay for it
        reading = rate * cost.draft_prefill_per_token * c.catch_up if method in _DRAFTING else 0.0
        asking = rate * cost.per_lookup if method in _ASKING else 0.0
        depths, written, paid, proposed = dict[int | None, int](), 0.0, 0.0, 0.0
        for option in c.by_setting[setting]:
            price = drafted if option.per_depth else copied
            depth = depths[option.grade] = _best_depth(option, 1 - reading, price)
            if depth:
                written += option.share * sum(option.reach[:depth])
                paid += option.share * sum(price[:depth])
                proposed += option.share * depth
        gain = written * (1 - reading) - paid - reading - asking
        if method in _DRAFTING and not depths.get(None):
            continue  # it would never draft
        if gain > best and proposed:
            needed = (paid + reading + asking) / (1 - reading) / proposed
            best, decision = gain, _decision(c, method, least_match, depths, occupancy, needed)
            if reading:  # may take what writing the rest without it would take longer, and no more
                saved = written / prices.plain_tokens_per_second - (paid + asking) / rate
                most_lag = max(0.0, saved) / (written + 1) / cost.draft_prefill_per_token
                decision = replace(decision, route=replace(decision.route, most_lag_per_token=most_lag))
    return decision


def _drafted_seconds(c: ClassOptions, cost: StepCost, occupancy: int, prices: _Prices) -> list[float]:
    """What each position of a drafted proposal takes: to verify it, and a row's share of the forward that drafts it."""
    if cost.draft is None:
        return []
    sharing = [max(1.0, rows or occupancy) for rows in prices.draft_rows]
    return [prices.per_position + cost.draft_step_seconds(rows, c.context_tokens) / rows for rows in sharing]


def _best_depth(option: Option, kept: float, price: Sequence[float]) -> int:
    """How many positions gain the most together, a token counting `kept`. Of a proposal that is there at once, those
    before the first that does not pay: later ones are worth less still."""
    best, depth, running = 0.0, 0, 0.0
    for position, probability in enumerate(option.reach):
        running += probability * kept - price[position]
        if running > best:
            best, depth = running, position + 1
        elif not option.per_depth:
            break
    return depth


def _plain_decision(c: ClassOptions, occupancy: int, prices: _Prices) -> Decision:
    break_even = prices.tokens_per_second * prices.per_position
    reason = f"profile: no proposal reaches the break-even of {break_even:.2f} at {occupancy} live rows"
    first = max((o.reach[0] for found in c.by_setting.values() for o in found if o.reach), default=0.0)
    return Decision(c.request_class, Route(Method.TARGET_ONLY, 0, reason), break_even, first)


def _decision(
    c: ClassOptions,
    method: Method,
    least_match: int,
    depths: Mapping[int | None, int],
    occupancy: int,
    break_even: float,
) -> Decision:
    used = [option for option in c.by_setting[method, least_match] if depths[option.grade]]
    first = sum(o.share * o.reach[0] for o in used) / sum(o.share for o in used)
    route = Route(
        method,
        max(depths.values()),
        f"profile: {method.value} pays at {occupancy} live rows",
        min_match_tokens=least_match,
        num_tokens_by_grade=tuple(depths.get(g, 0) for g in range(NUM_GRADES)) if method in _ASKING else (),
        num_draft_tokens=depths.get(None, 0),
    )
    return Decision(c.request_class, route, break_even, first)
