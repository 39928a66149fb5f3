"""`--profile auto`: measure once for the job at hand, in a process of its own, where the job repays it."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from batchspec.config import NO_PROFILE, ProfileOptions, RunConfig
from batchspec.errors import UsageError
from batchspec.io.store import Store
from batchspec.pipeline.executors.process import die_with
from batchspec.pipeline.logs import set_up_logging
from batchspec.pipeline.measuring import make_profile
from batchspec.pipeline.profiling import cached_profile_path, read_profile_copy, run_fingerprint, target_only
from batchspec.profile.scope import NotWorthMeasuring
from batchspec.profile.store import fingerprint_differences, save_profile

logger = logging.getLogger(__name__)

# A sample has at least so many rows, and the job this many times as many.
_LEAST_SAMPLE_ROWS = 12
_REPAYS = 20

# What the measuring process ends with where it found the job too short.
_NOT_WORTH = 75


def auto_profile(config: RunConfig, store: Store, num_rows: int) -> RunConfig:
    """The configuration of a job with `--profile auto`: with the profile that an earlier attempt left in the output,
    else with one that is measured now if the `num_rows` that are left repay it, else target-only."""
    fingerprint = run_fingerprint(config)
    try:
        path = cached_profile_path(fingerprint)
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, UsageError) as error:
        logger.warning("no place to keep a profile, so none is measured: target-only: %s", error)
        return replace(config, routes=target_only(config))
    followed = replace(config, routes=replace(config.routes, profile=str(path)))
    kept = read_profile_copy(store)
    if kept is not None and not fingerprint_differences(kept, fingerprint):
        save_profile(kept, path)
        logger.info("routes: by the profile that this job measured before")
        return followed
    sample_rows = min(ProfileOptions().sample_rows, num_rows // _REPAYS)
    if sample_rows < _LEAST_SAMPLE_ROWS:
        logger.info("%d rows are too few to repay measuring a profile: target-only", num_rows)
        return replace(config, routes=target_only(config))
    logger.info("--profile auto: measuring on %d rows", sample_rows)
    code = _in_own_process(config, path, ProfileOptions(sample_rows=sample_rows, job_rows=num_rows))
    if code == 0:
        return followed
    if code == _NOT_WORTH:
        logger.info("the job is too short to repay measuring a profile: target-only")
    else:
        logger.warning("measuring a profile failed (exit code %d): target-only", code)
    return replace(config, routes=target_only(config))


def _in_own_process(config: RunConfig, path: Path, options: ProfileOptions) -> int:
    """Measure in a process that gives its memory back, and that ends with this one; its exit code."""
    process = subprocess.Popen([sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE)
    try:
        process.communicate(pickle.dumps((config, path, options, os.getpid())))
        return process.returncode
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """Measure what standard input says; signals are for the parent to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config, path, options, parent_pid = pickle.loads(sys.stdin.buffer.read())
    die_with(parent_pid)
    set_up_logging("profile")
    config = replace(config, routes=replace(config.routes, profile=NO_PROFILE))
    try:
        make_profile(config, path, options, logger.info)
    except NotWorthMeasuring:
        return _NOT_WORTH
    return 0


if __name__ == "__main__":
    sys.exit(main())
