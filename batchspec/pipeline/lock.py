"""One run per output: a lock file with a heartbeat; the lock of a run that is gone is taken over."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from batchspec.errors import BatchspecError, OutputLocked
from batchspec.io.store import Store, storage_faults

logger = logging.getLogger(__name__)

LOCK_NAME = "_batchspec/lock"
HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 30.0


class OutputLock:
    """Held within a `with` block. `check()` raises once another run has taken it over."""

    def __init__(self, store: Store, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._store = store
        self._heartbeat_seconds = heartbeat_seconds
        self._owner = uuid.uuid4().hex
        self._written = b""
        self._lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> OutputLock:
        with storage_faults(self._store):
            self._acquire()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._released.set()
        self._thread.join()
        if not self._lost:
            with storage_faults(self._store):
                self._store.remove(LOCK_NAME)

    def check(self) -> None:
        """Raise OutputLocked where this run no longer owns the output (it was taken for dead)."""
        if self._lost:
            raise OutputLocked(f"{self._store.root}: another run took the output over; this one stops")

    def _acquire(self) -> None:
        mine = self._content()

        def write(file: BinaryIO) -> None:
            file.write(mine)

        if not self._store.create(LOCK_NAME, write):
            found = read_lock(self._store)
            if found is not None and not found.stale:
                raise OutputLocked(
                    f"{self._store.root} is in use by {found.who}, heard of {found.age_seconds:.0f} s ago"
                )
            if found is not None:
                logger.info("taking over the lock of %s, which is gone", found.who)
            taken = (
                self._store.create(LOCK_NAME, write)
                if found is None
                else self._store.replace_if(LOCK_NAME, found.content, mine)
            )
            if not taken:
                raise OutputLocked(f"{self._store.root}: another run was faster to take the output over")
        self._written = mine

    def _beat(self) -> None:
        while not self._released.wait(self._heartbeat_seconds):
            fresh = self._content()
            try:
                if not self._store.replace_if(LOCK_NAME, self._written, fresh):
                    self._lost = True
                    return
                self._written = fresh
            except (OSError, BatchspecError) as error:
                logger.warning("cannot refresh the lock: %s", error)

    def _content(self) -> bytes:
        values = {"owner": self._owner, "pid": os.getpid(), "heartbeat_at": time.time(), **_machine()}
        values["process_started"] = _process_started(os.getpid())
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


class FoundLock:
    """A lock as somebody else reads it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            self._values: dict[str, Any] = json.loads(content)
        except ValueError:
            self._values = {}

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - float(self._values.get("heartbeat_at", 0.0)))

    @property
    def who(self) -> str:
        return f"process {self._values.get('pid')} on {self._values.get('host')}"

    @property
    def stale(self) -> bool:
        """The owner is gone: its process, where that can be seen from here; else its heartbeat has stopped."""
        machine = _machine()
        if all(self._values.get(name) == value and value for name, value in machine.items()):
            pid = int(self._values["pid"])
            return _process_started(pid) != self._values.get("process_started")
        return self.age_seconds > STALE_SECONDS


def read_lock(store: Store) -> FoundLock | None:
    try:
        return FoundLock(store.read(LOCK_NAME))
    except FileNotFoundError:
        return None


def _machine() -> dict[str, str]:
    """Where process numbers mean the same: host name, boot, and process namespace (empty where not known)."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot_id = namespace = ""
    return {"host": socket.gethostname(), "boot_id": boot_id, "pid_namespace": namespace}


def _process_started(pid: int) -> str | None:
    """The start time of a process in the kernel's ticks, so that a reused number is not mistaken; None: no such one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]
