"""A job's course over time is kept in few samples."""

import json
from itertools import pairwise

from batchspec.pipeline import runner
from batchspec.pipeline.timeline import MAX_SAMPLES, Timeline
from tests.pipeline.jobs import WritePrompts, fake_config, with_parts


def test_samples_stay_few_and_evenly_spread_however_long_a_job_runs() -> None:
    timeline = Timeline()
    for second in range(100_000):
        timeline.note((second + 0.5, second, 2 * second, 8))
        assert len(timeline.samples) <= MAX_SAMPLES
    times = [sample[0] for sample in timeline.samples]
    gaps = {later - earlier for earlier, later in pairwise(times)}
    assert len(timeline.samples) > MAX_SAMPLES / 2 - 1
    assert len(gaps) == 1
    assert times[-1] > 100_000 - 2 * gaps.pop()


def test_an_attempt_keeps_rows_tokens_and_rows_in_flight(write_prompts: WritePrompts) -> None:
    path = write_prompts(60)
    config = with_parts(fake_config(path), engine={"fake_tokens_per_second": 150.0}, sampling={"max_new_tokens": 60})
    summary = runner.generate(config)
    attempt = json.loads((path.parent / "in.generated/_batchspec/attempts/0001.json").read_text())
    assert attempt["started_at"] < attempt["first_admitted_at"] < attempt["refreshed_at"]
    timeline = attempt["timeline"]
    assert len(timeline) >= 2
    assert timeline == sorted(timeline)
    assert timeline[-1][1] <= summary.rows.job.rows
    assert 0 < max(live for *_, live in timeline) <= 8
