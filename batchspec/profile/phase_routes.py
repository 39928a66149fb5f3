"""Routes where every route is an engine of its own (vLLM): one draft setting for all classes that gain by it. Pure."""

from __future__ import annotations

from batchspec.profile.options import ClassOptions, class_options
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.predict import throughput
from batchspec.profile.records import Profile, StepCost
from batchspec.types import Method, Route

_DEPTHS = (1, 2, 3, 4, 6, 8)

# What a class must gain by the prediction before it is taken out of the plain engine.
_LEAST_GAIN = 0.03


def phase_routes(profile: Profile, methods: frozenset[Method], max_batch: int, num_rows: int) -> StaticPolicy:
    """The routes of a job of `num_rows` rows: target-only, and beside it the one speculative route that saves the most
    time over the classes which gain by it, if that is more than its engine takes to load.

    Acceptance is taken at its lower bound. A class that the profile does not know stays target-only, unless all that
    it knows gain: then no plain engine is loaded.
    """
    plain = Route(Method.TARGET_ONLY, reason="profile: no speculative engine would save what it takes to load")
    answered = sum(sample.num_rows for sample in profile.samples)
    scale = num_rows / max(1, answered)
    tokens = {s.request_class: scale * sum(s.output_tokens) for s in profile.samples}
    best: tuple[float, dict[str, Route]] = (profile.load_seconds, {})
    classes = class_options(profile)
    for method, least_match in sorted({setting for c in classes for setting in c.by_setting}):
        for k in _DEPTHS:
            if method not in methods or k > _deepest(profile, method):
                continue
            reason = f"profile: {method.value} pays at {max_batch} live rows"
            route = Route(method, k, reason, least_match)
            saved = {
                c.request_class: tokens[c.request_class] * _saved_per_token(profile.step_cost, c, max_batch, route)
                for c in classes
            }
            gaining = {label: seconds for label, seconds in saved.items() if seconds > 0}
            if sum(gaining.values()) > best[0]:
                best = (sum(gaining.values()), dict.fromkeys(gaining, route))
    routes = best[1]
    if len(routes) == len(profile.samples):
        return StaticPolicy(next(iter(routes.values())))
    return StaticPolicy(plain, routes)


def _deepest(profile: Profile, method: Method) -> int:
    return max((len(c.accepted_per_pos) for c in profile.acceptance if c.method == method.value), default=0)


def _saved_per_token(cost: StepCost, c: ClassOptions, occupancy: int, route: Route) -> float:
    """Seconds that a token of the class takes less on this route, at a full batch of the class; 0 where the gain is
    within what predictions err by."""

    def rate(chosen: Route) -> float:
        return throughput(cost, [c], occupancy, lambda label, n: chosen)[1]

    plain, drafted = rate(Route(Method.TARGET_ONLY)), rate(route)
    return 1 / plain - 1 / drafted if drafted > plain * (1 + _LEAST_GAIN) else 0.0
