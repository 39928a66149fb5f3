"""Signals: what is finished is kept, the exit code says which signal, and no worker is left behind."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from batchspec.io.results import load_results
from batchspec.pipeline.runner import generate
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import (
    WritePrompts,
    answers,
    fake_config,
    finished_rows,
    journaled_rows,
    start_cli,
    wait_for,
    worker_pids,
)
from tests.pipeline.threads import generate_in_threads

Send = Callable[[subprocess.Popen[str]], None]
SLOW = (
    "--engine",
    "fake",
    "--fake-tokens-per-second",
    "300",
    "--max-batch",
    "8",
    "--shard-rows",
    "50",
    "--workers",
    "2",
)


@pytest.mark.parametrize(
    ("send", "exit_code"),
    [
        (lambda run: run.send_signal(signal.SIGTERM), 143),
        (lambda run: run.send_signal(signal.SIGINT), 130),
        (lambda run: os.killpg(run.pid, signal.SIGINT), 130),
        (lambda run: os.killpg(run.pid, signal.SIGTERM), 143),
    ],
    ids=["SIGTERM", "SIGINT", "SIGINT_to_the_group", "SIGTERM_to_the_group"],
)
def test_a_signal_lets_rows_in_flight_end_and_the_same_command_goes_on(
    write_prompts: WritePrompts, tmp_path: Path, send: Send, exit_code: int
) -> None:
    path, output = write_prompts(200), tmp_path / "out"
    run = start_cli("generate", path, "-o", output, *SLOW)
    wait_for(lambda: finished_rows(output) > 10)
    workers = worker_pids(run.pid)
    send(run)
    stdout, stderr = run.communicate(timeout=20)
    assert run.returncode == exit_code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "the same command goes on" in stderr
    assert not any(map(psutil.pid_exists, workers))
    assert not (output / "_SUCCESS").exists()
    kept = finished_rows(output)
    assert 10 < kept < 200

    generate_in_threads(fake_config(path, tmp_path / "plain"))
    summary = generate_in_threads(fake_config(path, output))
    assert answers(output) == answers(tmp_path / "plain")
    attempts = load_results(str(output), ["attempt"])["attempt"].to_pylist()
    assert attempts.count(1) == kept
    assert abs(summary.as_json()["unattributed_share"]) < 0.02


def test_grace_seconds_bound_the_time_that_rows_in_flight_get(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    stuck = environment_with(tmp_path / "faults", "fake.answer = lambda request: time.sleep(3600)")
    run = start_cli("generate", write_prompts(50), "-o", output, *SLOW, "--grace-seconds", "0.5", **stuck)
    wait_for(lambda: len(list(output.glob("_batchspec/journal/*"))) == 2)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=10)
    assert run.returncode == 143


def test_a_second_signal_ends_the_run_at_once(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    stuck = environment_with(tmp_path / "faults", "fake.answer = lambda request: time.sleep(3600)")
    run = start_cli("generate", write_prompts(50), "-o", output, *SLOW, "--grace-seconds", "3600", **stuck)
    wait_for(lambda: len(list(output.glob("_batchspec/journal/*"))) == 2)
    run.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(timeout=0.5)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=10)
    assert run.returncode == 130


def test_workers_end_with_their_parent_and_write_nothing_more(write_prompts: WritePrompts, tmp_path: Path) -> None:
    path, output = write_prompts(300), tmp_path / "out"
    run = start_cli("generate", path, "-o", output, *SLOW)
    wait_for(lambda: finished_rows(output) > 20)
    workers = worker_pids(run.pid)
    assert len(workers) == 2
    run.kill()
    run.communicate(timeout=10)
    wait_for(lambda: not any(map(psutil.pid_exists, workers)), seconds=5)
    kept = journaled_rows(output)
    time.sleep(0.5)
    assert kept == journaled_rows(output) > 0
    summary = generate(fake_config(path, output))
    assert summary.rows.job.rows == 300
    assert abs(summary.as_json()["unattributed_share"]) < 0.02
