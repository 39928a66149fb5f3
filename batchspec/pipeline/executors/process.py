"""The entry of a worker process: `python -m batchspec.pipeline.executors.process FILE_DESCRIPTOR PARENT_PID ENGINE
BYTES`, where BYTES is the memory that its weights will take."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import cast

from batchspec.engine import import_engine, pages
from batchspec.pipeline.logs import set_up_logging
from batchspec.pipeline.messages import FromWorker, ToWorker, WorkerSpec

PR_SET_PDEATHSIG = 1


class ConnectionLink:
    """A worker's end of its pipe. See Link."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: FromWorker) -> None:
        with self._sending:
            self._connection.send(message)

    def receive(self, wait: bool) -> ToWorker | None:
        if wait or self._connection.poll(0):
            return cast(ToWorker, self._connection.recv())
        return None


def main() -> int:
    """Serve one parent; end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    faulthandler.enable()
    gc.disable()  # until the engine is loaded: the worker turns it on
    connection: Connection = Connection(int(sys.argv[1]))
    try:
        die_with(int(sys.argv[2]))
        pages.take_ahead(int(sys.argv[4]))
        # Heavy imports come after the line to the parent stands, and before the spec: the parent may be at its checks.
        import pyarrow as pa

        from batchspec.pipeline.worker import run_worker

        import_engine(sys.argv[3])
        spec = cast(WorkerSpec, connection.recv())
        set_up_logging(f"run {spec.run_id} attempt {spec.attempt} worker {spec.worker}")
        pa.set_cpu_count(max(1, spec.threads))
        run_worker(spec, ConnectionLink(connection))
    except (EOFError, ConnectionError):
        return 1
    return 0


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent (Linux); elsewhere the end of the pipe tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise EOFError


if __name__ == "__main__":
    sys.exit(main())
