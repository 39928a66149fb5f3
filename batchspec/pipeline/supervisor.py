"""The parent's loop: hands shards to workers, hears of their rows, and replaces workers that die."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batchspec.accounting.cost import ROW_LINES
from batchspec.accounting.saving import PairSums
from batchspec.accounting.usage import Usage, combine
from batchspec.config import RunOptions
from batchspec.pipeline.deaths import Deaths, raise_if_fatal
from batchspec.pipeline.interrupts import Interrupts
from batchspec.pipeline.messages import (
    Assign,
    Committed,
    Counters,
    Event,
    Executor,
    Failed,
    Finished,
    FromWorker,
    NoMore,
    Ready,
    Report,
    RowsMoved,
    Shard,
    WantShard,
    WorkerDied,
    WorkerSpec,
)
from batchspec.pipeline.meter import PlaceMeter
from batchspec.types import EngineInfo

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.2
MAX_FRUITLESS_DEATHS = 3


@dataclass(slots=True)
class _Worker:
    """What the parent knows of one place. `past` and `fruitless_deaths` outlive the process, the rest is of it."""

    spec: WorkerSpec
    meter: PlaceMeter
    past: Counters = field(default_factory=Counters)
    fruitless_deaths: int = 0
    info: EngineInfo | None = None
    shards: dict[int, Shard] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    hungry: bool = False
    finished: bool = False
    failure: Failed | None = None
    report: Report | None = None
    stepped_at: float = 0.0
    own: Counters = field(default_factory=Counters)

    @property
    def counters(self) -> Counters:
        return self.past + self.own


class Supervisor:
    """Sees `shards` through on one worker per meter; `left_over` are those that wait for rows of other routes.

    `new_spec` makes the spec of a worker that starts now; `on_tick` is called several times a second.
    """

    def __init__(
        self,
        executor: Executor,
        new_spec: Callable[[int, float], WorkerSpec],
        shards: Sequence[Shard],
        meters: Sequence[PlaceMeter],
        options: RunOptions,
        deaths: Deaths,
        interrupts: Interrupts,
        on_tick: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._new_spec = new_spec
        self._pending = deque(shards)
        self._options = options
        self._deaths = deaths
        self._interrupts = interrupts
        self._on_tick = on_tick
        self.left_over: list[Shard] = []
        self._stop_at: float | None = None
        self._told_no_more = False
        self.first_admitted_at: float | None = None
        self._last_retired_at = 0.0
        self._workers = [_Worker(self._start(number, meter, "startup"), meter) for number, meter in enumerate(meters)]

    @property
    def counters(self) -> Counters:
        return sum((worker.counters for worker in self._workers), start=Counters())

    @property
    def engines(self) -> list[EngineInfo]:
        return [worker.info for worker in self._workers if worker.info is not None]

    @property
    def num_in_flight(self) -> int:
        """Rows that are being decoded now."""
        return sum(len(worker.in_flight) for worker in self._workers)

    @property
    def decode_wall_seconds(self) -> float:
        """From the first row admitted to the last row retired, over all workers."""
        return max(0.0, self._last_retired_at - (self.first_admitted_at or math.inf))

    def run(self) -> None:
        """Return when every shard is committed. Raises WorkerError after too many deaths, Interrupted on a signal,
        and what a worker's error of ours says."""
        self._interrupts.graceful = True
        try:
            while not all(worker.finished for worker in self._workers):
                for event in self._executor.wait(WAIT_SECONDS):
                    self._handle(self._workers[event.worker], event)
                self._end_when_done()
                self._end_when_interrupted()
                self._kill_hung_workers()
                self._on_tick()
        finally:
            self._interrupts.graceful = False
            self._executor.close()
        if self._interrupts.received is not None and self._has_work():
            raise self._interrupts.interrupted(self._interrupts.received)

    def _handle(self, worker: _Worker, event: Event) -> None:
        if isinstance(event.message, WorkerDied):
            self._on_death(worker, event.message.exit_code)
        else:
            self._on_message(worker, event.message)

    def _on_message(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case RowsMoved():
                worker.in_flight.difference_update(message.ended)
                worker.own = message.counters
                if message.started is not None:
                    worker.in_flight.add(message.started)
            case WantShard():
                worker.hungry = True
                self._assign()
            case Committed():
                shard = worker.shards.pop(message.shard)
                if not message.whole:
                    self.left_over.append(shard)
            case Report():
                self._on_report(worker, message)
            case Ready():
                worker.info = message.info
            case Finished():
                self._on_report(worker, message.report)
                worker.finished = True
            case Failed():
                worker.failure = message

    @property
    def holdout_pairs(self) -> list[PairSums]:
        """What the workers that finished measured of speculation's gain."""
        return [pair for worker in self._workers if worker.report for pair in worker.report.holdout_pairs]

    @property
    def usage(self) -> Usage:
        """How full the workers were that live now or finished."""
        return combine(worker.report.usage for worker in self._workers if worker.report)

    def _on_report(self, worker: _Worker, report: Report) -> None:
        if worker.report is None or not report.decoding or _engine_seconds(report) > _engine_seconds(worker.report):
            worker.stepped_at = report.at
        worker.report = report
        worker.own = report.counters
        worker.meter.report(report)
        if report.first_admitted_at is not None:
            self.first_admitted_at = min(report.first_admitted_at, self.first_admitted_at or math.inf)
        if report.last_retired_at is not None:
            self._last_retired_at = max(report.last_retired_at, self._last_retired_at)

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.hungry and self._pending and not self._told_no_more:
                shard = self._pending.popleft()
                worker.hungry = False
                worker.shards[shard.index] = shard
                self._executor.send(worker.spec.worker, Assign(shard))

    def _on_death(self, worker: _Worker, exit_code: int) -> None:
        if worker.finished:
            worker.meter.ended("idle")
            return
        reported = worker.report.counters if worker.report else Counters()
        worker.meter.ended("failed", worker.own.row_device_seconds - reported.row_device_seconds)
        raise_if_fatal(worker.failure)
        if self._told_no_more:  # there was nothing left for it to do, or nothing that it may still begin
            worker.finished = True
        else:
            self._replace(worker, exit_code)

    def _replace(self, worker: _Worker, exit_code: int) -> None:
        """Record a death, put the worker's shards back in front, and start its successor."""
        worker.shards = self._deaths.uncommitted(worker.shards)
        num_blamed = self._deaths.record(worker.spec.worker, worker.shards, worker.in_flight, exit_code, worker.failure)
        logger.warning("%s; its shards are handed on", self._deaths.descriptions[-1])
        fruitful = num_blamed > 0 or worker.own.rows > 0
        worker.fruitless_deaths = 0 if fruitful else worker.fruitless_deaths + 1
        if worker.fruitless_deaths >= MAX_FRUITLESS_DEATHS:
            self._deaths.give_up(f"worker {worker.spec.worker} died {MAX_FRUITLESS_DEATHS} times before it ended a row")
        self._pending.extendleft(reversed(worker.shards.values()))
        successor = _Worker(
            spec=self._start(worker.spec.worker, worker.meter, "failed"),
            meter=worker.meter,
            past=worker.counters,
            fruitless_deaths=worker.fruitless_deaths,
        )
        self._workers[worker.spec.worker] = successor
        self._assign()

    def _start(self, number: int, meter: PlaceMeter, line: str) -> WorkerSpec:
        spec = self._new_spec(number, meter.lap(line))
        self._executor.start(spec)
        return spec

    def _has_work(self) -> bool:
        return bool(self._pending) or any(worker.shards for worker in self._workers)

    def _end_when_done(self) -> None:
        if not self._has_work():
            self._tell_no_more()

    def _end_when_interrupted(self) -> None:
        """After a signal: admit nothing more, give the rows in flight the grace time, then kill."""
        if self._interrupts.received is None:
            return
        if self._stop_at is None:
            logger.info("stopping: rows in flight have %g s to end", self._options.grace_seconds)
            self._stop_at = time.monotonic() + self._options.grace_seconds
            self._tell_no_more()
        elif time.monotonic() > self._stop_at:
            raise self._interrupts.interrupted(self._interrupts.received)

    def _tell_no_more(self) -> None:
        if not self._told_no_more:
            self._told_no_more = True
            for worker in self._workers:
                self._executor.send(worker.spec.worker, NoMore())

    def _kill_hung_workers(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            decoding = worker.report is not None and worker.in_flight and not worker.finished
            if decoding and now - worker.stepped_at > self._options.step_timeout:
                seconds = now - worker.stepped_at
                worker.failure = Failed(f"no step ended for {seconds:.0f} s (--step-timeout), so it was killed", "")
                worker.stepped_at = now
                self._executor.kill(worker.spec.worker)


def _engine_seconds(report: Report) -> float:
    return sum(report.lines.get(line, 0.0) for line in ROW_LINES)
