"""Workers as threads: the same worker function without the start of a process, for thousands of small jobs."""

import queue
import threading
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from batchspec.accounting.summary import JobSummary
from batchspec.config import RunConfig
from batchspec.pipeline import runner
from batchspec.pipeline.executors import local
from batchspec.pipeline.messages import Event, FromWorker, ToWorker, WorkerDied, WorkerSpec
from batchspec.pipeline.worker import run_worker


class ThreadLink:
    """A worker's end of its line. See Link."""

    def __init__(self, worker: int, events: "queue.SimpleQueue[Event]") -> None:
        self._worker, self._events = worker, events
        self.inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()

    def send(self, message: FromWorker) -> None:
        self._events.put(Event(self._worker, message))

    def receive(self, wait: bool) -> ToWorker | None:
        try:
            return self.inbox.get(block=wait)
        except queue.Empty:
            return None


class ThreadExecutor:
    """See Executor. Its workers cannot be killed."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._links: dict[int, ThreadLink] = {}

    def start_ahead(self, config: RunConfig) -> None:
        pass

    def start(self, spec: WorkerSpec) -> None:
        events = self._events
        link = self._links[spec.worker] = ThreadLink(spec.worker, events)

        def run() -> None:
            run_worker(spec, link)
            events.put(Event(spec.worker, WorkerDied(0)))

        threading.Thread(target=run, daemon=True).start()

    def send(self, worker: int, message: ToWorker) -> None:
        self._links[worker].inbox.put(message)

    def wait(self, timeout: float) -> list[Event]:
        try:
            return [self._events.get(timeout=timeout)]
        except queue.Empty:
            return []

    def kill(self, worker: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._links.clear()
        self._events = queue.SimpleQueue()


def workers_as_threads() -> AbstractContextManager[Any]:
    """Within it, jobs of this process run on threads."""
    return patch.object(local, "LocalExecutor", ThreadExecutor)


def generate_in_threads(config: RunConfig) -> JobSummary:
    with workers_as_threads():
        return runner.generate(config)
