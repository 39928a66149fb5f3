"""Feeds a worker's engine with the rows of its shards, across shard borders, so that no batch drains between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from batchspec.io.parser import RowParser
from batchspec.io.reader import InputReader
from batchspec.io.schema import ResultRow
from batchspec.pipeline.messages import Assign, Committed, Counters, Link, RowsMoved, Shard, WantShard, WorkerSpec
from batchspec.pipeline.shards import OpenShard, ShardBook, read_segments
from batchspec.profile.predict import target_only_seconds
from batchspec.types import Completion, Outcome, Request, RowFailure
from batchspec.workload import RequestClassifier


class ShardFeed:
    """The engine's RequestSource, and the place where its outcomes come back to.

    A further shard is asked for when at most `lookahead_rows` are left to admit. Rows that cannot be requests never
    reach the engine, and rows that `serves` declines are left to another engine.
    """

    def __init__(
        self,
        link: Link,
        book: ShardBook,
        spec: WorkerSpec,
        lookahead_rows: int,
        serves: Callable[[Request], bool],
    ) -> None:
        self._link = link
        self._book = book
        self._spec = spec
        self._lookahead_rows = lookahead_rows
        self._serves = serves
        self._parser = RowParser(spec.config.input, spec.config.sampling)
        self._reader = InputReader(spec.inputs)
        self._classifier = RequestClassifier()
        self._assigned: deque[Shard] = deque()
        self._in_flight: dict[int, tuple[OpenShard, str]] = {}
        self._ended_rows: list[int] = []
        self._asked = False
        self._no_more = False
        self.counters = Counters()
        self.first_admitted_at: float | None = None
        self._stream = self._requests()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def take(self, wait: bool) -> Request | None:
        """See RequestSource. The parent hears of a row before the engine does."""
        while self._receive(wait=False):
            pass
        request = None if self._no_more else next(self._stream)
        while request is None and wait and not self._no_more:
            self._tell_rows(None)
            self._receive(wait=True)
            request = None if self._no_more else next(self._stream)
        if request is not None:
            self._tell_rows(request.row_index)
        return request

    def finish(self, outcome: Outcome) -> None:
        """Take an outcome back from the engine; commits the shard that it completes."""
        opened, label = self._in_flight.pop(outcome.row_index)
        self._ended_rows.append(outcome.row_index)
        self._finish(opened, outcome, label)

    def close(self) -> None:
        self._reader.close()

    def _finish(self, opened: OpenShard, outcome: Outcome, label: str | None) -> None:
        spec = self._spec
        expected = None
        if spec.step_cost is not None and isinstance(outcome, Completion):
            expected = target_only_seconds(spec.step_cost, outcome) * spec.device_share
        row = ResultRow(outcome, spec.worker, spec.attempt, spec.config.run.price_per_hour, label, expected)
        self.counters = self.counters.plus(outcome)
        if self._book.finish(opened, row):
            self._link.send(Committed(opened.shard.index))
        else:
            self._set_aside_if_done(opened)

    def _set_aside_if_done(self, opened: OpenShard) -> None:
        """A shard whose remaining rows are all another engine's is done with."""
        if opened.waits_for_others and not any(shard is opened for shard, _ in self._in_flight.values()):
            self._book.set_aside(opened)
            self._link.send(Committed(opened.shard.index, whole=False))

    def _receive(self, wait: bool) -> bool:
        message = self._link.receive(wait)
        if message is None:
            return False
        if isinstance(message, Assign):
            self._assigned.append(message.shard)
            self._asked = False
        else:
            self._no_more = True
        return True

    def _tell_rows(self, started: int | None) -> None:
        ended, self._ended_rows = tuple(self._ended_rows), []
        if started is not None or ended:
            self._link.send(RowsMoved(started, ended, self.counters))

    def _ask(self) -> None:
        if not self._asked and not self._assigned:
            self._asked = True
            self._link.send(WantShard())

    def _requests(self) -> Iterator[Request | None]:
        """The rows of all shards in turn; None where there is none at this moment."""
        while True:
            while not self._assigned:
                self._ask()
                yield None
            yield from self._shard_requests(self._book.open(self._assigned.popleft()))

    def _shard_requests(self, opened: OpenShard) -> Iterator[Request | None]:
        if opened.complete:
            self._book.commit_if_complete(opened)
            self._link.send(Committed(opened.shard.index))
            return
        suspects: list[Request] = []
        declined = False
        for parsed in self._undone_rows(opened):
            if isinstance(parsed, RowFailure):
                self._finish(opened, parsed, None)
            elif not self._serves(parsed):
                declined = True
            elif parsed.row_index in opened.suspects:
                suspects.append(parsed)
            else:
                yield self._admit(opened, parsed)
        for request in suspects:
            while self._in_flight:
                yield None
            yield self._admit(opened, request)
        while suspects and self._in_flight:
            yield None
        if declined:
            opened.waits_for_others = True
            self._set_aside_if_done(opened)

    def _admit(self, opened: OpenShard, request: Request) -> Request:
        if self.first_admitted_at is None:
            self.first_admitted_at = time.time()
        self._in_flight[request.row_index] = (opened, self._classifier.label(request.request_class))
        return request

    def _undone_rows(self, opened: OpenShard) -> Iterator[Request | RowFailure]:
        for segment, batch in read_segments(self._spec.inputs, self._reader, opened.shard):
            for parsed in self._parser.parse(batch, segment.first_row_index):
                if opened.shard.stop - parsed.row_index <= self._lookahead_rows:
                    self._ask()
                if not opened.is_done(parsed.row_index):
                    yield parsed
