"""Where workers run. An executor's library is imported when that executor is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchspec.config import RunOptions
from batchspec.pipeline.messages import Executor


@contextmanager
def open_executor(options: RunOptions) -> Iterator[Executor]:
    """The executor that the options name. What it still runs when the context ends is killed."""
    executor = _new_executor(options)
    try:
        yield executor
    finally:
        executor.close()


def _new_executor(options: RunOptions) -> Executor:
    if options.executor == "ray":
        from batchspec.pipeline.executors.ray import RayExecutor

        return RayExecutor(options)
    from batchspec.pipeline.executors.local import LocalExecutor

    return LocalExecutor()
