"""A job in phases: an engine that serves one route at a time takes the rows of each route in turn, over all shards.

So each worker loads each engine once. What a phase finishes of a shard waits in its journal for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchspec.config import RunConfig
from batchspec.engine.vllm_routes import TARGET_ONLY_COLUMNS, TARGET_ONLY_REASON, engine_key, needs_target_only
from batchspec.io.inputs import InputSet
from batchspec.profile.policy import ANY_CLASS, StaticPolicy
from batchspec.profile.records import Profile
from batchspec.types import Method, Route


@dataclass(frozen=True, slots=True)
class Phase:
    """The rows that one engine serves: those of `route`, or all (None). `rows` says which these are, for people."""

    route: Route | None = None
    rows: str = "all rows"

    @property
    def title(self) -> str:
        if self.route is None:
            return self.rows
        method, k = self.route.method.option_name, self.route.num_speculative_tokens
        return f"{method}{f' with {k} tokens' if k else ''} for {self.rows}"


def plan_phases(config: RunConfig, inputs: InputSet, routes: StaticPolicy | Profile) -> tuple[Phase, ...]:
    """One phase, or, for vLLM, one for each of the settled routes that its rows may take; target-only first."""
    if config.engine.engine != "vllm" or isinstance(routes, Profile):
        return (Phase(),)
    rows_of: dict[tuple[str, int, int], list[str]] = {}
    route_of: dict[tuple[str, int, int], Route] = {}
    for rows, route in _routes(routes, config, inputs):
        route_of.setdefault(engine_key(route), route)
        rows_of.setdefault(engine_key(route), []).append(rows)
    phases = [Phase(route, ", ".join(rows_of[key])) for key, route in route_of.items()]
    return tuple(sorted(phases, key=lambda phase: phase.route is None or phase.route.method is not Method.TARGET_ONLY))


def _routes(policy: StaticPolicy, config: RunConfig, inputs: InputSet) -> Iterator[tuple[str, Route]]:
    plain = Route(Method.TARGET_ONLY, reason=TARGET_ONLY_REASON)
    rows_differ = not TARGET_ONLY_COLUMNS.isdisjoint(inputs.schema.names)
    if needs_target_only(config.sampling) and not rows_differ:
        yield "all rows: they have a stop string, min_p or logit_bias", plain
        return
    for name, route in policy.by_class.items():
        yield "every other class" if name == ANY_CLASS else f"class {name}", route
    if ANY_CLASS not in policy.by_class:
        yield "every other class" if policy.by_class else "all classes", policy.default
    if rows_differ:
        yield "rows with a stop string, min_p or logit_bias", plain
