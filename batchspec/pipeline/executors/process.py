"""A worker process: `python -m batchspec.pipeline.executors.process PARENT_PID ENGINE BYTES_AHEAD PIPE`, where so many
bytes of memory are made ready for weights."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import cast

from batchspec.engine import import_engine, memory
from batchspec.pipeline.collection import uncollected
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
    parent_pid, engine, bytes_ahead, pipe = sys.argv[1:]
    connection: Connection = Connection(int(pipe))
    try:
        die_with(int(parent_pid))
        spec = _import_and_receive(connection, engine, int(bytes_ahead))
        set_up_logging(f"run {spec.run_id} attempt {spec.attempt} worker {spec.worker}")
        import pyarrow as pa

        from batchspec.pipeline.worker import run_worker

        pa.set_cpu_count(max(1, spec.threads))
        run_worker(spec, ConnectionLink(connection))
    except (EOFError, ConnectionError):
        return 1
    return 0


def _import_and_receive(connection: Connection, engine: str, bytes_ahead: int) -> WorkerSpec:
    """Import what takes seconds, and take the spec meanwhile: the parent may still be at its checks, or wait to be rid
    of a long one. Raises EOFError where the parent is gone."""
    pickled: list[bytes] = []

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            pickled.append(connection.recv_bytes())

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    memory.take_ahead(bytes_ahead)
    # what fails here fails again where the worker loads its engine, and is reported there
    with uncollected(), contextlib.suppress(Exception):
        import batchspec.pipeline.worker  # noqa: F401

        import_engine(engine)
    receiving.join()
    if not pickled:
        raise EOFError
    return cast(WorkerSpec, pickle.loads(pickled[0]))


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent (Linux); elsewhere the end of the pipe tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise EOFError


if __name__ == "__main__":
    sys.exit(main())
