"""What steps cost on this machine now: a profile's step cost, corrected by the steps of the run. Pure; no torch."""

from __future__ import annotations

from dataclasses import replace

from batchspec.profile.records import Curve, StepCost
from batchspec.types import StepReport

# Steps after which what one told counts for 1/e: some seconds. A machine's speed changes within minutes.
_MEMORY_STEPS = 300

# The line is drawn anew after so many steps, and followed where it moved by more than this share: routes that are
# derived of it take some milliseconds to find.
_STEPS_PER_UPDATE = 128
_LEAST_CHANGE = 0.01

# How much steps must differ in size, relative to their mean, before they tell of the slope as much as the profile does.
_TELLING_SPREAD = 0.1

# A step this many times slower or faster than others like it was disturbed, and counts for no more than that.
_MOST_DEVIATION = 1.5

# Far from the run's steps the line may be wrong: no forward is taken to be faster than all are, by more than this.
_MOST_EXTRAPOLATED = 2.0


class LiveStepCost:
    """Keeps a straight line from what forwards should take to what they take, by least squares with forgetting, held to
    the profile's slope where all steps are alike.

    A line is enough: memory that turns slow or fast moves all small forwards alike, and the slope between forwards of
    several sizes is what decides whether a position pays.
    """

    def __init__(self, profiled: StepCost) -> None:
        self._profiled = profiled
        self._steps, self._weight = 0, 0.0
        self._mean_expected, self._mean_taken = 0.0, 0.0
        self._variance, self._covariance = 0.0, 0.0
        self._slope = 1.0
        self.cost = profiled

    def observe(self, step: StepReport) -> bool:
        """Learn from a step; whether `cost` changed by it."""
        if step.forward_seconds is None or not step.num_live:
            return False
        positions = step.num_live + sum(proposed for _, proposed, _ in step.drafts)
        expected = self._profiled.forward_seconds(step.num_live, positions, step.context_tokens / step.num_live)
        self._add(expected, step.forward_seconds)
        self._steps += 1
        if self._steps % _STEPS_PER_UPDATE:
            return False
        before, now = self.cost, self._by_line()
        moved = [abs(new / old - 1) for new, old in zip(now.target.seconds, before.target.seconds, strict=True)]
        if max(moved) <= _LEAST_CHANGE:
            return False
        self.cost = now
        return True

    def _add(self, expected: float, taken: float) -> None:
        if self._weight:
            usual = self._mean_taken + self._slope * (expected - self._mean_expected)
            taken = min(max(taken, usual / _MOST_DEVIATION), usual * _MOST_DEVIATION)
        self._weight = self._weight * (1 - 1 / _MEMORY_STEPS) + 1
        share = 1 / self._weight
        x, y = expected - self._mean_expected, taken - self._mean_taken
        self._mean_expected += share * x
        self._mean_taken += share * y
        self._variance = (1 - share) * (self._variance + share * x * x)
        self._covariance = (1 - share) * (self._covariance + share * x * y)

    def _by_line(self) -> StepCost:
        held = (_TELLING_SPREAD * self._mean_expected) ** 2
        level = self._mean_taken / self._mean_expected
        self._slope = max(0.0, (self._covariance + held * level) / (self._variance + held))
        offset = self._mean_taken - self._slope * self._mean_expected
        profiled = self._profiled
        seconds = [max(level * s / _MOST_EXTRAPOLATED, self._slope * s + offset) for s in profiled.target.seconds]
        return replace(
            profiled.scaled(level),  # what is not seen of the run, such as a draft model's forwards
            target=Curve(profiled.target.counts, tuple(seconds)),
            per_kv_token=self._slope * profiled.per_kv_token,
            per_position_kv_token=self._slope * profiled.per_position_kv_token,
        )
