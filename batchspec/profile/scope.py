"""What measuring a profile covers, and how long it may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from batchspec.types import Method, Request


@dataclass(frozen=True)
class Scope:
    """What to measure: the methods, how many tokens they propose at most, and the least matches of prompt lookup. A job
    of `job_rows` (None: any) must be worth it. `row_shares` are the classes' shares of the input's rows (empty: those
    of the sample)."""

    methods: frozenset[Method]
    max_depth: int = 8
    least_matches: tuple[int, ...] = (1, 2)
    budget_seconds: float = 120.0
    job_rows: int | None = None
    row_shares: Mapping[str, float] = field(default_factory=dict)


class NotWorthMeasuring(Exception):
    """The job is too short to repay what measuring for it would take."""


@dataclass(frozen=True)
class Budget:
    """Seconds that measuring may take; what no longer fits is skipped, and named."""

    seconds: float
    started_at: float

    @property
    def left(self) -> float:
        return self.seconds - (perf_counter() - self.started_at)


class ListSource:
    """Requests that are all at hand; none is handed out after `until`, a reading of `perf_counter`."""

    def __init__(self, requests: Iterable[Request], until: float = inf) -> None:
        self._requests = deque(requests)
        self._until = until

    def take(self, wait: bool) -> Request | None:
        return self._requests.popleft() if self._requests and perf_counter() < self._until else None
