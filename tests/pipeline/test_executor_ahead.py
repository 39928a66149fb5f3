"""Workers that start while the job is still being checked."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest

from batchspec.config import EngineConfig, RunConfig
from batchspec.errors import UsageError
from batchspec.io.inputs import resolve_inputs
from batchspec.pipeline.devices import Place
from batchspec.pipeline.executors import local, open_executor
from batchspec.pipeline.executors.local import LocalExecutor
from batchspec.pipeline.messages import Failed, WorkerSpec
from batchspec.pipeline.runner import generate
from batchspec.profile.policy import StaticPolicy
from batchspec.types import Method, Route
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import WritePrompts, answers, fake_config, run_cli, wait_for, with_parts
from tests.pipeline.threads import generate_in_threads
from tests.tiny_jobs import save_tiny_model


def spec_of(config: RunConfig, **changes: Any) -> WorkerSpec:
    spec = WorkerSpec(
        worker=0,
        attempt=1,
        run_id="run",
        config=config,
        inputs=resolve_inputs(config.input),
        output="nowhere",
        device="cpu",
        threads=1,
        device_share=1.0,
        spawned_at=0.0,
        part_metadata={},
        routes=StaticPolicy(Route(Method.TARGET_ONLY)),
    )
    return replace(spec, **changes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were started for workers."""
    pids: list[int] = []
    start = local._start_process

    def recorded(*arguments: Any) -> Any:
        worker = start(*arguments)
        pids.append(worker.process.pid)
        return worker

    monkeypatch.setattr(local, "_start_process", recorded)
    return pids


@pytest.fixture
def at_start(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[LocalExecutor], None]]:
    """What is done once the workers' processes are started and before anything else is."""
    steps: list[Callable[[LocalExecutor], None]] = []
    start_ahead = LocalExecutor.start_ahead

    def followed(executor: LocalExecutor, config: RunConfig) -> None:
        start_ahead(executor, config)
        for step in steps:
            step(executor)

    monkeypatch.setattr(LocalExecutor, "start_ahead", followed)
    return steps


@pytest.mark.parametrize("workers", [1, 3])
def test_the_job_runs_on_the_processes_that_were_started_ahead(
    write_prompts: WritePrompts, tmp_path: Path, started: list[int], at_start: list[Any], workers: int
) -> None:
    counts: list[int] = []
    at_start.append(lambda executor: counts.append(len(started)))
    summary = generate(fake_config(write_prompts(40), tmp_path / "out", shard_rows=5, workers=workers))
    assert [*counts, len(started)] == [workers, workers]
    assert summary.rows.job.rows == 40
    generate_in_threads(fake_config(write_prompts(40), tmp_path / "threads"))
    assert answers(tmp_path / "out") == answers(tmp_path / "threads")


def test_a_process_that_died_before_its_job_is_replaced(
    write_prompts: WritePrompts, tmp_path: Path, started: list[int], at_start: list[Any]
) -> None:
    def kill(_: LocalExecutor) -> None:
        process = psutil.Process(started[0])
        process.kill()
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)

    at_start.append(kill)
    summary = generate(fake_config(write_prompts(10), tmp_path / "out", max_worker_deaths=1))
    assert len(started) == 2
    assert summary.rows.job.rows == 10


def test_a_job_that_is_refused_leaves_no_process(tmp_path: Path, started: list[int]) -> None:
    with pytest.raises(UsageError, match="missing"):
        generate(fake_config(tmp_path / "missing.parquet", tmp_path / "out"))
    assert len(started) == 1
    assert not psutil.pid_exists(started[0])


