"""Workers as actors of a Ray cluster: each actor runs one worker process on its node and passes its messages on.

The worker is the one of the local executor, in a process of its own: what it said before it died is delivered by the
actor that outlives it, and what ends the process (a fault in a kernel, memory) is told like on one machine. Ray only
places the actors and notices when one, or its node, is gone; it restarts nothing, since the parent hands shards on.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from batchspec.config import RunConfig, RunOptions
from batchspec.errors import BatchspecError, MissingDependencyError, UsageError
from batchspec.pipeline.devices import CPU, Place
from batchspec.pipeline.executors.relay import Relay
from batchspec.pipeline.messages import (
    Assign,
    Counters,
    Event,
    Failed,
    Finished,
    FromWorker,
    NoMore,
    Report,
    ToWorker,
    WorkerDied,
    WorkerSpec,
)

logger = logging.getLogger(__name__)

KILLED = -signal.SIGKILL
CLOSE_SECONDS = 10.0
CONNECT_SECONDS = 10.0
WARN_SECONDS = 30.0


@dataclass(slots=True)
class _Worker:
    """An actor as the parent sees it. `awaited` is the one call of which it waits for the answer; `clock_offset` is
    what the node's monotonic clock lacks to the parent's, None until Ray has found a place."""

    spec: WorkerSpec
    actor: Any
    awaited: Any
    clock_offset: float | None = None
    held_back: list[ToWorker] = field(default_factory=list)


class RayExecutor:
    """See Executor. Needs the connection that `ray_places` makes."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._workers: dict[int, _Worker] = {}
        self._ended: list[Event] = []
        self._warned_at = time.monotonic()

    @cached_property
    def _ray(self) -> Any:
        import ray

        return ray

    def start_ahead(self, config: RunConfig) -> None:
        """There are no places before Ray is connected, which the checks of the job do."""

    def start(self, spec: WorkerSpec) -> None:
        options = self._options
        actor_class = self._ray.remote(
            num_cpus=options.ray_num_cpus,
            num_gpus=_gpus_of(spec.device, options, spec.config.engine.tensor_parallel_size),
            max_restarts=0,
            max_task_retries=0,
        )(Relay)
        actor = actor_class.remote(f"batchspec {spec.run_id} worker {spec.worker}")
        self._workers[spec.worker] = _Worker(spec, actor, actor.clock.remote())

    def send(self, worker: int, message: ToWorker) -> None:
        found = self._workers.get(worker)
        if found is None:
            return
        if found.clock_offset is None:
            found.held_back.append(message)
        elif isinstance(message, Assign):
            found.actor.shard.options(name=f"shard {message.shard.index}").remote(message)
        else:
            found.actor.send.remote(message)

    def wait(self, timeout: float) -> list[Event]:
        self._send_unplaced_home()
        events, self._ended = self._ended, []
        awaited = {worker.awaited: number for number, worker in self._workers.items()}
        if not awaited:
            time.sleep(0 if events else timeout)
            return events
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=0 if events else timeout)
        if ready:
            ready, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        for answer in ready:
            events += self._take(awaited[answer])
        return events

    def kill(self, worker: int) -> None:
        if worker in self._workers:
            self._ray.kill(self._workers[worker].actor)

    def close(self) -> None:
        """Kill the actors and see them gone, so that none writes on. The connection to Ray stays."""
        for number in self._workers:
            self.kill(number)
        awaited = [worker.awaited for worker in self._workers.values()]
        self._workers.clear()
        if awaited:
            self._ray.wait(awaited, num_returns=len(awaited), timeout=CLOSE_SECONDS)

    def _take(self, number: int) -> Iterator[Event]:
        """The answer to the awaited call of a worker; the next call is on its way before it is handed over."""
        worker = self._workers[number]
        try:
            answer = self._ray.get(worker.awaited)
        except self._ray.exceptions.RayError as error:
            # Unreachable for a while counts as gone too: messages may be lost, so nothing it says can be built on.
            yield from self._gone(number, error)
            return
        if worker.clock_offset is None:
            self._begin(worker, answer)
            return
        for message in answer:
            if isinstance(message, WorkerDied):
                self._drop(number)
            yield Event(number, _on_our_clock(message, worker.clock_offset))
        if number in self._workers:
            worker.awaited = worker.actor.messages.remote()

    def _begin(self, worker: _Worker, clock: float) -> None:
        """The actor has a place: start its worker, with the time it was sent for in the node's own clock."""
        worker.clock_offset = time.monotonic() - clock
        spec = replace(worker.spec, spawned_at=worker.spec.spawned_at - worker.clock_offset)
        worker.awaited = worker.actor.start.remote(spec)
        for message in worker.held_back:
            self.send(worker.spec.worker, message)

    def _gone(self, number: int, error: Exception) -> Iterator[Event]:
        self._drop(number)
        cause = " ".join(str(error).split("\n")[0].split())
        yield Event(number, Failed(f"its Ray actor is gone: {type(error).__name__}: {cause}", str(error)))
        yield Event(number, WorkerDied(KILLED))

    def _drop(self, number: int) -> None:
        """Forget a worker; its actor's room is free for others at once."""
        self._ray.kill(self._workers.pop(number).actor)

    def _send_unplaced_home(self) -> None:
        """A worker for which there was no room has nothing to finish when no more work comes."""
        unplaced = [worker for worker in self._workers.values() if worker.clock_offset is None]
        now = time.monotonic()
        for worker in unplaced:
            if NoMore() in worker.held_back:
                self._drop(worker.spec.worker)
                waited = {"placement": (now - worker.spec.spawned_at) * worker.spec.device_share}
                self._ended.append(Event(worker.spec.worker, Finished(Report(now, waited, Counters(), decoding=False))))
        if unplaced and now - self._warned_at > WARN_SECONDS:
            self._warned_at = now
            free, room, spec = self._ray.available_resources(), self._options, unplaced[0].spec
            gpus = _gpus_of(spec.device, room, spec.config.engine.tensor_parallel_size)
            wanted = f"{room.ray_num_cpus:g} CPUs and {gpus:g} GPUs"
            have = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
            logger.warning("%d workers wait for Ray (%s each, %s free in all)", len(unplaced), wanted, have)


