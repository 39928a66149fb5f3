"""Routes where every route is an engine of its own (vLLM): one draft setting for all classes that gain by it. Pure."""

from __future__ import annotations

from dataclasses import replace

from batchspec.profile.options import ClassOptions, class_options
from batchspec.profile.policy import StaticPolicy, beyond_measured
from batchspec.profile.predict import throughput
from batchspec.profile.records import Profile, StepCost
from batchspec.types import Method, Route

# Rates nearer to each other than this are taken to be the same: predictions err by as much.
_LEAST_GAIN = 0.03


def phase_routes(profile: Profile, methods: frozenset[Method], max_batch: int, num_rows: int) -> StaticPolicy:
    """The routes of a job of `num_rows` rows: target-only; or the speculative route that saves the most time, either
    for all rows, where no class loses by it, or for the classes that gain by it, where they save more than a second
    engine takes to load.

    Acceptance is taken at its lower bound. A class that the profile does not know goes with the rest where there is
    one engine, and stays target-only where there are two.
    """
    plain = Route(Method.TARGET_ONLY, reason="profile: no speculative engine would save what it takes to load")
    if max_batch > profile.max_batch:
        return StaticPolicy(replace(plain, reason=beyond_measured(profile.max_batch)))
    shares = profile.row_shares
    tokens = {s.request_class: num_rows * shares[s.request_class] * s.mean_output_tokens for s in profile.samples}
    most_saved, best = 0.0, StaticPolicy(plain)
    classes = class_options(profile)
    for method, least_match in sorted({setting for c in classes for setting in c.by_setting}):
        for k in profile.draft_lengths(method) if method in methods else ():
            reason = f"profile: {method.value} pays at {max_batch} live rows"
            route = Route(method, k, reason, least_match)
            saved = {
                c.request_class: tokens[c.request_class] * _saved_per_token(profile.step_cost, c, max_batch, route)
                for c in classes
            }
            gaining = {label: seconds for label, seconds in saved.items() if seconds > 0}
            all_on_one = min(saved.values()) >= 0
            seconds = sum(gaining.values()) - (0.0 if all_on_one else profile.load_seconds)
            if seconds > most_saved:
                most_saved = seconds
                best = StaticPolicy(route) if all_on_one else StaticPolicy(plain, dict.fromkeys(gaining, route))
    return best


def _saved_per_token(cost: StepCost, c: ClassOptions, occupancy: int, route: Route) -> float:
    """Seconds that a token of the class takes less on this route, at a full batch of the class; below 0 where it takes
    more, 0 where the two rates are about the same."""

    def rate(chosen: Route) -> float:
        return throughput(cost, [c], occupancy, lambda label, n: chosen)[1]

    plain, drafted = rate(Route(Method.TARGET_ONLY)), rate(route)
    return 1 / plain - 1 / drafted if abs(drafted / plain - 1) > _LEAST_GAIN else 0.0
