"""What runs on a node of a Ray cluster: an actor that starts one worker process and passes its messages on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

from batchspec.pipeline.executors.local import LocalExecutor
from batchspec.pipeline.logs import set_up_logging
from batchspec.pipeline.messages import Assign, Committed, FromWorker, ToWorker, WorkerDied, WorkerSpec

logger = logging.getLogger(__name__)

Passed = list[FromWorker | WorkerDied]


class Relay:
    """The actor: runs one worker on its node. Its methods are called by RayExecutor alone."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._executor = LocalExecutor()
        self._passed: Passed = []
        self._news = asyncio.Event()
        self._committed: dict[int, asyncio.Event] = {}

    def __repr__(self) -> str:
        """What Ray's dashboard and logs call this actor."""
        return self._title

    async def clock(self) -> float:
        """This machine's monotonic clock, once the actor has a place."""
        return time.monotonic()

    async def start(self, spec: WorkerSpec) -> Passed:
        set_up_logging(f"run {spec.run_id} attempt {spec.attempt} worker {spec.worker}")
        self._executor.start(spec)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        return []

    async def messages(self) -> Passed:
        """What the worker has said since the last call; waits until there is something."""
        await self._news.wait()
        self._news.clear()
        passed, self._passed = self._passed, []
        return passed

    async def send(self, message: ToWorker) -> None:
        for worker in self._executor.workers:
            self._executor.send(worker, message)

    async def shard(self, message: Assign) -> None:
        """Hand a shard on and return when it is committed: a task of that name in Ray's dashboard meanwhile."""
        committed = self._committed[message.shard.index] = asyncio.Event()
        await self.send(message)
        await committed.wait()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._executor.workers:
            events = self._executor.wait(timeout=1.0)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the actor ends
                loop.call_soon_threadsafe(self._pass_on, [event.message for event in events])

    def _pass_on(self, messages: Passed) -> None:
        for message in messages:
            if isinstance(message, Committed):
                logger.info("shard %d committed", message.shard)
                self._committed.pop(message.shard, asyncio.Event()).set()
        self._passed += messages
        if messages:
            self._news.set()