def test_every_place_gets_the_process_that_was_started_for_it(
    write_prompts: WritePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(write_prompts(1))
    places = (Place("cpu", 1, 1.0), Place("cuda:0", 2, 1.0))
    threads_of: dict[int, int] = {}
    start = local._start_process

    def recorded(engine: str, threads: int, bytes_ahead: int = 0) -> Any:
        worker = start(engine, threads, bytes_ahead)
        threads_of[worker.process.pid] = threads
        return worker

    monkeypatch.setattr(local, "_start_process", recorded)
    monkeypatch.setattr(local, "worker_places", lambda config: places)
    with closing(LocalExecutor()) as executor:
        executor.start_ahead(config)
        for number, place in enumerate(places):
            executor.start(spec_of(config, worker=number, device=place.device, threads=place.threads))
            assert threads_of[executor._workers[number].process.pid] == place.threads
    assert len(threads_of) == 2


def test_workers_share_what_memory_there_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[int] = []

    def recorded(engine: str, threads: int, bytes_ahead: int = 0) -> Any:
        asked_for.append(bytes_ahead)
        raise UsageError("enough")

    monkeypatch.setattr(local, "_start_process", recorded)
    monkeypatch.setattr(local.memory, "free_bytes", lambda: 8000)
    config = with_parts(
        fake_config(tmp_path / "in.parquet", workers=2), engine={"engine": "torch", "model": str(model)}
    )
    with closing(LocalExecutor()) as executor, pytest.raises(UsageError, match="enough"):
        executor.start_ahead(config)
    assert asked_for == [1000]


@pytest.mark.parametrize(
    "part",
    [
        {"run": {"executor": "ray"}},
        {"engine": {"engine": "torch", "model": "org/not-fetched-yet"}},
        {"engine": {"engine": "torch", "draft_model": "org/not-fetched-yet"}},
        {"routes": {"profile": "auto"}, "engine": {"engine": "torch"}},
    ],
    ids=["ray", "a model to fetch", "a draft to fetch", "a profile to measure"],
)
def test_where_there_is_something_to_wait_for_no_worker_starts(
    tmp_path: Path, started: list[int], part: dict[str, Any]
) -> None:
    config = with_parts(fake_config(tmp_path / "in.parquet"), **part)
    with open_executor(config.run) as executor:
        executor.start_ahead(config)
    assert not started


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"run": {"devices": ("cuda:99",)}}, "torch sees"),
        ({"engine": {"tensor_parallel_size": 0}}, "must be at least 1"),
    ],
)
def test_a_wrong_configuration_starts_none(
    write_prompts: WritePrompts, tmp_path: Path, started: list[int], part: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        generate(with_parts(fake_config(write_prompts(1), tmp_path / "out"), **part))
    assert not started


def test_an_import_that_fails_is_reported_as_the_worker_s_error(
    write_prompts: WritePrompts, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    command = ["generate", write_prompts(1), "-o", tmp_path / "out", "--model", model, "--profile", "none"]
    done = run_cli(*command, PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 1
    assert "ImportError: libcudart.so.12" in done.stderr
    assert "killed by signal" not in done.stderr


def test_a_spec_longer_than_a_pipe_holds_nobody_up(
    write_prompts: WritePrompts, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker takes it while it imports: here, an import that does not end before the test says so."""
    go_on = tmp_path / "go-on"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "torch.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nraise ImportError('at last')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "slow"))
    config = with_parts(fake_config(write_prompts(1)), engine={"engine": "torch", "model": str(model)})
    with closing(LocalExecutor()) as executor:
        watchdog = Timer(30, go_on.touch)
        watchdog.start()
        executor.start(spec_of(config, part_metadata={"long": "x" * 2**22}))
        watchdog.cancel()
        in_time = not go_on.exists()
        go_on.touch()
        failed, *_ = wait_for(lambda: executor.wait(1.0))
    assert in_time
    assert isinstance(failed.message, Failed)
    assert failed.message.message == "ImportError: at last"


def test_the_command_starts_each_worker_once(write_prompts: WritePrompts, tmp_path: Path) -> None:
    faults = environment_with(tmp_path / "faults", f"Path({str(tmp_path)!r}, f'worker-{{os.getpid()}}').touch()")
    done = run_cli("generate", write_prompts(10), "-o", tmp_path / "out", "--engine", "fake", **faults)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("worker-*"))) == 1


def test_memory_is_made_ready_for_the_weights_of_a_cpu(model: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    (model / "optimizer.pt").write_bytes(b"not loaded")
    known = EngineConfig(model=str(model))
    assert local._weight_bytes(known, "cpu") == size
    assert local._weight_bytes(replace(known, dtype="bfloat16"), "cpu") == size
    assert local._weight_bytes(EngineConfig(), "cpu") > 2**20  # the demo model


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({}, "cuda:0"),
        ({"dtype": "float16"}, "cpu"),  # decoded by torch, which takes its own memory
        ({"model": "org/elsewhere"}, "cpu"),
        ({"engine": "fake"}, "cpu"),
    ],
)
def test_no_memory_is_made_ready_in_vain(model: Path, changes: dict[str, Any], device: str) -> None:
    assert local._weight_bytes(replace(EngineConfig(model=str(model)), **changes), device) == 0


@pytest.mark.parametrize("config", ["{", "[]"])
def test_files_that_cannot_be_read_are_no_fault_of_the_start(model: Path, config: str) -> None:
    (model / "more.safetensors").symlink_to(model / "pruned")
    assert local._weight_bytes(EngineConfig(model=str(model)), "cpu") > 0
    (model / "config.json").write_text(config)
    assert local._weight_bytes(EngineConfig(model=str(model)), "cpu") == 0
