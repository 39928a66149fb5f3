"""Kill a job at any instant, restart it with another number of workers: the rows are those of an undisturbed run."""

from pathlib import Path

import pytest

from batchspec.pipeline.runner import generate
from tests.pipeline.crashes import PHASES, TARGETS, Crashes
from tests.pipeline.jobs import WritePrompts, answers, fake_config

NUM_ROWS = 2000
SLOWLY = ("--shard-rows", "100", "--fake-tokens-per-second", "8000")


@pytest.mark.parametrize("num_kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_r02_r03_kills_at_any_instant_lose_no_row_and_double_none(
    write_prompts: WritePrompts, tmp_path: Path, num_kills: int
) -> None:
    source = write_prompts(NUM_ROWS)
    generate(fake_config(source, tmp_path / "plain"))
    expected = answers(tmp_path / "plain")
    crashes = Crashes(source, tmp_path, NUM_ROWS, SLOWLY)
    for output in crashes.run(num_kills):
        assert answers(output) == expected
    assert crashes.kills.total() == num_kills
    if num_kills >= 50:
        assert {phase for phase, _ in crashes.kills} == {phase.__name__ for phase in PHASES}
        assert {target for _, target in crashes.kills} == set(TARGETS)
    print(dict(crashes.kills))
