"""Workers as processes of this machine, each at the end of a pipe of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import cast

import batchspec
from batchspec.config import AUTO_PROFILE, EngineConfig, RunConfig
from batchspec.engine import memory
from batchspec.engine.model_files import stored_dtype, weight_bytes
from batchspec.errors import UsageError
from batchspec.pipeline.devices import CPU, worker_places
from batchspec.pipeline.messages import Event, FromWorker, ToWorker, WorkerDied, WorkerSpec
from batchspec.pipeline.models import model_at_hand

logger = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 1000
PACKED_DTYPES = ("bfloat16", "float32")
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection


class LocalExecutor:
    """A pipe each and never a shared queue: a killed process cannot take a lock with it."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._ahead: dict[int, _Worker] = {}

    @property
    def workers(self) -> tuple[int, ...]:
        """Those whose end has not been told yet."""
        return tuple(self._workers)

    def start_ahead(self, config: RunConfig) -> None:
        """Start the workers' processes: they import what their engine needs, which takes seconds, and get memory for
        its weights. Where a profile has to be measured first, or a model may have to be fetched (it is not in a local
        directory), they would only hold that meanwhile."""
        places, engine = worker_places(config), config.engine
        models = [] if engine.engine == "fake" else [engine.model, *filter(None, [engine.draft_model])]
        if config.routes.profile == AUTO_PROFILE or not all(map(model_at_hand, models)):
            return
        most_bytes = memory.free_bytes() // (4 * len(places))
        for number, place in enumerate(places):
            num_bytes = min(most_bytes, _weight_bytes(engine, place.device))
            self._ahead[number] = _start_process(engine.engine, place.threads, num_bytes)

    def start(self, spec: WorkerSpec) -> None:
        worker = self._ahead.pop(spec.worker, None)
        if worker is not None and (exit_code := worker.process.poll()) is not None:
            logger.warning("worker %d died before its job began (exit code %d)", spec.worker, exit_code)
            worker.connection.close()
            worker = None
        worker = worker or _start_process(spec.config.engine.engine, spec.threads)
        self._workers[spec.worker] = worker
        with contextlib.suppress(OSError):  # its death is found by `wait`
            worker.connection.send(spec)

    def send(self, worker: int, message: ToWorker) -> None:
        found = self._workers.get(worker)
        if found is not None:
            with contextlib.suppress(OSError):  # its death is found by `wait`
                found.connection.send(message)

    def wait(self, timeout: float) -> list[Event]:
        wait([worker.connection for worker in self._workers.values()], timeout)
        return [event for number in list(self._workers) for event in self._drain(number)]

    def kill(self, worker: int) -> None:
        if worker in self._workers:
            self._workers[worker].process.kill()

    def close(self) -> None:
        workers = [*self._workers.values(), *self._ahead.values()]
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.connection.close()
        self._workers.clear()
        self._ahead.clear()

    def _drain(self, number: int) -> list[Event]:
        """What a worker has said; then, when it has ended, its death."""
        worker = self._workers[number]
        events: list[Event] = []
        ended = worker.process.poll() is not None
        try:
            while len(events) < MESSAGES_AT_ONCE and worker.connection.poll(0):
                events.append(Event(number, cast(FromWorker, worker.connection.recv())))
            if not ended or len(events) == MESSAGES_AT_ONCE:
                return events
        except (EOFError, OSError):
            worker.process.kill()  # it closed its end of the pipe, so it can do nothing useful any more
        worker.connection.close()
        del self._workers[number]
        return [*events, Event(number, WorkerDied(worker.process.wait()))]


def _start_process(engine: str, threads: int, bytes_ahead: int = 0) -> _Worker:
    """A worker process that waits for its spec."""
    # -P: a file in the user's directory that is named like a module must not be taken for it
    command = [sys.executable, "-P", "-m", "batchspec.pipeline.executors.process"]
    ours, theirs = Pipe(duplex=True)
    with theirs:
        # A signal to the process group must not reach the worker before it has learned to ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        try:
            process = subprocess.Popen(
                [*command, str(os.getpid()), engine, str(bytes_ahead), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the parent's standard output is for the summary alone
                pass_fds=[theirs.fileno()],
                env=_environment(threads),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _Worker(process, ours)


def _weight_bytes(engine: EngineConfig, device: str) -> int:
    """Bytes of this machine's memory that a worker will fill with weights, as far as the model's files tell."""
    with contextlib.suppress(OSError, ValueError, UsageError):  # loading will say what is wrong with them
        path = model_at_hand(engine.model)
        if engine.engine == "torch" and device == CPU and path is not None:
            dtype = stored_dtype(path) if engine.dtype == "auto" else engine.dtype
            return weight_bytes(path) if dtype in PACKED_DTYPES else 0
    return 0


def _environment(threads: int) -> dict[str, str]:
    package_parent = str(Path(batchspec.__file__).parents[1])
    python_path = os.pathsep.join([package_parent, *filter(None, [os.environ.get("PYTHONPATH")])])
    count = str(threads)
    return {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
