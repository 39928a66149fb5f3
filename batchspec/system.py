"""What is asked of the operating system in more than one place."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: several processes may write it at once. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
