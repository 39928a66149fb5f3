"""Measuring a profile: decode a sample once, replay drafters over it, time the machine's steps, check with trials."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING

from batchspec.errors import InputError, UsageError
from batchspec.ngrams import NgramIndex
from batchspec.profile.acceptance import DecodedRow, replay_draft, replay_lookup
from batchspec.profile.records import Curve, Profile, StepCost
from batchspec.profile.sample import SampledCompletion, class_samples
from batchspec.profile.scope import Budget, ListSource, NotWorthMeasuring, Scope
from batchspec.profile.trials import run_trials
from batchspec.types import Completion, Method, Request, Route, RoutePolicy, StepReport

if TYPE_CHECKING:
    from batchspec.engine.engine import TorchEngine
    from batchspec.engine.timing import EngineTimer, Shape

logger = logging.getLogger(__name__)

_POSITIONS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SHORT_CONTEXT = 64
_LONG_CONTEXT = 1024
_WIDE = 4
_CHUNK = 256

# Of a job's own time, what measuring for it may take after the sample is decoded; and what timing the steps takes.
_JOB_SHARE = 0.05
_LEAST_TIMING_SECONDS = 10.0

# Of what is left after decoding, what timing the target's steps may take, and as much the draft model's.
_TIMING_SHARE = 0.4


def measure_profile(
    engine: TorchEngine,
    requests: Sequence[Request],
    fingerprint: dict[str, str],
    scope: Scope,
    say: Callable[[str], None],
) -> Profile:
    """Measure on `requests` (already a stratified sample) with a loaded engine. `say` gets one line per stage."""
    from batchspec.engine.timing import EngineTimer, lines

    budget = Budget(scope.budget_seconds, perf_counter())
    skipped: list[str] = []
    say(f"decoding {len(requests)} sampled rows, target-only")
    before, steps = engine.metered_seconds, _CountedSteps()
    load_seconds = before.get("load", 0.0) + before.get("warmup", 0.0)
    completions = _decode(engine, requests, steps, limit_seconds=budget.left * 0.5)
    spent = lines(before, engine.metered_seconds)
    if not completions:
        raise InputError(
            "no sampled row was answered within half the budget: raise --budget, or see whether the rows fit the model"
        )
    rows = [c.decoded for c in completions]
    if len(completions) < len(requests):
        skipped.append(f"{len(requests) - len(completions)} of {len(requests)} sampled rows: half the budget was spent")

    if scope.job_rows is not None:
        budget = budget_for_job(budget, scope.job_rows / len(completions))
    say("timing steps")
    timer = EngineTimer(engine, [row.token_ids for row in rows], requests[0].sampling)
    lookup_seconds = _lookup_seconds(rows, min(scope.least_matches))
    per_sequence = spent["overhead"] / max(1, steps.num_row_steps)
    limit = budget.left * _TIMING_SHARE
    cost = _step_cost(timer, engine.info.max_batch, per_sequence, lookup_seconds, limit)

    say("replaying drafters")
    acceptance = []
    if scope.methods & {Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT}:
        for least_match in scope.least_matches:
            acceptance += replay_lookup(rows, scope.max_depth, least_match)
    if timer.draft is not None and scope.methods & {Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT}:
        agrees = [
            timer.draft_agrees(row.token_ids, row.num_prompt_tokens, c.request.sampling, c.request.row_key)
            for row, c in zip(rows, completions, strict=True)
        ]
        if Method.DRAFT_MODEL in scope.methods:
            acceptance += replay_draft(rows, agrees, scope.max_depth)
        if Method.LOOKUP_THEN_DRAFT in scope.methods:
            for least_match in scope.least_matches:
                acceptance += replay_draft(rows, agrees, scope.max_depth, least_match)

    profile = Profile(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        sampling={"temperature": requests[0].sampling.temperature, "top_p": requests[0].sampling.top_p},
        max_batch=engine.info.max_batch,
        max_new_tokens=max(r.sampling.max_new_tokens for r in requests),
        samples=class_samples(completions),
        acceptance=tuple(acceptance),
        step_cost=cost,
        skipped=tuple(skipped),
        memory_bytes=dict(engine.info.memory_bytes),
        load_seconds=load_seconds,
    )
    tried = completions[: engine.info.max_batch]
    trials, untried = run_trials(engine, [c.request for c in tried], class_samples(tried), profile, scope, budget, say)
    return replace(
        profile,
        trials=trials,
        skipped=(*skipped, *untried),
        measuring_seconds=round(perf_counter() - budget.started_at, 1),
    )


def budget_for_job(budget: Budget, job_over_sample: float) -> Budget:
    """A share of what the job will take by the sample's decoding so far. Raises NotWorthMeasuring where timing the
    steps would already be more."""
    spent = budget.seconds - budget.left
    seconds = min(budget.seconds, spent + _JOB_SHARE * spent * job_over_sample)
    if seconds - spent < _LEAST_TIMING_SECONDS:
        raise NotWorthMeasuring(f"the job will take about {spent * job_over_sample:.0f} s")
    return replace(budget, seconds=seconds)


class _CountedSteps:
    """Target-only, counting rows times steps."""

    def __init__(self) -> None:
        self.num_row_steps = 0

    def route(self, request_class: str | None, occupancy: int) -> Route:
        return Route(Method.TARGET_ONLY, reason="profile")

    def observe(self, step: StepReport) -> None:
        self.num_row_steps += step.num_live


def _decode(
    engine: TorchEngine, requests: Sequence[Request], policy: RoutePolicy, limit_seconds: float
) -> list[SampledCompletion]:
    """Outputs of the rows that were answered; no new row is begun after `limit_seconds`."""
    deadline = perf_counter() + limit_seconds
    by_index = {request.row_index: request for request in requests}

    class Limited(ListSource):
        def take(self, wait: bool) -> Request | None:
            return super().take(wait) if perf_counter() < deadline else None

    found = []
    for outcome in engine.run(Limited(requests), policy):
        if isinstance(outcome, Completion):
            request = by_index[outcome.row_index]
            prompt = engine.parts.encoder.encode(request)
            found.append(SampledCompletion(request, (*prompt, *outcome.token_ids), len(prompt)))
    return found


def _lookup_seconds(rows: Sequence[DecodedRow], min_match_tokens: int) -> float:
    """Seconds that one row's lookup takes in a step, timed on the sampled rows."""
    started, asked = perf_counter(), 0
    for row in rows[:16]:
        index, seen = NgramIndex(min_match_tokens), list(row.token_ids[: row.num_prompt_tokens])
        for place in range(row.num_prompt_tokens + 1, len(row.token_ids)):
            seen.append(row.token_ids[place - 1])
            index.extend(seen)
            index.longest_match(seen)
            asked += 1
    return (perf_counter() - started) / max(1, asked)


