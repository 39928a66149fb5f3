"""A step's clock: every device second of an engine is put on a named line as it passes."""

from __future__ import annotations

import time
from collections import defaultdict


class Meter:
    """Device seconds by line. `device_share` is this worker's share of its device: wall seconds count that much."""

    def __init__(self, device_share: float = 1.0) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.device_share = device_share
        self._mark = time.perf_counter()
        self._reported: defaultdict[str, float] = defaultdict(float)

    def since_last(self, *lines: str) -> dict[str, float]:
        """Device seconds on each of these lines since it was last asked for."""
        found = {line: self.seconds[line] - self._reported[line] for line in lines}
        self._reported.update({line: self.seconds[line] for line in lines})
        return found

    def lap(self, line: str | None = None) -> float:
        """Device seconds since the last mark, put on `line` if one is given; the next lap starts here."""
        now = time.perf_counter()
        seconds = (now - self._mark) * self.device_share
        self._mark = now
        if line is not None:
            self.seconds[line] += seconds
        return seconds
