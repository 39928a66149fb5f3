"""SIGINT and SIGTERM: the first asks the run to stop in good order, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from batchspec.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Holds the signal handlers within a `with` block.

    While `graceful` is set a first signal only sets `received`; at any other time it raises Interrupted there and then.
    """

    def __init__(self) -> None:
        self.graceful = False
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def interrupted(self, number: int) -> Interrupted:
        name = signal.Signals(number).name
        return Interrupted(number, f"stopped by {name}; what is finished is kept, the same command goes on from there")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        self.received = self.received or number
        if not (first and self.graceful):
            raise self.interrupted(number)