def _step_cost(
    timer: EngineTimer, max_batch: int, per_sequence: float, per_lookup: float, limit_seconds: float
) -> StepCost:
    shapes = [_shape(count, max_batch, _SHORT_CONTEXT) for count in _POSITIONS]
    long_context = min(_LONG_CONTEXT, timer.most_context(max_batch))
    if long_context <= _SHORT_CONTEXT:
        raise UsageError("the KV cache is too small to time a full batch: raise --kv-memory, or lower --max-batch")
    far: Shape = (max_batch, 1, long_context, False)
    near: Shape = (max_batch, 1, _SHORT_CONTEXT, False)
    wide_far: Shape = (max_batch, _WIDE, long_context, False)
    wide_near: Shape = (max_batch, _WIDE, _SHORT_CONTEXT, False)
    chunk: Shape = (1, _CHUNK, _CHUNK, True)
    seconds = timer.target_seconds([*shapes, far, near, wide_far, wide_near, chunk], limit_seconds)
    added_context = max_batch * (long_context - _SHORT_CONTEXT)
    per_kv_token = max(0.0, (seconds[far] - seconds[near]) / added_context)
    wide_per_kv_token = max(per_kv_token, (seconds[wide_far] - seconds[wide_near]) / added_context)
    per_position_kv_token = (wide_per_kv_token - per_kv_token) / (_WIDE - 1)
    curve = _curve(seconds, shapes, per_kv_token, per_position_kv_token)
    cost = StepCost(curve, per_kv_token, per_position_kv_token, per_sequence, per_lookup, seconds[chunk] / _CHUNK)
    if timer.draft is None:
        return cost
    draft_shapes = [_shape(count, max_batch, _SHORT_CONTEXT) for count in _POSITIONS if count <= 2 * max_batch + 1]
    far_draft: Shape = (max_batch, 1, min(long_context, timer.most_draft_context()), False)
    draft_seconds = timer.draft_seconds([*draft_shapes, near, far_draft, chunk], limit_seconds)
    added_context = max_batch * max(1, far_draft[2] - _SHORT_CONTEXT)
    draft_per_kv_token = max(0.0, (draft_seconds[far_draft] - draft_seconds[near]) / added_context)
    return replace(
        cost,
        draft=_curve(draft_seconds, draft_shapes, draft_per_kv_token, 0.0),
        draft_per_kv_token=draft_per_kv_token,
        draft_prefill_per_token=draft_seconds[chunk] / _CHUNK,
    )


def _shape(positions: int, max_batch: int, context: int) -> Shape:
    """About this many positions, over as many sequences as the batch allows."""
    sequences = min(positions, max_batch)
    return (sequences, -(-positions // sequences), context, False)


def _curve(
    seconds: dict[Shape, float], shapes: Sequence[Shape], per_kv_token: float, per_position_kv_token: float
) -> Curve:
    """Seconds over positions, what the short context took taken off."""
    points = {}
    for shape in shapes:
        n, m, context, _ = shape
        for_context = n * context * (per_kv_token + (m - 1) * per_position_kv_token)
        points[n * m] = max(1e-6, seconds[shape] - for_context)
    counts = sorted(points)
    return Curve(tuple(counts), tuple(points[count] for count in counts)).monotone()
