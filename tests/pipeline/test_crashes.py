"""Kill a job at any instant, restart it with another number of workers: the rows are those of an undisturbed run."""

import signal
import time
from pathlib import Path

import pytest

from batchspec.pipeline.runner import generate
from tests.pipeline.crashes import PHASES, TARGETS, Crashes, kill
from tests.pipeline.jobs import WritePrompts, answers, fake_config, finished_rows, start_cli, with_parts
from tests.pipeline.threads import generate_in_threads

NUM_ROWS = 2000
SLOWLY = ("--shard-rows", "100", "--fake-tokens-per-second", "8000")


@pytest.mark.parametrize("num_kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_r02_r03_kills_at_any_instant_lose_no_row_and_double_none(
    write_prompts: WritePrompts, tmp_path: Path, num_kills: int
) -> None:
    source = write_prompts(NUM_ROWS)
    generate_in_threads(fake_config(source, tmp_path / "plain"))
    expected = answers(tmp_path / "plain")
    crashes = Crashes(source, tmp_path, NUM_ROWS, SLOWLY)
    for output in crashes.run(num_kills):
        assert answers(output) == expected
    assert crashes.kills.total() == num_kills
    if num_kills >= 50:
        assert {phase for phase, _ in crashes.kills} == {phase.__name__ for phase in PHASES}
        assert {target for _, target in crashes.kills} == set(TARGETS)
    print(dict(crashes.kills))


@pytest.mark.slow
def test_kills_lose_no_row_of_a_real_model(demo_model_path: Path, write_prompts: WritePrompts, tmp_path: Path) -> None:
    source, output = write_prompts(48), tmp_path / "out"
    config = fake_config(source, tmp_path / "plain")
    model = {"engine": "torch", "model": str(demo_model_path)}
    generate(with_parts(config, engine=model, sampling={"max_new_tokens": 32}))
    command = ["generate", source, "-o", output, "--model", demo_model_path, "--max-batch", "8"]
    command += ["--max-new-tokens", "32"]
    kills = 0
    for attempt in range(20):
        run = start_cli(*command, "--workers", str(attempt % 2 + 1))
        wanted = finished_rows(output) + 4
        while kills < 5 and run.poll() is None:
            if finished_rows(output) >= wanted:
                target = TARGETS[kills % len(TARGETS)]
                kills += kill(run, target)
                if target != "worker":  # which the run survives
                    break
                wanted = finished_rows(output) + 4
            time.sleep(0.01)
        _, stderr = run.communicate(timeout=300)
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, stderr
    assert kills == 5
    assert answers(output) == answers(tmp_path / "plain")
