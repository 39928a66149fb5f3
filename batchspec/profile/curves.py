"""What a profile says of speculation as curves: over the draft length, and over the number of live rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from batchspec.profile.predict import mean_options, throughput
from batchspec.profile.records import Profile
from batchspec.profile.routing import job_policy
from batchspec.types import Method, Route

RouteOf = Callable[[str, int], Route]
Mix = Callable[[int, RouteOf], tuple[float, float]]

_STATIC_DEPTH = 4


@dataclass(frozen=True)
class DepthCurve:
    """One method for all classes: by draft length, tokens per row and step, and speed-up by number of live rows."""

    method: Method
    depths: tuple[int, ...]
    tokens_per_step: tuple[float, ...]
    speed_ups: dict[int, tuple[float, ...]]


@dataclass(frozen=True)
class OccupancyCurve:
    """One setting for all classes: throughput against target-only by number of live rows, and where it falls below it
    (None: nowhere up to the last)."""

    setting: str
    live_rows: tuple[int, ...]
    ratios: tuple[float, ...]

    @property
    def crossover(self) -> float | None:
        """Live rows at which the ratio passes 1 on its way down, between two points by a straight line."""
        points = list(zip(self.live_rows, self.ratios, strict=True))
        for (n0, r0), (n1, r1) in pairwise(points):
            if r0 >= 1 > r1:
                return n0 + (n1 - n0) * (r0 - 1) / (r0 - r1)
        return None


def occupancies(max_batch: int) -> list[int]:
    """1, 2, 4, ... up to the profile's largest batch."""
    found = [2**i for i in range(max_batch.bit_length()) if 2**i <= max_batch]
    return found if found[-1] == max_batch else [*found, max_batch]


def depth_curves(profile: Profile, methods: frozenset[Method], live_rows: Sequence[int]) -> list[DepthCurve]:
    mix = _mix_of(profile)
    curves = []
    for method in sorted(methods):
        depths = profile.draft_lengths(method)
        routes = [_static(profile, method, k) for k in depths]
        found = {n: tuple(_against_plain(mix, n, route) for route in routes) for n in live_rows}
        tokens = tuple(mix(live_rows[0], route)[0] for route in routes)
        curves.append(DepthCurve(method, depths, tokens, found))
    return curves


def occupancy_curves(profile: Profile, methods: frozenset[Method]) -> list[OccupancyCurve]:
    """Routed by the profile first, then every method with a usual draft length for all."""
    counts = occupancies(profile.max_batch)
    mix, policies = _mix_of(profile), {n: job_policy(profile, methods, n) for n in counts}
    settings: list[tuple[str, RouteOf]] = [("routed", lambda label, n: policies[n].route(label, n))]
    for method in sorted(methods):
        k = max(k for k in profile.draft_lengths(method) if k <= _STATIC_DEPTH)
        settings.append((f"{method.value} k={k}", _static(profile, method, k)))
    return [
        OccupancyCurve(name, tuple(counts), tuple(_against_plain(mix, n, route_of) for n in counts))
        for name, route_of in settings
    ]


def _mix_of(profile: Profile) -> Mix:
    """Tokens per row and step, and tokens per second, of the profile's mix, by live rows and routes."""
    return partial(throughput, profile.step_cost, mean_options(profile))


def _against_plain(mix: Mix, live_rows: int, route_of: RouteOf) -> float:
    return mix(live_rows, route_of)[1] / mix(live_rows, lambda label, n: Route(Method.TARGET_ONLY))[1]


def _static(profile: Profile, method: Method, depth: int) -> RouteOf:
    """One route for all, prompt lookup with the longest least match that was measured."""
    least = max(cell.min_match_tokens or 0 for cell in profile.acceptance if cell.method == method)
    route = Route(method, depth, min_match_tokens=least)
    return lambda request_class, occupancy: route
