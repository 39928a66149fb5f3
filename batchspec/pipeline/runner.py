"""What `batchspec generate` does. Light to import: the workers start before anything else does."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from batchspec.config import RunConfig
from batchspec.pipeline.checks import check_config
from batchspec.pipeline.executors import open_executor
from batchspec.pipeline.interrupts import Interrupts
from batchspec.pipeline.logs import set_up_logging

if TYPE_CHECKING:
    from batchspec.accounting.summary import JobSummary


def generate(config: RunConfig, started_at: float | None = None) -> JobSummary:
    """Answer every row of the input; the summary. `started_at` (monotonic) is when metering begins, by default now.

    Error rows are rows: how many are too many is for the caller to judge, with `refuse_too_many_errors`.
    Raises a BatchspecError for everything else that goes wrong.
    """
    started_at = time.monotonic() if started_at is None else started_at
    set_up_logging(f"run - attempt - parent {os.getpid()}")
    check_config(config)
    with Interrupts() as interrupts, open_executor(config.run) as executor:
        executor.start_ahead(config)
        # imports Arrow and more, while the workers import their libraries
        from batchspec.pipeline.job import run_job

        return run_job(config, started_at, executor, interrupts)
