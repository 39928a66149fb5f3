"""What workers and the parent say to each other, and what a worker is started with. Small, picklable records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

from batchspec.accounting.saving import PairSums
from batchspec.accounting.usage import Usage
from batchspec.config import RunConfig
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.records import Profile, StepCost
from batchspec.types import Completion, EngineInfo, Outcome, Route

if TYPE_CHECKING:  # pyarrow is not light, and the parent starts workers before it has read anything
    from batchspec.io.inputs import InputSet


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker needs. `worker` numbers its place, which a successor takes over when it dies.

    Rows are routed by `routes`; where its engine serves one route alone, that is `route`. `step_cost` is that of the
    profile, if there is one.
    `spawned_at` is the monotonic clock of this machine: the worker's seconds are metered from there on.
    """

    worker: int
    attempt: int
    run_id: str
    config: RunConfig
    inputs: InputSet
    output: str
    device: str
    threads: int
    device_share: float
    spawned_at: float
    part_metadata: Mapping[str, str]
    routes: StaticPolicy | Profile
    route: Route | None = None
    step_cost: StepCost | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """The input rows `start <= row_index < stop`, answered by one part."""

    index: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


# Parent to worker


@dataclass(frozen=True, slots=True)
class Assign:
    shard: Shard


@dataclass(frozen=True, slots=True)
class NoMore:
    """No shard will come any more; rows not yet admitted stay undone."""


# Worker to parent


@dataclass(frozen=True, slots=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class WantShard:
    """Sent before the rows at hand run out, so that the engine never drains between shards."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Rows that this worker process finished. `row_device_seconds` is what they were charged."""

    rows: int = 0
    error_rows: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    target_steps: int = 0
    row_device_seconds: float = 0.0

    def plus(self, outcome: Outcome) -> Counters:
        completion = outcome if isinstance(outcome, Completion) else None
        return Counters(
            rows=self.rows + 1,
            error_rows=self.error_rows + (completion is None),
            input_tokens=self.input_tokens + (outcome.input_tokens or 0),
            output_tokens=self.output_tokens + (completion.output_tokens if completion else 0),
            target_steps=self.target_steps + (completion.stats.num_target_steps if completion else 0),
            row_device_seconds=self.row_device_seconds + outcome.times.device_seconds,
        )

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class RowsMoved:
    """`started` is about to be decoded (sent before the work, for the case that it kills the worker); `ended` rows
    have left the engine since the last message of this kind; `counters` are of all rows that this worker ended."""

    started: int | None
    ended: tuple[int, ...]
    counters: Counters


@dataclass(frozen=True, slots=True)
class Report:
    """Sent every second and at the end: totals so far. `lines` are device seconds by name, up to `at` (monotonic).

    `decoding` says that the engine was at work, not waiting and not writing a part: only then can a step hang.
    `holdout_pairs` come with the last report alone. `first_admitted_at` and `last_retired_at` are wall-clock times.
    """

    at: float
    lines: Mapping[str, float]
    counters: Counters
    decoding: bool
    first_admitted_at: float | None = None
    last_retired_at: float | None = None
    holdout_pairs: Sequence[PairSums] = ()
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Committed:
    """The worker is done with a shard. Not `whole`: its part waits for rows that this engine does not serve."""

    shard: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker's last word."""

    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker raised. `exit_code` is that of a BatchspecError, which ends the job; None: an unforeseen error."""

    message: str
    traceback: str
    exit_code: int | None = None


FromWorker = Ready | WantShard | RowsMoved | Report | Committed | Finished | Failed
ToWorker = Assign | NoMore


class Link(Protocol):
    """A worker's end of the line to its parent."""

    def send(self, message: FromWorker) -> None:
        """Hand over a message. Raises OSError where the parent is gone. Safe from several threads."""
        ...

    def receive(self, wait: bool) -> ToWorker | None:
        """The next message; None where none is there and `wait` is False. Raises EOFError where the parent is gone."""
        ...


# Executor to parent


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker's process ended; everything that it had said was delivered before. Negative codes are signals."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class Event:
    worker: int
    message: FromWorker | WorkerDied


class Executor(Protocol):
    """Runs workers somewhere and carries messages."""

    def start_ahead(self, config: RunConfig) -> None:
        """Start what can be started of a job's workers before the job is known to be fit to run. `start` takes it up.

        Raises UsageError where the configuration has no place for them."""
        ...

    def start(self, spec: WorkerSpec) -> None: ...

    def send(self, worker: int, message: ToWorker) -> None:
        """Deliver, or drop silently where the worker is dead: its death is an event of its own."""
        ...

    def wait(self, timeout: float) -> list[Event]:
        """What happened, in order per worker; empty after `timeout` seconds without anything."""
        ...

    def kill(self, worker: int) -> None:
        """End a worker at once. Its WorkerDied follows."""
        ...

    def close(self) -> None:
        """Kill what still runs and free everything. Workers may be started again afterwards."""
        ...
