"""A profile from runs of whole engines, one for each route: step cost and acceptance by what they took and told. Pure.

The plain engine's runs give the seconds of a step by live rows, of context and of prompts. What a speculative engine's
step takes beyond a plain one of as many positions is its drafting. An engine keeps its draft length, so lookup's
acceptance is replayed over the plain engine's text, while a draft model's is what its engine counted; neither goes
deeper than the engine that was timed, so that no job is given an engine whose cost is a guess.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from batchspec.profile.acceptance import replay_lookup
from batchspec.profile.policy import setting_name
from batchspec.profile.predict import predict_seconds
from batchspec.profile.records import AcceptanceCell, Curve, Profile, StepCost, Trial
from batchspec.profile.route_run import RouteRun, StepTime
from batchspec.profile.sample import SampledCompletion, class_samples
from batchspec.profile.scope import Scope
from batchspec.stats import DecodeStats
from batchspec.types import Method, Request
from batchspec.workload import RequestClassifier

# Positions beyond the largest batch, as far as the curve is drawn.
_MORE_POSITIONS = 256


def fit_profile(
    plain: RouteRun,
    drafting: Sequence[RouteRun],
    sampled: Sequence[SampledCompletion],
    fingerprint: dict[str, str],
    max_batch: int,
    scope: Scope,
    skipped: tuple[str, ...] = (),
    measuring_seconds: float = 0.0,
) -> Profile:
    """The profile of a plain engine and of one engine per drafting method; `sampled` is what the plain one wrote."""
    cost = _plain_cost(plain)
    acceptance: list[AcceptanceCell] = []
    for run in drafting:
        cost = _with_drafting(cost, run, plain)
        if run.route.method is Method.PROMPT_LOOKUP:
            rows = [s.decoded for s in sampled]
            for least_match in scope.least_matches:
                acceptance += replay_lookup(rows, run.route.num_speculative_tokens, least_match)
        else:
            acceptance += _counted(run, [s.request for s in sampled])
    first = sampled[0].request.sampling
    profile = Profile(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        sampling={"temperature": first.temperature, "top_p": first.top_p},
        max_batch=max_batch,
        max_new_tokens=max(s.request.sampling.max_new_tokens for s in sampled),
        samples=class_samples(sampled, scope.row_shares),
        acceptance=tuple(acceptance),
        step_cost=cost,
        skipped=skipped,
        measuring_seconds=round(measuring_seconds, 1),
        load_seconds=max(run.load_seconds for run in (plain, *drafting)),
    )
    return replace(profile, trials=tuple(_trial(profile, run) for run in (plain, *drafting)))


def _plain_cost(plain: RouteRun) -> StepCost:
    """Steps of one position a row; the last was timed with long prompts, the one before it with short ones. Beyond the
    largest batch a position costs what a prompt's costs."""
    *near, far = plain.steps
    added = far.num_rows * (far.context_tokens - near[-1].context_tokens)
    per_kv_token = max(0.0, (far.seconds - near[-1].seconds) / added) if added > 0 else 0.0
    points = {step.num_rows: _without_context(step, per_kv_token) for step in near}
    last = max(points)
    points[last + _MORE_POSITIONS] = points[last] + _MORE_POSITIONS * plain.prefill_per_token
    points.setdefault(last + 1, points[last] + plain.prefill_per_token)
    counts = sorted(points)
    curve = Curve(tuple(counts), tuple(points[count] for count in counts)).convex()
    return StepCost(curve, per_kv_token, 0.0, 0.0, 0.0, plain.prefill_per_token)


def _without_context(step: StepTime, per_kv_token: float) -> float:
    return max(1e-6, step.seconds - step.num_rows * step.context_tokens * per_kv_token)


def _with_drafting(cost: StepCost, run: RouteRun, plain: RouteRun) -> StepCost:
    """What the engine of `run` adds to a step: for lookup by row, for a draft model by forward."""
    beyond = [
        (step.num_rows, step.seconds - cost.step_seconds(step.num_rows, step.num_positions, step.context_tokens))
        for step in run.steps
    ]
    num_rows = max(count for count, _ in beyond)
    seconds = max(0.0, sum(s for _, s in beyond) / len(beyond))
    if run.route.method is Method.PROMPT_LOOKUP:
        return replace(cost, per_lookup=seconds / num_rows)
    per_forward = seconds / run.route.num_speculative_tokens
    return replace(
        cost,
        draft=Curve((1, max(2, num_rows)), (per_forward, per_forward)),
        draft_prefill_per_token=max(0.0, run.prefill_per_token - plain.prefill_per_token),
    )


def _counted(run: RouteRun, requests: Sequence[Request]) -> list[AcceptanceCell]:
    """A draft model's cells by class, from the counters of the rows that its engine decoded."""
    label_of_row = {r.row_index: RequestClassifier().label(r.request_class) for r in requests}
    by_class: dict[str, DecodeStats] = defaultdict(DecodeStats)
    for completion in run.completions:
        if completion.row_index in label_of_row:
            by_class[label_of_row[completion.row_index]] += completion.stats
    return [
        AcceptanceCell(
            label,
            run.route.method.value,
            None,
            None,
            None,
            stats.num_target_steps,
            stats.num_drafts,
            stats.num_accepted_tokens_per_pos,
            stats.num_rejections_per_pos,
        )
        for label, stats in sorted(by_class.items())
    ]


def _trial(profile: Profile, run: RouteRun) -> Trial:
    """The engine's run of the sample, beside what the profile says of it."""
    predicted = predict_seconds(profile, profile.samples, lambda label, n: run.route, profile.max_batch)
    return Trial(setting_name(run.route), profile.max_batch, run.output_tokens, run.seconds, predicted)
