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
from batchspec.profile.options import ClassOptions, Option, Setting
from batchspec.profile.records import StepCost
from batchspec.types import Method, Route

# What one class does: its setting, and how deep it proposes by grade.
Choice = tuple[Setting, dict[int | None, int]]
NOT_AT_ALL: Choice = ((Method.TARGET_ONLY, 0), {})

_ASKING = (Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT)
_DRAFTING = (Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT)

# What a position must bring beyond its measured cost, as a share of it: costs are measured too.
_MARGIN = 0.05

# A whole step must gain more than this by speculating, else nobody speculates at that occupancy.
_LEAST_GAIN = 0.005

_ROUNDS = 12


@dataclass(frozen=True)
class Decision:
    """How to decode a class, the mean probability that the positions proposed must have to pay (drafting included), and
    what its first position was given."""

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
    context = sum(c.weight * c.context_tokens for c in options)
    plain_rate = occupancy / cost.step_seconds(occupancy, occupancy, context)
    plain = _Settled({}, plain_rate, plain_rate, float(occupancy), [0.0] * MAX_SPECULATIVE_TOKENS)
    found = [_settle(options, cost, occupancy, methods, plain)]
    if len(methods) > 1:
        found += [_settle(options, cost, occupancy, frozenset({method}), plain) for method in sorted(methods)]
        found.append(_settle(options, cost, occupancy, methods, max(found, key=_speed)))
    best = max(found, key=_speed)
    if best.tokens_per_second <= plain_rate * (1 + _LEAST_GAIN):
        best = replace(best, choices={c.request_class: NOT_AT_ALL for c in options})
    per_position = _slope(cost, best.positions, occupancy, context)
    prices = [best.rate * (per_position + _draft_share(cost, occupancy, rows, context)) for rows in best.depth_rows]
    return [_decision(c, *best.choices[c.request_class], occupancy, best.rate * per_position, prices) for c in options]


@dataclass(frozen=True)
class _Settled:
    """What the classes choose and the step that it makes; `rate` and `positions` are those by which they chose, and
    `depth_rows` draft at each depth."""

    choices: Mapping[str, Choice]
    tokens_per_second: float
    rate: float
    positions: float
    depth_rows: Sequence[float]


def _speed(settled: _Settled) -> float:
    return settled.tokens_per_second


def _settle(
    options: Sequence[ClassOptions], cost: StepCost, occupancy: int, methods: frozenset[Method], start: _Settled
) -> _Settled:
    """Every class's choice among these methods. What a position must bring and the step depend on each other; a few
    rounds settle them."""
    context = sum(c.weight * c.context_tokens for c in options)
    plain_rate = occupancy / cost.step_seconds(occupancy, occupancy, context)
    found = start
    for _ in range(_ROUNDS):
        per_position = _slope(cost, found.positions, occupancy, context)
        choices = {
            c.request_class: _choose(c, cost, occupancy, found.rate, per_position, found.depth_rows, methods)
            for c in options
        }
        step = _expect(options, choices, occupancy)
        speed = step.tokens / step.seconds(cost, occupancy, context)
        rate = (found.rate + max(plain_rate, speed)) / 2
        positions = (found.positions + occupancy + step.proposed) / 2
        found = _Settled(choices, speed, rate, positions, step.depth_rows)
    return found


def _slope(cost: StepCost, positions: float, occupancy: int, context: float) -> float:
    """Seconds that one more position costs, with the margin on top: over all that steps range, since proposals come
    in bursts and cost is not a straight line."""
    spread = max(1.0, occupancy / 4, positions - occupancy)
    low, high = max(float(occupancy), positions - spread), positions + spread
    more = cost.step_seconds(occupancy, high, context) - cost.step_seconds(occupancy, low, context)
    return max(0.0, more / (high - low)) * (1 + _MARGIN)


