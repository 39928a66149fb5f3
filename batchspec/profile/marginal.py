"""The rule that routes: propose a position iff it pays for its time.

Rows of all classes share a step, so the question is marginal. A step of n rows yields Y tokens in T seconds. One more
position costs t seconds and yields a token with probability P (it is reached and accepted), so it raises Y / T iff
P > t Y / T, the break-even. Doubt counts against speculation: P is a lower bound. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchspec.config import MAX_SPECULATIVE_TOKENS
from batchspec.ngrams import NUM_GRADES
from batchspec.profile.options import ClassOptions, Option, Setting
from batchspec.profile.records import StepCost
from batchspec.types import Method, Route

# What one class does: its setting, and how deep it proposes by grade.
Choice = tuple[Setting, dict[int | None, int]]
NOT_AT_ALL: Choice = ((Method.TARGET_ONLY, 0), {})

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

    Break-even and step depend on each other; a few rounds settle them.
    """
    context = sum(c.weight * c.context_tokens for c in options)
    plain = occupancy / cost.step_seconds(occupancy, occupancy, context)
    rate, positions = plain, float(occupancy)
    depth_rows = [0.0] * MAX_SPECULATIVE_TOKENS
    choices: dict[str, Choice] = {}
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
        choices = {c.request_class: NOT_AT_ALL for c in options}
    return [_decision(c, *choices[c.request_class], occupancy, rate * per_position, prices) for c in options]


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
        gain, depths = 0.0, dict[int | None, int]()
        asks_lookup = method is not Method.DRAFT_MODEL
        gain -= rate * cost.per_lookup if asks_lookup else 0.0
        if method is not Method.PROMPT_LOOKUP:  # a token more or less a step, the prompt is read once
            gain -= rate * cost.draft_prefill_per_token * c.catch_up
        for option in c.by_setting[setting]:
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
            depths[option.grade] = depth
            gain += option.share * worth
        if gain > best and any(depths.values()):
            best, choice = gain, (setting, depths)
    return choice


def _draft_share(cost: StepCost, occupancy: int, rows_so_deep: float, context: float) -> float:
    """A row's share of the draft forward that serves all rows drafting so deep: at first as if all did."""
    rows = max(1.0, rows_so_deep or occupancy)
    return cost.draft_step_seconds(rows, context) / rows


def _expect(
    options: Sequence[ClassOptions], choices: Mapping[str, Choice], occupancy: int
) -> tuple[float, float, list[float], float]:
    """Expected tokens, extra positions, rows drafting at each depth, and rows asking lookup, in a step."""
    tokens, extra, asked = float(occupancy), 0.0, 0.0
    depth_rows = [0.0] * MAX_SPECULATIVE_TOKENS
    for c in options:
        setting, depths = choices[c.request_class]
        rows = c.weight * occupancy
        asked += rows if setting[0] in (Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT) else 0.0
        for option in c.by_setting.get(setting, ()):
            depth = depths.get(option.grade, 0)
            tokens += rows * option.share * sum(option.reach[:depth])
            extra += rows * option.share * depth
            if option.per_depth:
                for position in range(depth):
                    depth_rows[position] += rows * option.share
    return tokens, extra, depth_rows, asked


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
    lookup = method in (Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT)
    route = Route(
        method,
        k,
        reason,
        min_match_tokens=least_match,
        num_tokens_by_grade=by_grade if lookup else (),
        num_draft_tokens=depths.get(None, 0),
    )
    needed = sum(paid) / sum(proposed) if k else break_even
    return Decision(c.request_class, route, needed, first)


def _prices(option: Option, depth: int, break_even: float, draft_prices: Sequence[float]) -> Sequence[float]:
    return draft_prices[:depth] if option.per_depth else [break_even] * depth


def _best_first(c: ClassOptions) -> float:
    return max((o.reach[0] for found in c.by_setting.values() for o in found if o.reach), default=0.0)
