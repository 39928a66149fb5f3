"""How a job went over time, in few samples whatever its length."""

from __future__ import annotations

MAX_SAMPLES = 240
FIRST_INTERVAL_SECONDS = 1.0

Sample = tuple[float, int, int, int]
"""Seconds since the attempt began, rows ended, their output tokens, rows in flight."""


class Timeline:
    """Samples at a steady interval, which doubles each time that they have become too many."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._interval = FIRST_INTERVAL_SECONDS

    def note(self, sample: Sample) -> None:
        """Keep the sample if it is due."""
        if self.samples and sample[0] < self.samples[-1][0] + self._interval:
            return
        self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[1::2]
            self._interval *= 2
