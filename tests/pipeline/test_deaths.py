"""Workers that are killed, raise, exit or hang: found within seconds, replaced, and no row is lost."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchspec.config import RunConfig
from batchspec.errors import UsageError, WorkerError
from batchspec.io.results import load_results
from batchspec.io.store import LocalStore
from batchspec.pipeline.attempts import load_attempts
from batchspec.pipeline.runner import generate
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
from tests.pipeline.threads import generate_in_threads

Inject = Callable[[str], None]

POISON = """
def poisoned(request):
    if request.prompt == "poison":
        {how}
    return answer(request)
fake.answer = poisoned
"""


@pytest.fixture
def inject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inject:
    """Make every worker that starts from now on run some code first."""

    def set_up(code: str) -> None:
        for name, value in environment_with(tmp_path / "faults", code).items():
            monkeypatch.setenv(name, value)

    return set_up


def undisturbed(path: Path, output: Path) -> list[dict[str, object]]:
    generate_in_threads(fake_config(path, output))
    return answers(output)


def test_r06_a_killed_worker_is_replaced_and_its_finished_rows_are_not_decoded_again(
    write_prompts: WritePrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = write_prompts(120), tmp_path / "out"
    expected = undisturbed(path, tmp_path / "plain")
    seen: list[int] = []

    def kill_one() -> None:
        wait_for(lambda: finished_rows(output) > 30)
        os.kill(wait_for(lambda: worker_pids(os.getpid()))[0], signal.SIGKILL)
        seen.append(finished_rows(output))

    killer = threading.Thread(target=kill_one)
    killer.start()
    config = fake_config(path, output, workers=2)
    started = time.monotonic()
    summary = generate(with_parts(config, engine={"fake_tokens_per_second": 400.0}))
    killer.join()
    assert answers(output) == expected
    assert summary.rows.job.rows == 120
    assert time.monotonic() - started < 30
    assert 30 < seen[0] < 120
    lines = summary.as_json()["line_device_seconds"]
    assert lines["failed"] > 0
    assert abs(summary.as_json()["unattributed_share"]) < 0.02


def test_r06_a_worker_that_raises_at_load_ends_the_job_with_its_traceback(
    inject: Inject, write_prompts: WritePrompts, tmp_path: Path
) -> None:
    inject("def broken(*arguments): raise RuntimeError('no such device')\nFakeEngine.load = broken")
    with pytest.raises(WorkerError) as caught:
        generate(fake_config(write_prompts(5), tmp_path / "out"))
    message = str(caught.value)
    assert "worker 0 died 3 times before it ended a row" in message
    assert "RuntimeError: no such device" in message
    assert "First traceback:\nTraceback (most recent call last)" in message
    assert caught.value.exit_code == 1


def test_r06_a_worker_that_exits_is_a_death_even_with_exit_code_0(
    inject: Inject, write_prompts: WritePrompts, tmp_path: Path
) -> None:
    inject(
        "def exit_once(request):\n"
        "    if request.prompt == 'question 3' and once('exit'): os._exit(0)\n"
        "    return answer(request)\n"
        "fake.answer = exit_once"
    )
    generate(fake_config(write_prompts(20), tmp_path / "out"))
    assert len(answers(tmp_path / "out")) == 20
    inject("fake.answer = lambda request: os._exit(0)")
    config = fake_config(write_prompts(20), tmp_path / "other")
    with pytest.raises(WorkerError, match=r"worker 0 ended with exit code 0 with shards? 0"):
        generate(with_parts(config, engine={"max_batch": 8}))


def test_r06_an_error_of_ours_in_a_worker_ends_the_job_at_once_with_its_own_exit_code(
    inject: Inject, write_prompts: WritePrompts, tmp_path: Path
) -> None:
    inject(
        "from batchspec.errors import UnsupportedModelError\n"
        "def refuse(*arguments): raise UnsupportedModelError('layer 3 has sinks')\n"
        "FakeEngine.load = refuse"
    )
    with pytest.raises(UsageError, match="layer 3 has sinks"):
        generate(fake_config(write_prompts(5), tmp_path / "out", workers=2))


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(7)", "time.sleep(3600)"])
def test_r06_a_row_that_keeps_killing_workers_becomes_an_error_row_and_the_rest_is_answered(
    inject: Inject, write_prompts: WritePrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    prompts = [f"question {i}" for i in range(50)]
    expected = undisturbed(write_prompts(prompts, "plain.parquet"), tmp_path / "plain")
    prompts[21] = "poison"
    inject(POISON.format(how=how))
    output = tmp_path / "out"
    generate(fake_config(write_prompts(prompts), output, workers=2, step_timeout=1.0, shard_rows=20))
    rows = answers(output)
    assert rows[21]["error_type"] == "worker_killed"
    del rows[21], expected[21]
    assert rows == expected


def test_two_rows_that_kill_are_both_found(inject: Inject, write_prompts: WritePrompts, tmp_path: Path) -> None:
    prompts = ["poison" if i in (2, 5) else f"question {i}" for i in range(12)]
    inject(POISON.format(how="os._exit(9)"))
    generate(fake_config(write_prompts(prompts), tmp_path / "out", max_worker_deaths=5))
    assert [row["row_index"] for row in answers(tmp_path / "out") if row["error_type"] == "worker_killed"] == [2, 5]


def test_r06_deaths_that_no_row_explains_end_the_job_resumably(
    inject: Inject, write_prompts: WritePrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = write_prompts(200), tmp_path / "out"
    inject(
        "calls = []\n"
        "def tired(request):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 25: os.kill(os.getpid(), 9)\n"
        "    return answer(request)\n"
        "fake.answer = tired"
    )
    config = fake_config(path, output, max_worker_deaths=3)
    with pytest.raises(WorkerError) as caught:
        generate(config)
    assert "3 worker deaths" in str(caught.value)
    assert "signal 9 (Killed" in str(caught.value)
    assert "shard" in str(caught.value)
    monkeypatch.delenv("PYTHONPATH")
    generate(config)
    rows = load_results(str(output), ["attempt"]).to_pylist()
    assert len(rows) == 200
    assert 0 < sum(row["attempt"] == 1 for row in rows) < 100
    assert answers(output) == undisturbed(path, tmp_path / "plain")


def test_a_hung_step_is_given_up_and_the_rows_are_decoded_again(
    inject: Inject, write_prompts: WritePrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = write_prompts(30), tmp_path / "out"
    inject(
        "def hang_once(request):\n"
        "    if request.prompt == 'question 9' and once('hang'): time.sleep(3600)\n"
        "    return answer(request)\n"
        "fake.answer = hang_once"
    )
    generate(fake_config(path, output, step_timeout=1.0))
    (death,) = load_attempts(LocalStore(output))[0].worker_deaths
    assert "no step ended for" in death
    assert answers(output) == undisturbed(path, tmp_path / "plain")


def test_a_config_that_workers_get_is_the_one_that_was_asked_for(write_prompts: WritePrompts, tmp_path: Path) -> None:
    config: RunConfig = fake_config(write_prompts(2), tmp_path / "out", price_per_hour=3600.0)
    generate(config)
    row = load_results(str(tmp_path / "out"), ["cost_usd", "device_seconds", "worker"]).to_pylist()[0]
    assert row["cost_usd"] == pytest.approx(row["device_seconds"])
    assert row["worker"] == 0


DIE_BEFORE_SAYING = """
from multiprocessing.connection import Connection
send = Connection.send
def say(connection, message):
    if type(message).__name__ == {message!r} and once("silence"):
        os._exit(9)
    send(connection, message)
Connection.send = say
"""


@pytest.mark.parametrize("message", ["Committed", "Finished", "Ready", "WantShard"])
def test_a_worker_may_die_before_any_word(
    inject: Inject, write_prompts: WritePrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    path, output = write_prompts(40), tmp_path / "out"
    inject(DIE_BEFORE_SAYING.format(message=message))
    generate(fake_config(path, output))
    assert (tmp_path / "faults" / "silence").exists()
    assert answers(output) == undisturbed(path, tmp_path / "plain")
    assert load_results(str(output), ["attempt"])["attempt"].to_pylist() == [1] * 40
