"""Workers as Ray actors: the rows of a local run, through the loss of actors and nodes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchspec.errors import MissingDependencyError, UsageError
from batchspec.io.results import load_results
from batchspec.pipeline.runner import generate
from tests.pipeline.clusters import ENVIRONMENT, Cluster, actor_of, kill, wait_until_gone
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import (
    WritePrompts,
    answers,
    fake_config,
    finished_rows,
    run_cli,
    start_cli,
    summary_of,
    wait_for,
)

NUM_ROWS = 600
SLOWLY = ("--fake-tokens-per-second", "400")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("ray"), num_cpus=4)
    yield started
    started.close()


def options(source: Path, output: Path, address: str, workers: int, *more: str) -> list[str | Path]:
    fixed = ["--engine", "fake", "--max-batch", "8", "--shard-rows", "50", "--executor", "ray"]
    return ["generate", source, "-o", output, *fixed, "--ray-address", address, "--workers", str(workers), *more]


def finish(run: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a run that has to succeed; its summary."""
    stdout, stderr = run.communicate(timeout=120)
    assert run.returncode == 0, stderr
    return summary_of(stdout)


def local_answers(source: Path, output: Path) -> list[dict[str, Any]]:
    generate(fake_config(source, output))
    return answers(output)


@pytest.mark.ray
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("victim", ["actor", "worker"])
def test_r06_a_killed_actor_or_worker_loses_no_row(
    cluster: Cluster, write_prompts: WritePrompts, tmp_path: Path, workers: int, victim: str
) -> None:
    source, output = write_prompts(NUM_ROWS), tmp_path / "out"
    expected = local_answers(source, tmp_path / "local")
    run = start_cli(*options(source, output, cluster.address, workers, *SLOWLY), **ENVIRONMENT)
    wait_for(lambda: finished_rows(output) > 60)
    pids = cluster.worker_pids()
    assert len(pids) == workers
    worker = pids[0]
    kill(actor_of(worker) if victim == "actor" else worker)
    wait_until_gone(worker)
    summary = finish(run)
    assert answers(output) == expected
    assert summary["rows"] == NUM_ROWS
    assert summary["line_device_seconds"]["failed"] > 0
    assert abs(summary["unattributed_share"]) < 0.02
    numbers = load_results(str(output), ["worker"])["worker"].to_pylist()
    assert set(numbers) == set(range(workers))
    wait_for(lambda: not cluster.worker_pids())


@pytest.mark.ray
def test_a_terminated_node_loses_no_row_and_its_shards_are_handed_on(
    write_prompts: WritePrompts, tmp_path: Path
) -> None:
    source, output = write_prompts(NUM_ROWS), tmp_path / "out"
    expected = local_answers(source, tmp_path / "local")
    nodes = Cluster(tmp_path, num_cpus=1)
    try:
        second = nodes.start_node(num_cpus=1)
        run = start_cli(*options(source, output, nodes.address, 2, *SLOWLY), **ENVIRONMENT)
        wait_for(lambda: finished_rows(output) > 60)
        assert len(nodes.worker_pids()) == 2
        nodes.kill_node(second)
        # One worker is left, and there is no room for a successor of the other.
        summary = finish(run)
    finally:
        nodes.close()
    assert summary["rows"] == NUM_ROWS
    assert answers(output) == expected


@pytest.mark.ray
def test_64_actors_write_to_one_output(cluster: Cluster, write_prompts: WritePrompts, tmp_path: Path) -> None:
    source, output = write_prompts(6400), tmp_path / "out"
    expected = local_answers(source, tmp_path / "local")
    command = options(source, output, cluster.address, 64, "--ray-num-cpus", "0.05")
    run = run_cli(*command, timeout_seconds=400, **ENVIRONMENT)  # 128 processes to start
    assert run.returncode == 0, run.stderr
    assert summary_of(run.stdout)["rows"] == 6400
    assert answers(output) == expected


