"""Engines that serve one route each: what runs of them tell, and which of them a job is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine import load_engine
from batchspec.profile.fit import fit_profile
from batchspec.profile.phase_routes import phase_routes
from batchspec.profile.records import AcceptanceCell, ClassSample, Curve, Profile, StepCost
from batchspec.profile.route_run import RouteRun, StepTime, run_route
from batchspec.profile.sample import SampledCompletion
from batchspec.profile.scope import Scope
from batchspec.profile.show import format_profile
from batchspec.stats import DecodeStats
from batchspec.types import Completion, FinishReason, Method, Request, Route, SamplingParams, StepTimes

LOOKUP, DRAFT = frozenset({Method.PROMPT_LOOKUP}), frozenset({Method.DRAFT_MODEL})
PLAIN = Route(Method.TARGET_ONLY)


def copying(accepted: int, per_lookup: float = 0.0, load_seconds: float = 10.0) -> Profile:
    """Two classes at a batch of 8: of 500 proposals in `copy` so many hold at each of two positions, in `write` none;
    a step takes 100 ms and 1 ms per position."""
    cells = (
        AcceptanceCell("copy", "prompt_lookup", 2, 2, 1, 500, 500, (accepted, accepted), (500 - accepted, 0)),
        AcceptanceCell("write", "prompt_lookup", 2, 2, 1, 500, 500, (0, 0), (500, 0)),
    )
    return Profile(
        created_at="2026-01-01T00:00:00+00:00",
        fingerprint={"engine": "vllm"},
        sampling={"temperature": 0.0},
        max_batch=8,
        max_new_tokens=40,
        samples=(ClassSample("copy", (8,) * 9, (40,) * 9), ClassSample("write", (8,) * 9, (40,) * 9)),
        acceptance=cells,
        step_cost=StepCost(Curve((1, 256), (0.101, 0.356)), 0.0, 0.0, 0.0, per_lookup, 0.0),
        load_seconds=load_seconds,
    )


@pytest.mark.parametrize(
    ("profile", "num_rows", "expected"),
    [
        pytest.param(copying(490), 10_000, {"copy": 2}, id="a class that gains, in a long job"),
        pytest.param(copying(490), 10, {}, id="the job is over before a second engine has loaded"),
        pytest.param(copying(490, load_seconds=1e6), 10_000, {}, id="the engine takes too long to load"),
        pytest.param(copying(490, per_lookup=0.1), 10_000, {}, id="an engine that speculates is slower by more"),
        pytest.param(copying(10), 10_000, {}, id="hardly a proposal holds"),
    ],
)
def test_a_second_engine_is_loaded_where_it_saves_more_than_its_load(
    profile: Profile, num_rows: int, expected: dict[str, int]
) -> None:
    policy = phase_routes(profile, LOOKUP, 8, num_rows)
    assert {label: route.num_speculative_tokens for label, route in policy.by_class.items()} == expected
    assert policy.route("write", 8).method is Method.TARGET_ONLY
    assert policy.route("never seen", 8).method is Method.TARGET_ONLY


def test_one_engine_serves_all_where_no_class_loses_by_it_however_short_the_job() -> None:
    profile = copying(490, load_seconds=1e6)
    only = replace(profile, samples=profile.samples[:1], acceptance=profile.acceptance[:1])
    for rows in (10, 10_000):
        policy = phase_routes(only, LOOKUP, 8, rows)
        assert not policy.by_class
        assert policy.route("never seen", 8).method is Method.PROMPT_LOOKUP


def test_such_a_profile_is_shown_with_the_engines_that_a_long_job_loads() -> None:
    lines = format_profile(copying(490), LOOKUP).splitlines()
    assert lines[0].startswith("A long job speculates")
    assert [line.split() for line in lines[2:5]] == [
        ["--max-batch", "1", "2", "4", "8"],
        ["copy", *["lookup", "2"] * 4],
        ["write", "lookup", "2", "lookup", "2", "-", "-"],  # loses nothing there, and needs no second engine
    ]
    assert format_profile(copying(10), LOOKUP).startswith("Do not speculate here")


def test_a_rare_class_is_worth_no_engine_and_a_larger_batch_than_was_measured_none_at_all() -> None:
    profile = copying(490, load_seconds=100.0)
    copy, write = profile.samples
    rare = replace(profile, samples=(replace(copy, input_share=0.01), replace(write, input_share=0.99)))
    assert phase_routes(profile, LOOKUP, 8, 10_000).by_class
    assert not phase_routes(rare, LOOKUP, 8, 10_000).by_class
    beyond = phase_routes(profile, LOOKUP, 9, 10_000)
    assert (beyond.by_class, beyond.default.reason) == ({}, "profile: measured up to 8 live rows")


def test_a_method_that_the_job_has_not_is_not_chosen() -> None:
    assert not phase_routes(copying(490), DRAFT, 8, 10_000).by_class


def completion(row: int, stats: DecodeStats, prefill_seconds: float = 1.0) -> Completion:
    return Completion(
        row_index=row,
        token_ids=tuple(range(4)),
        text="",
        finish_reason=FinishReason.LENGTH,
        input_tokens=100,
        cached_input_tokens=50,
        method=Method.TARGET_ONLY,
        num_speculative_tokens=0,
        num_route_changes=0,
        route_reason="",
        mean_live_sequences=1.0,
        stats=stats,
        times=StepTimes(prefill_seconds=prefill_seconds),
    )


def test_cost_and_acceptance_follow_from_the_runs() -> None:
    # 10 ms a step and 1 ms a row, 1 us per token of context; a prompt token takes 20 ms
    near = [StepTime(n, n, 100.0, 0.010 + n * 0.0011) for n in (1, 2, 4)]
    far = StepTime(4, 4, 1100.0, 0.010 + 4 * 0.0021)
    plain = RouteRun(PLAIN, 5.0, 10.0, (completion(0, DecodeStats(num_target_steps=4)),), (*near, far))
    # 4 rows with 2 positions each cost 4 * 20 ms more in the plain engine, and the draft model 12 ms a step
    drafted_stats = DecodeStats(
        num_target_steps=2,
        num_drafts=1,
        num_draft_tokens=2,
        num_accepted_tokens=2,
        num_accepted_tokens_per_pos=(1, 1),
        num_rejections_per_pos=(0, 0),
        num_draft_steps=2,
    )
    seconds = far.seconds + 4 * 0.020 + 0.012
    steps = (StepTime(4, 8, 1100.0, seconds),)
    draft = RouteRun(Route(Method.DRAFT_MODEL, 2), 9.0, 8.0, (completion(0, drafted_stats, 1.5),), steps)
    request = Request(0, prompt="x", request_class="copy", sampling=SamplingParams(max_new_tokens=4))
    sampled = [SampledCompletion(request, tuple(range(104)), 100)]
    profile = fit_profile(plain, [draft], sampled, {"engine": "vllm"}, 4, Scope(DRAFT))
    cost = profile.step_cost
    assert cost.per_kv_token == pytest.approx(1e-6)
    assert cost.prefill_per_token == pytest.approx(0.020)
    assert cost.step_seconds(2, 2, 100) == pytest.approx(0.0122)
    assert cost.step_seconds(4, 6, 100) == pytest.approx(0.0144 + 2 * 0.020)
    assert cost.draft_step_seconds(4, 100) == pytest.approx(0.006)
    assert cost.draft_prefill_per_token == pytest.approx(0.010)
    (cell,) = profile.acceptance
    assert (cell.request_class, cell.method, cell.num_steps, cell.accepted_per_pos) == (
        "copy",
        "draft_model",
        1,
        (1, 1),
    )
    assert [trial.setting for trial in profile.trials] == ["target_only", "draft_model k=2"]
    assert profile.load_seconds == 9.0


def test_no_engine_is_chosen_that_proposes_more_than_the_one_that_was_timed() -> None:
    steps = [StepTime(n, n, 100.0, 0.010) for n in (1, 2, 4)]  # further positions are nearly free
    plain = RouteRun(PLAIN, 5.0, 10.0, (completion(0, DecodeStats(num_target_steps=40), 1e-6),), (*steps, steps[-1]))
    lookup = RouteRun(Route(Method.PROMPT_LOOKUP, 2), 5.0, 8.0, plain.completions, (StepTime(4, 12, 100.0, 0.010),))
    request = Request(0, prompt="x", request_class="copy", sampling=SamplingParams(max_new_tokens=40))
    sampled = [SampledCompletion(request, (1, 2, 3, 4) * 40, 120)]
    profile = fit_profile(plain, [lookup], sampled, {"engine": "vllm"}, 4, Scope(LOOKUP))
    assert {len(cell.accepted_per_pos) for cell in profile.acceptance} == {2}
    assert phase_routes(profile, LOOKUP, 4, 10_000).route("copy", 4).num_speculative_tokens == 2


def test_a_run_decodes_the_sample_and_times_every_number_of_rows() -> None:
    config = EngineConfig(engine="fake", max_batch=4, fake_tokens_per_second=20_000)
    rows = [Request(i, prompt="a b " * (i + 1), sampling=SamplingParams(max_new_tokens=8)) for i in range(6)]
    route = Route(Method.PROMPT_LOOKUP, 2)
    engine = load_engine(config, "cpu", 1, 1.0, StepAttributionRule(), route)
    run = run_route(engine, rows, route, [1, 2, 4])
    assert sorted(c.row_index for c in run.completions) == list(range(6))
    assert run.output_tokens == sum(len(c.token_ids) for c in run.completions) > 0
    assert [step.num_rows for step in run.steps] == [1, 2, 4, 4]
    assert run.steps[3].context_tokens > run.steps[2].context_tokens
    assert all(step.seconds > 0 and step.num_positions > step.num_rows for step in run.steps)
