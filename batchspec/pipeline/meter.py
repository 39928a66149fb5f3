"""Puts every device second of an attempt on a named line, from the command's start to its summary."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from batchspec.accounting.cost import ROW_LINES, MeteredTime
from batchspec.pipeline.messages import Report


class PlaceMeter:
    """The seconds of one worker's place. The worker's own lines come with its reports; the time before, between and
    after its processes is the parent's to name."""

    def __init__(self, device_share: float, started_at: float) -> None:
        self._device_share = device_share
        self._mark = started_at
        self._lines: defaultdict[str, float] = defaultdict(float)
        self._running: Mapping[str, float] = {}

    def lap(self, line: str) -> float:
        """Put the time since the last mark on a line; the monotonic time that it was lapped at."""
        now = time.monotonic()
        self._lines[line] += (now - self._mark) * self._device_share
        self._mark = now
        return now

    def report(self, report: Report) -> None:
        """What the running worker says of its time so far."""
        self._running = report.lines
        self._mark = report.at

    def ended(self, line: str, row_device_seconds: float = 0.0) -> None:
        """The worker is no more: what it reported stays, and the time since then goes on `line`, apart from
        `row_device_seconds` of rows that it finished in that time."""
        self.lap(line)
        self._lines[line] -= row_device_seconds
        self._lines[ROW_LINES[0]] += row_device_seconds
        for name, seconds in self._running.items():
            self._lines[name] += seconds
        self._running = {}

    @property
    def lines(self) -> dict[str, float]:
        return {
            line: self._lines.get(line, 0.0) + self._running.get(line, 0.0)
            for line in dict.fromkeys([*self._lines, *self._running])
        }

    @property
    def metered_until(self) -> float:
        return self._mark


class AttemptMeter:
    """All places of an attempt, on a clock of its own against which the lines are checked."""

    def __init__(self, device_shares: list[float], started_at: float) -> None:
        self._started_at = started_at
        self._device_shares = device_shares
        self.places = [PlaceMeter(share, started_at) for share in device_shares]

    def lap_all(self, line: str) -> None:
        for place in self.places:
            place.lap(line)

    def metered(self) -> MeteredTime:
        """The device seconds so far, as far as places have told theirs."""
        total = sum(
            (place.metered_until - self._started_at) * share
            for place, share in zip(self.places, self._device_shares, strict=True)
        )
        names = dict.fromkeys(name for place in self.places for name in place.lines)
        return MeteredTime(total, {name: sum(place.lines.get(name, 0.0) for place in self.places) for name in names})
