"""Measuring a profile: decode a sample once, replay drafters over it, time the machine's steps, check with trials."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING

from batchspec.errors import InputError
from batchspec.ngrams import NgramIndex
from batchspec.profile.acceptance import DecodedRow, replay_draft, replay_lookup
from batchspec.profile.records import AcceptanceCell, Profile
from batchspec.profile.sample import SampledCompletion, class_samples, sampled_completions
from batchspec.profile.scope import Budget, ListSource, NotWorthMeasuring, Scope
from batchspec.profile.step_cost import StepCostTimer
from batchspec.profile.trials import run_trials
from batchspec.types import Method, Request, Route, StepReport

if TYPE_CHECKING:
    from batchspec.engine.engine import TorchEngine

logger = logging.getLogger(__name__)

# Of a job's own time, what measuring for it may take after the sample is decoded; and what timing the steps takes.
_JOB_SHARE = 0.05
_LEAST_TIMING_SECONDS = 10.0

# The sample is decoded in up to this many parts, with the timing of steps after each, and once more after the replay: a
# machine's speed changes within minutes.
_NUM_PARTS = 3

# Of the whole budget, what each such timing of the target's steps may take, and as much the draft model's.
_TIMING_SHARE = 0.06


def measure_profile(
    engine: TorchEngine,
    requests: Sequence[Request],
    fingerprint: dict[str, str],
    scope: Scope,
    say: Callable[[str], None],
) -> Profile:
    """Measure on `requests` (already a stratified sample) with a loaded engine. `say` gets one line per stage."""
    from batchspec.engine.timing import lines

    budget = Budget(scope.budget_seconds, perf_counter())
    decode_until = budget.started_at + budget.seconds / 2
    before, steps = engine.metered_seconds, _CountedSteps()
    completions: list[SampledCompletion] = []
    timer: StepCostTimer | None = None
    for part in _parts(requests, engine.info.max_batch):
        say(f"decoding {len(part)} sampled rows, target-only")
        outcomes = engine.run(ListSource(part, decode_until), steps)
        completions += sampled_completions(part, outcomes, engine.parts.encoder.encode)
        if not completions:
            continue
        if timer is None:
            if scope.job_rows is not None:
                budget = budget_for_job(budget, len(requests) / len(completions), scope.job_rows / len(completions))
            token_ids = [token for completion in completions for token in completion.token_ids]
            timer = StepCostTimer(engine.parts, token_ids, requests[0].sampling)
        say("timing steps")
        timer.add_rounds(budget.seconds * _TIMING_SHARE)
    if timer is None:
        raise InputError(
            "no sampled row was answered within half the budget: raise --budget, or see whether the rows fit the model"
        )
    skipped = []
    if len(completions) < len(requests):
        missing = len(requests) - len(completions)
        skipped.append(f"{missing} of {len(requests)} sampled rows: they failed, or half the budget was spent")
    own_seconds = lines(before, engine.metered_seconds)["overhead"] / max(1, steps.num_row_steps)
    lookup_seconds = _lookup_seconds([c.decoded for c in completions], min(scope.least_matches))

    say("replaying drafters")
    acceptance = _replay(engine, completions, scope)
    say("timing steps once more")
    timer.add_rounds(budget.seconds * _TIMING_SHARE)

    profile = Profile(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        sampling={"temperature": requests[0].sampling.temperature, "top_p": requests[0].sampling.top_p},
        max_batch=engine.info.max_batch,
        max_new_tokens=max(r.sampling.max_new_tokens for r in requests),
        samples=class_samples(completions, scope.row_shares),
        acceptance=acceptance,
        step_cost=timer.step_cost(own_seconds, lookup_seconds),
        skipped=tuple(skipped),
        memory_bytes=dict(engine.info.memory_bytes),
        load_seconds=before.get("load", 0.0) + before.get("warmup", 0.0),
    )
    tried = completions[: engine.info.max_batch]
    trials, untried = run_trials(engine, [c.request for c in tried], class_samples(tried), profile, scope, budget, say)
    return replace(
        profile,
        trials=trials,
        skipped=(*skipped, *untried),
        measuring_seconds=round(perf_counter() - budget.started_at, 1),
    )


def budget_for_job(budget: Budget, sample_over_part: float, job_over_part: float) -> Budget:
    """Decoding the whole sample, and a share of what the job will take, by the part decoded so far. Raises
    NotWorthMeasuring where timing the steps would already be more than that share."""
    spent = budget.seconds - budget.left
    share = _JOB_SHARE * spent * job_over_part
    if share < _LEAST_TIMING_SECONDS:
        raise NotWorthMeasuring(f"the job will take about {spent * job_over_part:.0f} s")
    return replace(budget, seconds=min(budget.seconds, spent * sample_over_part + share))


def _parts(requests: Sequence[Request], max_batch: int) -> list[Sequence[Request]]:
    """Whole batches at least: a small one decodes slower than the job will."""
    size = max(max_batch, -(-len(requests) // _NUM_PARTS))
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _replay(engine: TorchEngine, completions: Sequence[SampledCompletion], scope: Scope) -> tuple[AcceptanceCell, ...]:
    """Acceptance of every method over the sample's text."""
    from batchspec.engine.drafters import DraftModelDrafter

    rows = [c.decoded for c in completions]
    found: list[AcceptanceCell] = []
    if scope.methods & {Method.PROMPT_LOOKUP, Method.LOOKUP_THEN_DRAFT}:
        for least_match in scope.least_matches:
            found += replay_lookup(rows, scope.max_depth, least_match)
    drafter = engine.parts.drafters.get(Method.DRAFT_MODEL)
    if isinstance(drafter, DraftModelDrafter) and scope.methods & {Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT}:
        agrees = [
            drafter.agrees(row.token_ids, row.num_prompt_tokens, c.request.sampling, c.request.row_key)
            for row, c in zip(rows, completions, strict=True)
        ]
        if Method.DRAFT_MODEL in scope.methods:
            found += replay_draft(rows, agrees, scope.max_depth)
        if Method.LOOKUP_THEN_DRAFT in scope.methods:
            for least_match in scope.least_matches:
                found += replay_draft(rows, agrees, scope.max_depth, least_match)
    return tuple(found)


class _CountedSteps:
    """Target-only, counting rows times steps."""

    def __init__(self) -> None:
        self.num_row_steps = 0

    def route(self, request_class: str | None, occupancy: int) -> Route:
        return Route(Method.TARGET_ONLY, reason="profile")

    def observe(self, step: StepReport) -> None:
        self.num_row_steps += step.num_live


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