def ray_places(config: RunConfig) -> tuple[Place, ...]:
    """Connect to Ray, or start one on this machine, and say what its workers' places are like.

    A GPU worker holds whole devices or a part of one and is metered by that; a CPU worker by its part of a mean node.
    Raises MissingDependencyError without ray, UsageError for devices that only one machine can name, and
    BatchspecError where the cluster cannot be reached.
    """
    options = config.run
    if options.devices not in (("auto",), (CPU,)):
        named = ",".join(options.devices)
        raise UsageError(f"--devices {named}: Ray chooses the devices; with --executor ray say auto or cpu")
    ray = _connect(options)
    resources = ray.cluster_resources()
    on_gpu = options.devices == ("auto",) and config.engine.engine != "fake" and resources.get("GPU", 0) > 0
    threads = options.threads or max(1, int(options.ray_num_cpus))
    if on_gpu:
        device, share = "cuda:0", _gpus_of("cuda:0", options, config.engine.tensor_parallel_size)
    else:
        num_nodes = sum(node["Alive"] for node in ray.nodes())
        device, share = CPU, min(1.0, options.ray_num_cpus * num_nodes / max(1.0, resources.get("CPU", 0)))
    logger.info("Ray: %d workers on %s, each %.3g of a device", options.workers, device, share)
    return (Place(device, threads, share),) * options.workers


def _connect(options: RunOptions) -> Any:
    """The ray module, connected. Ray's own handler of SIGTERM ends the process at once: ours is put back."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("--executor ray needs Ray: pip install 'batchspec[ray]'") from error
    if ray.is_initialized():
        return ray
    _refuse_unreachable(options.ray_address)
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=options.ray_address, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = options.ray_address or "(found by Ray itself)"
        raise BatchspecError(f"--ray-address {where}: cannot connect to Ray: {error}") from error
    finally:
        if on_main_thread:
            signal.signal(signal.SIGTERM, handler)
    return ray


def _refuse_unreachable(address: str | None) -> None:
    """Raise BatchspecError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise BatchspecError(f"--ray-address {address}: cannot connect to Ray: {error}") from error


def _gpus_of(device: str, options: RunOptions, tensor_parallel_size: int) -> float:
    """GPUs that Ray sets aside for a worker: those of one tensor-parallel group, unless the user says otherwise."""
    if device == CPU:
        return 0
    return tensor_parallel_size if options.ray_num_gpus is None else options.ray_num_gpus


def _on_our_clock(message: FromWorker | WorkerDied, clock_offset: float) -> FromWorker | WorkerDied:
    match message:
        case Report():
            return replace(message, at=message.at + clock_offset)
        case Finished():
            return replace(message, report=replace(message.report, at=message.report.at + clock_offset))
        case _:
            return message
