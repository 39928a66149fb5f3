"""`plan`: what a job will take, from a hand-made profile and a tokenizer; and profiles that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.config import EngineConfig, InputConfig, RouteConfig, RunConfig, RunOptions
from batchspec.errors import CostLimitExceeded, MismatchError, UsageError
from batchspec.pipeline.planning import compare_engines, compared, plan_job, refuse_expensive
from batchspec.pipeline.profiling import check_profile, job_profile, job_routes, policy_of, run_fingerprint
from batchspec.profile.records import AcceptanceCell, ClassSample, Curve, Profile, StepCost
from batchspec.profile.store import load_profile, save_profile
from batchspec.types import Method, SamplingParams
from tests.engine.tiny import ARCHITECTURES, byte_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """100 rows of two classes, 8 tokens each, a model directory without weights, and a profile that fits."""
    model = tmp_path / "model"
    byte_tokenizer().save_pretrained(model)
    ARCHITECTURES["llama"].save_pretrained(model)
    prompts = ["abcdefgh"] * 100
    pq.write_table(pa.table({"prompt": prompts, "request_class": ["copy", "write"] * 50}), tmp_path / "in.parquet")
    made = RunConfig(
        input=InputConfig(inputs=(str(tmp_path / "in.parquet"),)),
        engine=EngineConfig(model=str(model), max_batch=4),
        sampling=SamplingParams(max_new_tokens=40),
        routes=RouteConfig(profile=str(tmp_path / "profile.json")),
        run=RunOptions(devices=("cpu",), price_per_hour=3.6),
    )
    save_profile(
        Profile(
            created_at="2026-01-01T00:00:00+00:00",
            fingerprint=run_fingerprint(made),
            sampling={"temperature": 0.0},
            max_batch=4,
            max_new_tokens=40,
            samples=(ClassSample("copy", (8,) * 9, (40,) * 9), ClassSample("write", (8,) * 9, (40,) * 9)),
            acceptance=(AcceptanceCell("copy", "prompt_lookup", 2, 3, 1, 500, 500, (480, 470), (20, 10)),),
            step_cost=StepCost(Curve((1, 256), (0.101, 0.356)), 0.0, 0.0, 0.0, 0.0, 0.0),
            load_seconds=10.0,
        ),
        tmp_path / "profile.json",
    )
    return made


def test_a_plan_gives_rows_tokens_time_cost_and_the_saving(config: RunConfig) -> None:
    plan = plan_job(config)
    assert (plan.rows, plan.input_tokens, plan.output_tokens) == (100, 800, 4000)
    # 25 batches of 4 rows, 39 steps after the first token, 104 ms a step, 10 s of loading
    assert plan.target_only_seconds == pytest.approx(10 + 25 * 39 * 0.104, rel=0.05)
    assert plan.seconds < plan.target_only_seconds
    assert plan.seconds_low < plan.seconds < plan.seconds_high
    assert plan.cost_usd == pytest.approx(plan.seconds * 0.001, rel=0.01)
    assert plan.routes == {"copy": "prompt_lookup k=2", "write": "target_only"}
    assert plan.verdict.startswith("speculating should save")
    json.dumps(plan.as_json(), allow_nan=False)


def test_rows_that_cannot_be_answered_and_shared_beginnings_take_no_time(config: RunConfig, tmp_path: Path) -> None:
    profile = load_profile(tmp_path / "profile.json")
    with_prefill = replace(profile, step_cost=replace(profile.step_cost, prefill_per_token=0.001))
    save_profile(with_prefill, tmp_path / "profile.json")

    def seconds(prompts: list[str | None]) -> float:
        path = tmp_path / "other.parquet"
        table = pa.table({"prompt": pa.array(prompts, pa.string()), "request_class": ["write"] * len(prompts)})
        pq.write_table(table, path)
        return plan_job(replace(config, input=InputConfig(inputs=(str(path),)))).target_only_seconds - 10

    different = [f"{number} " + "x y z " * 100 for number in range(20)]
    assert seconds([]) == -10  # nothing is loaded either
    assert seconds([*different, *[None] * 20]) == pytest.approx(seconds(different), rel=0.01)
    # 600 tokens a prompt: nine chunks of 64 are read once
    read_once = seconds(["x y z " * 100 + str(number) for number in range(20)])
    assert seconds(different) - read_once == pytest.approx(19 * 576 * 0.001, rel=0.05)


def with_rows(config: RunConfig, tmp_path: Path, classes: list[str]) -> RunConfig:
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({"prompt": ["abcdefgh"] * len(classes), "request_class": classes}), path)
    return replace(config, input=InputConfig(inputs=(str(path),)))


def test_classes_that_take_turns_in_a_long_input_are_all_counted(config: RunConfig, tmp_path: Path) -> None:
    plan = plan_job(with_rows(config, tmp_path, ["copy", "write"] * 600))
    assert plan.rows_by_class == {"copy": 600, "write": 600}
    assert plan.target_only_seconds == pytest.approx(10 + 300 * 39 * 0.104, rel=0.02)


def test_every_worker_has_its_part_of_the_rows(config: RunConfig, tmp_path: Path) -> None:
    few = with_rows(config, tmp_path, ["write"] * 8)
    shared = replace(few, run=replace(config.run, workers=4, threads=2))
    profile = load_profile(tmp_path / "profile.json")
    save_profile(replace(profile, fingerprint=run_fingerprint(shared)), tmp_path / "profile.json")
    # two rows each, side by side: not a quarter of what eight take four by four
    assert plan_job(shared).target_only_seconds == pytest.approx(10 + 39 * 0.102, rel=0.02)


def test_a_plan_by_answers_that_were_cut_says_so_and_passes_no_limit(config: RunConfig) -> None:
    plan = plan_job(replace(config, sampling=SamplingParams(max_new_tokens=400)))
    assert plan.answers_cut
    assert "ended some" in plan.as_text()
    with pytest.raises(UsageError, match="answers were cut at 40 tokens"):
        refuse_expensive(plan, 1e9)


def test_a_plan_above_the_limit_is_refused(config: RunConfig) -> None:
    plan = plan_job(config)
    refuse_expensive(plan, 1.0)
    with pytest.raises(CostLimitExceeded, match=r"above --max-cost-usd 0\.01") as caught:
        refuse_expensive(plan, 0.01)
    assert caught.value.exit_code == 6
    with pytest.raises(UsageError, match="--price-per-hour"):
        refuse_expensive(replace(plan, cost_usd=None), 1.0)


def test_a_plan_needs_a_profile(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="needs --profile"):
        plan_job(replace(config, routes=RouteConfig(profile="none")))
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="no profile of this model on this machine"):
        plan_job(replace(config, routes=RouteConfig()))


def test_a_profile_of_something_else_is_refused_or_leaves_the_run_target_only(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(config, run=replace(config.run, threads=7))
    with pytest.raises(MismatchError, match="threads: profile"):
        check_profile(other)
    with caplog.at_level("WARNING"):
        accepted = check_profile(replace(other, routes=replace(other.routes, accept_stale_profile=True)))
    assert "threads: profile" in caplog.text
    assert (
        policy_of(accepted, job_routes(accepted, job_profile(accepted), 9)).route("copy", 1).method
        is Method.TARGET_ONLY
    )
    fitting = check_profile(config)
    assert (
        policy_of(fitting, job_routes(fitting, job_profile(fitting), 9)).route("copy", 1).method is Method.PROMPT_LOOKUP
    )


def test_a_profile_with_another_draft_model_holds_for_the_target_alone(config: RunConfig, tmp_path: Path) -> None:
    profile = load_profile(tmp_path / "profile.json")
    fingerprint = profile.fingerprint | {"draft_config": "x", "draft_weights": "y"}
    save_profile(replace(profile, fingerprint=fingerprint), tmp_path / "profile.json")
    with pytest.raises(MismatchError, match="draft_config: profile x, run none"):
        check_profile(config)
    accepted = check_profile(replace(config, routes=replace(config.routes, accept_stale_profile=True)))
    assert accepted.engine.draft_model is None
    assert accepted.routes.profile == config.routes.profile


def test_plans_of_two_engines_are_compared(config: RunConfig, tmp_path: Path) -> None:
    torch_plan = plan_job(config)
    profile = load_profile(tmp_path / "profile.json")
    other = tmp_path / "vllm.json"
    fingerprint = profile.fingerprint | {"engine": "vllm", "vllm": "0.32.0", "torch": "another"}
    halved = replace(profile.step_cost, target=Curve((1, 256), (0.0505, 0.178)))
    save_profile(replace(profile, fingerprint=fingerprint, step_cost=halved), other)
    (vllm_plan,) = compare_engines(config, [str(other)])
    assert vllm_plan.engine == "vllm"
    assert vllm_plan.target_only_seconds - 10 == pytest.approx((torch_plan.target_only_seconds - 10) / 2, rel=0.02)
    # write loses nothing by it, so that one engine serves both
    assert vllm_plan.routes == {"copy": "prompt_lookup k=2", "write": "prompt_lookup k=2"}
    assert compared([torch_plan, vllm_plan]).startswith("fastest: vllm\n")


def test_a_profile_of_another_model_is_not_compared(config: RunConfig, tmp_path: Path) -> None:
    profile = load_profile(tmp_path / "profile.json")
    other = tmp_path / "vllm.json"
    save_profile(replace(profile, fingerprint=profile.fingerprint | {"engine": "vllm", "target_config": "x"}), other)
    with pytest.raises(MismatchError, match="target_config: profile x"):
        compare_engines(config, [str(other)])
