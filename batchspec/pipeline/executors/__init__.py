"""Where workers run. An executor's library is imported when that executor is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchspec.config import RunConfig, RunOptions
from batchspec.pipeline.messages import Executor


def new_executor(options: RunOptions) -> Executor:
    if options.executor == "ray":
        from batchspec.pipeline.executors.ray import RayExecutor

        return RayExecutor(options)
    from batchspec.pipeline.executors.local import LocalExecutor

    return LocalExecutor()


@contextmanager
def executor_ahead(config: RunConfig) -> Iterator[Executor | None]:
    """An executor whose workers start while the job is still being checked; None where only the job itself can start
    them (Ray has no places before it is connected). What runs when the context ends is killed."""
    if config.run.executor != "local":
        yield None
        return
    from batchspec.pipeline.executors.local import LocalExecutor

    executor = LocalExecutor()
    try:
        executor.start_ahead(config)
        yield executor
    finally:
        executor.close()
