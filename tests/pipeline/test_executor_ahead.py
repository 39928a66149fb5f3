"""Workers that start while the job is still being checked."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from batchspec.config import EngineConfig, RunConfig
from batchspec.errors import UsageError
from batchspec.pipeline.executors import executor_ahead, local
from batchspec.pipeline.runner import generate
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import WritePrompts, answers, fake_config, run_cli, wait_for, with_parts
from tests.pipeline.threads import generate_in_threads
from tests.tiny_jobs import save_tiny_model


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


@pytest.mark.parametrize("workers", [1, 3])
def test_the_job_runs_on_the_processes_that_were_started_ahead(
    write_prompts: WritePrompts, tmp_path: Path, started: list[int], workers: int
) -> None:
    config = fake_config(write_prompts(40), tmp_path / "out", shard_rows=5, workers=workers)
    with executor_ahead(config) as executor:
        assert len(started) == workers
        summary = generate(config, executor=executor)
    assert len(started) == workers
    assert summary.rows.job.rows == 40
    generate_in_threads(fake_config(write_prompts(40), tmp_path / "threads"))
    assert answers(tmp_path / "out") == answers(tmp_path / "threads")


def test_a_process_that_died_before_its_job_is_replaced(
    write_prompts: WritePrompts, tmp_path: Path, started: list[int]
) -> None:
    config = fake_config(write_prompts(10), tmp_path / "out")
    with executor_ahead(config) as executor:
        process = psutil.Process(started[0])
        process.kill()
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)
        summary = generate(config, executor=executor)
    assert len(started) == 2
    assert summary.rows.job.rows == 10


def test_a_job_that_is_refused_leaves_no_process(tmp_path: Path, started: list[int]) -> None:
    config = fake_config(tmp_path / "missing.parquet", tmp_path / "out")
    with pytest.raises(UsageError, match="missing"), executor_ahead(config) as executor:
        generate(config, executor=executor)
    assert len(started) == 1
    assert not psutil.pid_exists(started[0])


@pytest.mark.parametrize(
    "part", [{"run": {"devices": ("cuda:99",)}}, {"run": {"executor": "ray"}}, {"run": {"executor": "none"}}]
)
def test_where_no_worker_can_be_started_yet_none_is(tmp_path: Path, started: list[int], part: dict[str, Any]) -> None:
    with executor_ahead(with_parts(fake_config(tmp_path / "in.parquet"), **part)):
        assert not started


def test_the_command_starts_each_worker_once(write_prompts: WritePrompts, tmp_path: Path) -> None:
    faults = environment_with(tmp_path / "faults", f"Path({str(tmp_path)!r}, f'worker-{{os.getpid()}}').touch()")
    done = run_cli("generate", write_prompts(10), "-o", tmp_path / "out", "--engine", "fake", **faults)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("worker-*"))) == 1


def test_memory_is_made_ready_for_weights_that_are_at_hand(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    weights = (model / "model.safetensors").stat().st_size
    known = EngineConfig(model=str(model))
    assert local._weight_bytes(known, "cpu") == weights
    assert local._weight_bytes(known, "cuda:0") == 0
    assert local._weight_bytes(EngineConfig(model="org/elsewhere"), "cpu") == 0
    assert local._weight_bytes(EngineConfig(engine="fake"), "cpu") == 0
    assert local._weight_bytes(RunConfig().engine, "cpu") > 2**20  # the demo model
