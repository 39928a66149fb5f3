"""Workers that die: which rows were in them, which row is to blame, and when the job has seen enough."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from batchspec.errors import BatchspecError, UsageError, WorkerError
from batchspec.io.journal import JournalWriter, encode_row, read_journal
from batchspec.io.schema import ResultRow
from batchspec.io.store import Store, storage_faults
from batchspec.io.writer import part_name
from batchspec.pipeline.messages import Failed, Shard
from batchspec.types import RowFailure

MIN_DEATHS_ALONE = 2
WORKER_KILLED = "worker_killed"


class Deaths:
    """The deaths of an attempt.

    A row that was in a worker when it died is a suspect: the journal keeps that, and whoever takes the shard next
    decodes it alone. A row that was alone in two workers at their deaths is to blame: it becomes an error row, and its
    deaths no longer count against the job.
    """

    def __init__(self, store: Store, attempt: int, price_per_hour: float | None, max_deaths: int) -> None:
        self._store = store
        self._attempt = attempt
        self._price_per_hour = price_per_hour
        self._max_deaths = max_deaths
        self._num_unexplained = 0
        self._first_traceback = ""
        self.descriptions: list[str] = []

    def record(
        self,
        worker: int,
        shards: Mapping[int, Shard],
        in_flight: Collection[int],
        exit_code: int,
        failure: Failed | None,
    ) -> int:
        """Note a death; the number of rows that were found to blame. Raises WorkerError after too many."""
        description = f"worker {worker} {_cause(exit_code, failure)} with {_names(shards)}"
        self.descriptions.append(description)
        self._num_unexplained += 1
        if failure is not None and failure.traceback and not self._first_traceback:
            self._first_traceback = f"\nFirst traceback:\n{failure.traceback.rstrip()}"
        with storage_faults(self._store):
            blamed = self._note_suspects(worker, shards, set(in_flight), _cause(exit_code, failure))
        if self._num_unexplained >= self._max_deaths:
            self.give_up(f"{self._num_unexplained} worker deaths (--max-worker-deaths {self._max_deaths})")
        return blamed

    def uncommitted(self, shards: Mapping[int, Shard]) -> dict[int, Shard]:
        """Those without a part: a worker may die between committing a shard and saying so."""
        with storage_faults(self._store):
            parts = set(self._store.names(""))
        return {index: shard for index, shard in shards.items() if part_name(index) not in parts}

    def give_up(self, why: str) -> None:
        """Raise WorkerError with the last death and the first traceback."""
        raise WorkerError(
            f"{why}; the last: {self.descriptions[-1]}. Finished rows are kept; the same command goes on from there."
            f"{self._first_traceback}"
        )

    def _note_suspects(self, worker: int, shards: Mapping[int, Shard], in_flight: set[int], cause: str) -> int:
        """Write the rows that were in the worker into the journals of their shards."""
        journals = {index: read_journal(self._store, index) for index in shards}
        for journal in journals.values():
            in_flight -= journal.records.keys()
        blamed = 0
        for index, shard in shards.items():
            suspects = [row_index for row_index in in_flight if shard.start <= row_index < shard.stop]
            if not suspects:
                continue
            # The number of the death makes the name this writer's own.
            writer = JournalWriter(self._store, index, self._attempt, f"d{len(self.descriptions)}")
            alone = len(in_flight) == 1
            writer.append_death(suspects, alone)
            if alone and journals[index].deaths_alone[suspects[0]] + 1 >= MIN_DEATHS_ALONE:
                num_deaths = journals[index].deaths[suspects[0]] + 1
                message = f"{num_deaths} workers ended while they decoded this row; the last {cause}"
                failure = RowFailure(suspects[0], WORKER_KILLED, message)
                writer.append(encode_row(ResultRow(failure, worker, self._attempt, self._price_per_hour)))
                self._num_unexplained = max(0, self._num_unexplained - num_deaths)
                blamed += 1
            writer.close()
        return blamed


def raise_if_fatal(failure: Failed | None) -> None:
    """A worker that stopped with an error of ours has said what is wrong: no successor would fare better."""
    if failure is not None and failure.exit_code is not None:
        error_type = UsageError if failure.exit_code == UsageError.exit_code else BatchspecError
        raise error_type(failure.message)


def _cause(exit_code: int, failure: Failed | None) -> str:
    if failure is not None:
        return f"failed ({failure.message})"
    if exit_code < 0:
        out_of_memory = ", as the kernel does when memory runs out" if -exit_code == signal.SIGKILL else ""
        return f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)}{out_of_memory})"
    return f"ended with exit code {exit_code}"


def _names(shards: Mapping[int, Shard]) -> str:
    if not shards:
        return "no shard"
    return f"shard{'s' * (len(shards) > 1)} {', '.join(str(index) for index in sorted(shards))}"
