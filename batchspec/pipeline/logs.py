"""Logging of a run: on stderr, each line with its run, worker and attempt."""

from __future__ import annotations

import logging
import sys


class _StderrHandler(logging.Handler):
    """Writes to whatever stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # not before workers are started: it takes a twentieth of a second

        tqdm.write(self.format(record), file=sys.stderr)  # which leaves a progress bar whole


def set_up_logging(who: str) -> None:
    """Send this process's log lines to stderr, marked with `who`. Prompt text is never logged."""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{who}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger("batchspec")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
