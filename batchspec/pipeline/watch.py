"""What a worker's steps show on the way: how full it is, and what its policy changed."""

from __future__ import annotations

import resource
import sys

from batchspec.accounting.usage import Usage
from batchspec.profile.holdout import HoldoutPolicy
from batchspec.types import Route, StepReport


class WatchedPolicy:
    """Follows a policy and keeps the figures of the steps that it was told of."""

    def __init__(self, policy: HoldoutPolicy) -> None:
        self._policy = policy
        self._peak_live: int | None = None
        self._num_preemptions = 0

    def route(self, request_class: str | None, occupancy: int) -> Route:
        return self._policy.route(request_class, occupancy)

    def observe(self, step: StepReport) -> None:
        self._peak_live = max(self._peak_live or 0, step.num_live)
        self._num_preemptions = step.num_preemptions
        self._policy.observe(step)

    @property
    def usage(self) -> Usage:
        return Usage(self._peak_live, self._num_preemptions, peak_memory_bytes(), self._policy.events)


def peak_memory_bytes() -> int:
    """The most resident memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