def _choose(
    c: ClassOptions,
    cost: StepCost,
    occupancy: int,
    rate: float,
    per_position: float,
    depth_rows: Sequence[float],
    methods: frozenset[Method],
) -> Choice:
    """The setting, and how deep per option, whose expected tokens exceed their cost in tokens by the most."""
    best, choice = 0.0, NOT_AT_ALL
    for setting in sorted(c.by_setting):
        method = setting[0]
        if method not in methods:
            continue
        depths = dict[int | None, int]()
        # the draft model reads the prompt once, and all tokens that the row writes pay for it
        reading = rate * cost.draft_prefill_per_token * c.catch_up if method in _DRAFTING else 0.0
        gain = -reading - (rate * cost.per_lookup if method in _ASKING else 0.0)
        for option in c.by_setting[setting]:
            depth, worth = 0, 0.0
            running = 0.0
            for position, p in enumerate(option.reach):
                drafting = (
                    _draft_share(cost, occupancy, depth_rows[position], c.context_tokens) if option.per_depth else 0.0
                )
                price = rate * (per_position + drafting)
                running += p * (1 - reading) - price
                if running > worth:
                    depth, worth = position + 1, running
                elif not option.per_depth:
                    break
            depths[option.grade] = depth
            gain += option.share * worth
        if gain > best and any(depths.values()):
            best, choice = gain, (setting, depths)
    return choice


def _draft_share(cost: StepCost, occupancy: int, rows_so_deep: float, context: float) -> float:
    """A row's share of the draft forward that serves all rows drafting so deep: at first as if all did."""
    rows = max(1.0, rows_so_deep or occupancy)
    return cost.draft_step_seconds(rows, context) / rows


@dataclass(frozen=True)
class _Step:
    """What a step is expected to write and to take: positions that are proposed, rows that ask lookup, rows that draft
    at each depth, and prompt tokens that a draft model has to read for what is written."""

    tokens: float
    proposed: float
    asking: float
    depth_rows: Sequence[float]
    read_by_draft: float

    def seconds(self, cost: StepCost, occupancy: int, context: float) -> float:
        seconds = cost.step_seconds(occupancy, occupancy + self.proposed, context) + self.asking * cost.per_lookup
        seconds += sum(cost.draft_step_seconds(rows, context) for rows in self.depth_rows if rows > 0)
        return seconds + self.read_by_draft * cost.draft_prefill_per_token


def _expect(options: Sequence[ClassOptions], choices: Mapping[str, Choice], occupancy: int) -> _Step:
    tokens, proposed, asking, read_by_draft = 0.0, 0.0, 0.0, 0.0
    depth_rows = [0.0] * MAX_SPECULATIVE_TOKENS
    for c in options:
        setting, depths = choices[c.request_class]
        rows = c.weight * occupancy
        written = rows
        for option in c.by_setting.get(setting, ()):
            depth = depths.get(option.grade, 0)
            written += rows * option.share * sum(option.reach[:depth])
            proposed += rows * option.share * depth
            if option.per_depth:
                for position in range(depth):
                    depth_rows[position] += rows * option.share
        tokens += written
        asking += rows if setting[0] in _ASKING else 0.0
        read_by_draft += written * c.catch_up if setting[0] in _DRAFTING else 0.0
    return _Step(tokens, proposed, asking, depth_rows, read_by_draft)


def _decision(
    c: ClassOptions,
    setting: Setting,
    depths: dict[int | None, int],
    occupancy: int,
    break_even: float,
    draft_prices: Sequence[float],
) -> Decision:
    """`break_even` is the price of a position that lookup proposes, `draft_prices` those of drafted ones by depth."""
    method, least_match = setting
    used = [o for o in c.by_setting.get(setting, ()) if depths.get(o.grade, 0)]
    share = sum(o.share for o in used)
    first = sum(o.share * o.reach[0] for o in used) / share if share else _best_first(c)
    by_grade = tuple(depths.get(grade, 0) for grade in range(NUM_GRADES))
    k = max(depths.values(), default=0)
    reason = (
        f"profile: {method.value} pays at {occupancy} live rows"
        if k
        else f"profile: no proposal reaches the break-even of {break_even:.2f} at {occupancy} live rows"
    )
    proposed = [o.share * depths[o.grade] for o in used]
    paid = [o.share * sum(_prices(o, depths[o.grade], break_even, draft_prices)) for o in used]
    route = Route(
        method,
        k,
        reason,
        min_match_tokens=least_match,
        num_tokens_by_grade=by_grade if method in _ASKING else (),
        num_draft_tokens=depths.get(None, 0),
    )
    needed = sum(paid) / sum(proposed) if k else break_even
    return Decision(c.request_class, route, needed, first)


def _prices(option: Option, depth: int, break_even: float, draft_prices: Sequence[float]) -> Sequence[float]:
    return draft_prices[:depth] if option.per_depth else [break_even] * depth


def _best_first(c: ClassOptions) -> float:
    return max((o.reach[0] for found in c.by_setting.values() for o in found if o.reach), default=0.0)
