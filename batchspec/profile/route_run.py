"""What runs tell of an engine that decodes all of its rows on one route (vLLM), without a look inside it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from batchspec.errors import InputError
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.scope import ListSource
from batchspec.types import Completion, Engine, Request, Route

# Tokens of a run that times steps: enough that its first steps, which read prompts, weigh little.
_TIMED_TOKENS = 33


@dataclass(frozen=True)
class StepTime:
    """Mean seconds of a decode step of `num_rows` rows with `num_positions` in all, at a mean context per row."""

    num_rows: int
    num_positions: float
    context_tokens: float
    seconds: float


@dataclass(frozen=True)
class RouteRun:
    """A sample decoded on one route, and steps timed after it. `seconds` is the sample's wall clock, `load_seconds`
    comes before it."""

    route: Route
    load_seconds: float
    seconds: float
    completions: tuple[Completion, ...]
    steps: tuple[StepTime, ...]

    @property
    def output_tokens(self) -> int:
        return sum(c.output_tokens for c in self.completions)

    @property
    def prefill_per_token(self) -> float:
        """Seconds that a prompt token took which no cache held."""
        read = sum(c.input_tokens - c.cached_input_tokens for c in self.completions)
        return sum(c.times.prefill_seconds for c in self.completions) / max(1, read)


def run_route(
    engine: Engine, requests: Sequence[Request], route: Route, row_counts: Sequence[int], limit_seconds: float = inf
) -> RouteRun:
    """Decode `requests` on `route`; then time steps with each of `row_counts` rows live, those with the shortest
    prompts, and at last with as many of the longest. No row is begun once a quarter of what loading leaves of the limit
    is over: it takes about as long again to end those, and to time steps."""
    load_seconds = sum(engine.metered_seconds.values())
    started = perf_counter()
    completions = _decode(engine, ListSource(requests, started + max(1.0, limit_seconds - load_seconds) / 4), route)
    seconds = perf_counter() - started
    tokens_of = {c.row_index: c.input_tokens for c in completions}
    answered = sorted((r for r in requests if r.row_index in tokens_of), key=lambda r: tokens_of[r.row_index])
    timed = [(count, answered) for count in row_counts] + [(max(row_counts), answered[::-1])]
    steps = [_step_time(engine, rows, count, route) for count, rows in timed if rows]
    return RouteRun(route, load_seconds, seconds, tuple(completions), tuple(steps))


def _decode(engine: Engine, source: ListSource, route: Route) -> list[Completion]:
    return [o for o in engine.run(source, StaticPolicy(route)) if isinstance(o, Completion)]


def _step_time(engine: Engine, requests: Sequence[Request], num_rows: int, route: Route) -> StepTime:
    """`num_rows` rows decoded together, all for as many tokens. Their prompts have just been read: where the engine
    keeps prompts, hardly a step does anything else."""
    rows = []
    for i in range(num_rows):
        request = requests[i % len(requests)]
        sampling = replace(request.sampling, stop=(), max_new_tokens=_TIMED_TOKENS, min_new_tokens=_TIMED_TOKENS)
        rows.append(replace(request, row_index=i, sampling=sampling))
    found = _decode(engine, ListSource(rows), route)
    if not found:
        raise InputError(f"no row has room for {_TIMED_TOKENS} more tokens: steps cannot be timed")
    row_steps = sum(c.stats.num_target_steps - 1 for c in found)  # the first token comes of the prompt's own forward
    steps = row_steps / num_rows
    drafted = sum(c.stats.num_draft_tokens for c in found)
    return StepTime(
        num_rows,
        num_rows + drafted / steps,
        sum(c.input_tokens for c in found) / num_rows + _TIMED_TOKENS / 2,
        sum(c.times.verify_seconds + c.times.overhead_seconds + (c.times.draft_seconds or 0.0) for c in found) / steps,
    )
