"""Where workers run. An executor's library is imported when that executor is asked for."""

from __future__ import annotations

from batchspec.config import RunOptions
from batchspec.pipeline.messages import Executor


def new_executor(options: RunOptions) -> Executor:
    if options.executor == "ray":
        from batchspec.pipeline.executors.ray import RayExecutor

        return RayExecutor(options)
    from batchspec.pipeline.executors.local import LocalExecutor

    return LocalExecutor()
