"""Holdout: random blocks without speculation, each compared with its neighbours."""

from __future__ import annotations

import pytest

from batchspec.accounting.saving import Spent, measured_saving, net_of
from batchspec.config import RouteConfig
from batchspec.profile.holdout import BLOCK_STEPS, HoldoutPolicy
from batchspec.profile.policy import static_policy
from batchspec.types import Method, StepReport

SPECULATING = static_policy(RouteConfig(Method.PROMPT_LOOKUP, 4))


def steps(policy: HoldoutPolicy, count: int, gain: float) -> int:
    """Steps of 10 ms that commit 8 tokens, or `gain` times as many where the policy speculates; how many were held."""
    held = 0
    for _ in range(count):
        speculates = policy.route("c", 8).method is not Method.TARGET_ONLY
        held += not speculates
        policy.observe(StepReport(8, round(8 * gain) if speculates else 8, 0.01))
    return held


def test_without_a_share_nothing_is_held_back() -> None:
    policy = HoldoutPolicy(SPECULATING, 0.0, seed=1)
    assert steps(policy, 1000, 2.0) == 0
    assert policy.pairs == []


def test_about_the_share_is_held_in_whole_blocks_and_measures_the_gain() -> None:
    policy = HoldoutPolicy(SPECULATING, 0.1, seed=1)
    held = steps(policy, 200 * BLOCK_STEPS, 2.0)
    assert held % BLOCK_STEPS == 0
    whole = 200 * BLOCK_STEPS
    assert 0.06 < held / whole < 0.14
    pairs = [(*pair.held, *pair.beside) for pair in policy.pairs]
    tokens = 8 * held + 16 * (whole - held)
    saving = measured_saving(pairs, 8 * held / tokens, spent=Spent(100.0, 100.0))
    assert saving is not None
    assert saving["share"] == pytest.approx(1 - whole / (tokens / 8))
    assert saving["low"] <= saving["share"] <= saving["high"]


def test_half_of_all_steps_can_be_held() -> None:
    assert steps(HoldoutPolicy(SPECULATING, 0.5, seed=1), 200 * BLOCK_STEPS, 2.0) == pytest.approx(
        100 * BLOCK_STEPS, abs=BLOCK_STEPS
    )


def test_a_loss_is_a_negative_saving_and_few_pairs_say_nothing() -> None:
    slower = (100, 1.0, 160, 2.0)
    saving = measured_saving([slower] * 5, 0.0, Spent(100.0, 100.0))
    assert saving is not None
    assert saving["share"] == pytest.approx(1 - 100 / 80)
    assert measured_saving([slower] * 2, 0.0, Spent(100.0, 100.0)) is None


def test_the_saving_is_of_all_metered_time_and_net_of_measuring_and_audit() -> None:
    twice = (100, 2.0, 100, 1.0)
    saving = measured_saving(
        [twice] * 4, 0.0, Spent(metered_seconds=100.0, decode_seconds=40.0, measuring_seconds=10.0)
    )
    assert saving is not None
    # target-only, decoding takes 80 s instead of 40 s, and nobody measures: 130 s against 100 s
    assert saving["saved_seconds"] == pytest.approx(30.0)
    assert saving["share"] == saving["low"] == saving["high"] == pytest.approx(30 / 130)
    assert net_of(saving, 100.0, 5.0)["saved_seconds"] == pytest.approx(25.0)
    assert net_of(saving, 100.0, 5.0)["share"] == pytest.approx(25 / 130)
