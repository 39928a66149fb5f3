"""The run's own steps correct what the profile says they cost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from batchspec.profile.live_cost import LiveStepCost
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.records import Curve, StepCost
from batchspec.types import StepReport
from tests.profile.test_marginal import LOOKUP, profile_of

PROFILED = StepCost(Curve((1, 8, 16, 256), (0.012, 0.015, 0.020, 0.200)), 1e-6, 1e-7, 0.0, 0.0, 0.001)
FASTER_MEMORY = replace(PROFILED, target=Curve((1, 8, 16, 256), (0.007, 0.010, 0.015, 0.195)))


def run(live: LiveStepCost, machine: StepCost, live_rows: int, steps: int = 600, seed: int = 0) -> None:
    """Steps of so many rows, of which a few propose; the clock errs by five percent, and is wholly off at times."""
    chance = random.Random(seed)
    for _ in range(steps):
        proposed = chance.choice([0, 0, 2, 4, 8])
        seconds = machine.forward_seconds(live_rows, live_rows + proposed, 300) * chance.gauss(1, 0.05)
        seconds *= 10 if chance.random() < 0.01 else 1
        live.observe(StepReport(live_rows, live_rows, seconds, seconds, 300 * live_rows, 0, [("copy", proposed, 0)]))


@pytest.mark.parametrize("machine", [PROFILED, FASTER_MEMORY])
def test_the_line_finds_the_machine_as_it_is(machine: StepCost) -> None:
    live = LiveStepCost(PROFILED)
    run(live, machine, 8)
    for positions in (8, 12, 16):
        found = live.cost.forward_seconds(8, positions, 300)
        assert found == pytest.approx(machine.forward_seconds(8, positions, 300), rel=0.06)


def test_a_machine_that_changes_its_state_is_followed() -> None:
    live = LiveStepCost(PROFILED)
    run(live, FASTER_MEMORY, 8, 2000)
    run(live, PROFILED, 8, 1500, seed=1)
    assert live.cost.forward_seconds(8, 12, 300) == pytest.approx(PROFILED.forward_seconds(8, 12, 300), rel=0.06)


def test_steps_that_are_all_alike_say_nothing_of_the_slope() -> None:
    live = LiveStepCost(PROFILED)
    for _ in range(600):
        live.observe(StepReport(8, 8, 0.02, 2 * PROFILED.forward_seconds(8, 8, 300), 8 * 300))
    for positions in (8, 16):
        twice = 2 * PROFILED.forward_seconds(8, positions, 300)
        assert live.cost.forward_seconds(8, positions, 300) == pytest.approx(twice, rel=0.01)


def test_a_line_drawn_far_away_leaves_small_forwards_their_time() -> None:
    live = LiveStepCost(PROFILED)
    steep = replace(PROFILED, target=Curve((1, 8, 16, 256), (0.001, 0.001, 0.001, 0.5)))
    run(live, steep, 100)
    assert live.cost.forward_seconds(1, 1, 0) > 0.003


def test_steps_with_prompts_and_engines_that_cannot_tell_are_left_out() -> None:
    live = LiveStepCost(PROFILED)
    for _ in range(200):
        assert not live.observe(StepReport(8, 8, 0.5))
    assert live.cost is PROFILED


def test_routes_follow_what_the_steps_take() -> None:
    """Positions cost five times in the run what they do in the profile."""
    cheap = StepCost(Curve((1, 256), (0.020, 0.071)), 0.0, 0.0, 0.0, 0.0, 0.001)
    dear = replace(cheap, target=Curve((1, 256), (0.020, 0.275)))
    policy = MeasuredPolicy(profile_of(step_cost=cheap), LOOKUP, 32)
    before = policy.decisions(16)["copy"].break_even
    chance = random.Random(2)
    for _ in range(600):
        proposed = chance.choice([4, 16, 48])
        seconds = dear.forward_seconds(16, 16 + proposed, 0)
        policy.observe(StepReport(16, 16, seconds, seconds, 0, 0, [("copy", proposed, proposed)]))
    assert policy.decisions(16)["copy"].break_even > 1.4 * before
    assert policy.events == []


def test_what_the_run_does_not_show_slows_down_with_the_rest() -> None:
    drafting = replace(PROFILED, draft=Curve((1, 64), (0.002, 0.004)), draft_prefill_per_token=0.001, per_lookup=1e-5)
    live = LiveStepCost(drafting)
    for _ in range(600):
        live.observe(StepReport(8, 8, 0.02, 3 * drafting.forward_seconds(8, 8, 300), 8 * 300))
    assert live.cost.draft_step_seconds(8, 300) == pytest.approx(3 * drafting.draft_step_seconds(8, 300), rel=0.02)
    assert live.cost.per_lookup == pytest.approx(3e-5, rel=0.02)