@pytest.mark.ray
def test_a_signal_leaves_a_job_that_a_local_run_can_end(
    cluster: Cluster, write_prompts: WritePrompts, tmp_path: Path
) -> None:
    source, output = write_prompts(NUM_ROWS), tmp_path / "out"
    expected = local_answers(source, tmp_path / "local")
    run = start_cli(*options(source, output, cluster.address, 2, *SLOWLY), **ENVIRONMENT)
    wait_for(lambda: finished_rows(output) > 60)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    wait_for(lambda: not cluster.worker_pids())
    before = finished_rows(output)
    done = run_cli("generate", source, "-o", output, "--engine", "fake")
    assert done.returncode == 0, done.stderr
    assert answers(output) == expected
    attempts = load_results(str(output), ["attempt"])["attempt"].to_pylist()
    assert attempts.count(1) == before > 60
    assert set(attempts) == {1, 2}


@pytest.mark.ray
def test_workers_end_with_a_killed_parent_and_the_job_goes_on(
    cluster: Cluster, write_prompts: WritePrompts, tmp_path: Path
) -> None:
    source, output = write_prompts(NUM_ROWS), tmp_path / "out"
    expected = local_answers(source, tmp_path / "local")
    run = start_cli(*options(source, output, cluster.address, 2, *SLOWLY), **ENVIRONMENT)
    wait_for(lambda: finished_rows(output) > 60)
    run.kill()
    run.communicate(timeout=60)
    wait_for(lambda: not cluster.worker_pids())
    finish(start_cli(*options(source, output, cluster.address, 3), **ENVIRONMENT))
    assert answers(output) == expected


@pytest.mark.ray
def test_without_room_for_all_workers_those_that_have_a_place_do_the_work(
    cluster: Cluster, write_prompts: WritePrompts, tmp_path: Path
) -> None:
    source, output = write_prompts(200), tmp_path / "out"
    expected = local_answers(source, tmp_path / "local")
    summary = finish(start_cli(*options(source, output, cluster.address, 3, "--ray-num-cpus", "2.5"), **ENVIRONMENT))
    assert answers(output) == expected
    assert summary["line_device_seconds"]["placement"] > 0


@pytest.mark.ray
def test_a_row_that_kills_its_worker_is_found_on_a_ray_that_the_run_started(
    write_prompts: WritePrompts, tmp_path: Path
) -> None:
    prompts = [f"question {i}" for i in range(50)]
    prompts[21] = "poison"
    poison = "fake.answer = lambda request: os._exit(9) if request.prompt == 'poison' else answer(request)"
    faults = environment_with(tmp_path / "faults", poison)
    source, output = write_prompts(prompts), tmp_path / "out"
    run = start_cli(*options(source, output, "local", 2), **ENVIRONMENT, **faults)
    stdout, stderr = run.communicate(timeout=120)
    assert run.returncode == 3, stderr
    assert summary_of(stdout)["error_types"] == {"worker_killed": 1}
    assert [row["row_index"] for row in answers(output) if row["error_type"]] == [21]
    assert "exit code 9" in stderr


@pytest.mark.ray
def test_a_cluster_that_cannot_be_reached_is_a_failure_that_may_be_retried(
    write_prompts: WritePrompts, tmp_path: Path
) -> None:
    run = run_cli(*options(write_prompts(5), tmp_path / "out", "127.0.0.1:1", 1), **ENVIRONMENT)
    assert run.returncode == 1, run.stderr
    assert "--ray-address 127.0.0.1:1: cannot connect to Ray" in run.stderr
    assert "Traceback" not in run.stderr


def test_without_ray_the_error_names_the_pip_line(
    write_prompts: WritePrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'batchspec\[ray\]'"):
        generate(fake_config(write_prompts(5), tmp_path / "out", executor="ray"))


def test_devices_of_one_machine_are_refused(write_prompts: WritePrompts, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--devices cuda:1: Ray chooses the devices"):
        generate(fake_config(write_prompts(5), tmp_path / "out", executor="ray", devices=("cuda:1",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray_num_cpus": 0.0}, "--ray-num-cpus must be above 0, got 0.0"),
        ({"ray_num_gpus": -1.0}, "--ray-num-gpus must be above 0, got -1.0"),
    ],
)
def test_what_ray_sets_aside_is_checked(
    write_prompts: WritePrompts, tmp_path: Path, options: dict[str, float], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        generate(fake_config(write_prompts(5), tmp_path / "out", executor="ray", **options))
