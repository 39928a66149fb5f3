"""Engines that serve one route alone: their rows in phases, over all shards, and every row once."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from batchspec.config import EngineConfig, RunConfig
from batchspec.errors import UsageError
from batchspec.io.inputs import resolve_inputs
from batchspec.io.results import load_results
from batchspec.pipeline import session
from batchspec.pipeline.checks import check_config
from batchspec.pipeline.phases import Phase, plan_phases
from batchspec.pipeline.profiling import job_profile, job_routes
from batchspec.pipeline.runner import generate
from batchspec.types import Method, Route
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import (
    WritePrompts,
    answers,
    fake_config,
    finished_rows,
    wait_for,
    with_parts,
    worker_pids,
)

ROUTES = """
[code]
method = "prompt-lookup"
num_speculative_tokens = 4
[chat]
method = "target-only"
[maths]
method = "prompt-lookup"
num_speculative_tokens = 2
"""
SELECTIVE = """
import batchspec.engine as engines
plain = engines.load_engine
def load(config, device, threads, device_share, attribution, route):
    def serves(self, request, policy):
        found = policy.route(request.request_class, 1)
        return (found.method, found.num_speculative_tokens) == (route.method, route.num_speculative_tokens)
    FakeEngine.serves = serves
    return plain(config, device, threads, device_share, attribution)
engines.load_engine = load
"""
LOOKUP_4, LOOKUP_2 = Route(Method.PROMPT_LOOKUP, 4), Route(Method.PROMPT_LOOKUP, 2)
PHASES = (Phase(Route(Method.TARGET_ONLY)), Phase(LOOKUP_4), Phase(LOOKUP_2))


@pytest.fixture
def classes_config(write_prompts: WritePrompts, tmp_path: Path) -> RunConfig:
    """120 rows of three classes and of none, one of them bad, in shards of 25."""
    prompts: list[str | None] = [f"question {i}" for i in range(120)]
    prompts[7] = None
    labels = [["code", "chat", "maths", None][i % 4] for i in range(120)]
    path = write_prompts(prompts, request_class=labels)
    (tmp_path / "routes.toml").write_text(ROUTES)
    config = fake_config(path, tmp_path / "out", workers=2, shard_rows=25)
    return with_parts(config, routes={"routes_file": str(tmp_path / "routes.toml")})


def in_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_with(tmp_path / "faults", SELECTIVE).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "plan_phases", lambda config, inputs, routes: PHASES)


def expected_answers(config: RunConfig, tmp_path: Path) -> list[dict[str, Any]]:
    generate(with_parts(config, output={"output": str(tmp_path / "plain")}))
    return answers(tmp_path / "plain")


@pytest.mark.parametrize("kill", [False, True])
def test_every_row_is_answered_once_by_the_engine_of_its_route(
    classes_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    expected = expected_answers(classes_config, tmp_path)
    in_phases(tmp_path, monkeypatch)
    output = tmp_path / "out"

    def kill_one() -> None:
        wait_for(lambda: finished_rows(output) > 75)
        os.kill(wait_for(lambda: worker_pids(os.getpid()))[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one if kill else lambda: None)
    killer.start()
    config = with_parts(classes_config, engine={"fake_tokens_per_second": 400.0 if kill else 0.0})
    figures = generate(config).as_json()
    killer.join()
    assert answers(output) == expected
    rows = load_results(str(output), ["request_class", "method", "num_speculative_tokens", "error_type"]).to_pylist()
    lengths = {row["request_class"]: row["num_speculative_tokens"] for row in rows if row["method"] == "prompt_lookup"}
    assert lengths == {"code": 4, "maths": 2}
    assert abs(figures["unattributed_share"]) < 0.02
    assert figures["rows"] == 120


def test_a_stop_between_phases_is_resumed(
    classes_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_answers(classes_config, tmp_path)
    in_phases(tmp_path, monkeypatch)
    monkeypatch.setattr(session, "plan_phases", lambda config, inputs, routes: PHASES[:1])
    with pytest.raises(Exception, match="is not whole"):
        generate(classes_config)
    monkeypatch.setattr(session, "plan_phases", lambda config, inputs, routes: PHASES)
    generate(classes_config)
    assert answers(tmp_path / "out") == expected
    attempts = load_results(str(tmp_path / "out"), ["attempt", "method"]).to_pylist()
    assert {row["attempt"] for row in attempts if row["method"] == "prompt_lookup"} == {2}
    assert sum(row["attempt"] == 1 for row in attempts) >= 60


def titles(config: RunConfig) -> list[str]:
    inputs = resolve_inputs(config.input)
    return [
        phase.title for phase in plan_phases(config, inputs, job_routes(config, job_profile(config), inputs.num_rows))
    ]


def test_vllm_has_a_phase_for_every_engine_that_rows_may_need(
    classes_config: RunConfig, write_prompts: WritePrompts
) -> None:
    assert titles(classes_config) == ["all rows"]
    config = with_parts(classes_config, engine={"engine": "vllm"})
    assert titles(config) == [
        "target-only for class chat, every other class",
        "prompt-lookup with 4 tokens for class code",
        "prompt-lookup with 2 tokens for class maths",
    ]
    speculating = with_parts(config, routes={"method": Method.PROMPT_LOOKUP, "routes_file": None})
    assert titles(speculating) == ["prompt-lookup with 4 tokens for all classes"]
    stopping = with_parts(speculating, sampling={"stop": ("###",)})
    assert titles(stopping) == ["target-only for all rows: they have a stop string, min_p or logit_bias"]
    differing = write_prompts(["a", "b"], "differing.parquet", min_p=[0.1, None])
    assert titles(with_parts(speculating, input={"inputs": (str(differing),)})) == [
        "target-only for rows with a stop string, min_p or logit_bias",
        "prompt-lookup with 4 tokens for all classes",
    ]


def test_no_engine_is_loaded_for_rows_that_are_not_there(
    classes_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_phases(tmp_path, monkeypatch)
    phases = (*PHASES, Phase(Route(Method.PROMPT_LOOKUP, 8)))
    monkeypatch.setattr(session, "plan_phases", lambda config, inputs, routes: phases)
    begun: list[Any] = []
    run_phase = session.Session._run_phase
    monkeypatch.setattr(
        session.Session, "_run_phase", lambda self, p, *rest: begun.append(p) or run_phase(self, p, *rest)
    )
    generate(classes_config)
    assert begun == list(PHASES)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"engine": {"engine": "torch", "vllm_arg": ("a=1",)}}, "--vllm-arg needs --engine vllm"),
        (
            {"engine": {"engine": "vllm", "vllm_arg": ("enforce_eager",)}},
            "--vllm-arg 'enforce_eager' is not of the form",
        ),
        ({"engine": {"engine": "vllm"}, "run": {"holdout": 0.1}}, "--holdout: --engine vllm decodes the rows of one"),
        (
            {
                "engine": {"engine": "vllm", "draft_model": "d"},
                "routes": {"method": Method.LOOKUP_THEN_DRAFT},
            },
            "--engine vllm has no lookup-then-draft",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_any_work(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_config(with_parts(RunConfig(engine=EngineConfig()), **parts))
