"""Jobs on the fake engine, in the test's own process or as a command."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from batchspec.config import EngineConfig, InputConfig, OutputConfig, RunConfig, RunOptions
from batchspec.io.results import load_results

WritePrompts = Callable[..., Path]
ANSWER_COLUMNS = ["row_index", "output_text", "output_token_ids", "finish_reason", "input_tokens", "error_type"]


def fake_config(path: Path, output: Path | None = None, *, shard_rows: int = 2000, **options: Any) -> RunConfig:
    """A job on the fake engine; `options` are of RunOptions."""
    return RunConfig(
        input=InputConfig(inputs=(str(path),)),
        output=OutputConfig(output=None if output is None else str(output), shard_rows=shard_rows),
        engine=EngineConfig(engine="fake", max_batch=8),
        run=RunOptions(**options),
    )


def with_parts(config: RunConfig, **parts: Mapping[str, Any]) -> RunConfig:
    """The same configuration with some fields of its parts changed: `sampling={"seed": 1}`."""
    changed = {name: replace(getattr(config, name), **values) for name, values in parts.items()}
    return replace(config, **changed)


def run_cli(
    *arguments: str | Path, cwd: Path | None = None, timeout_seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m batchspec` to its end."""
    command = [sys.executable, "-m", "batchspec", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}, timeout=timeout_seconds
    )


def summary_of(stdout: str) -> dict[str, Any]:
    """The last line on standard output."""
    return json.loads(stdout.splitlines()[-1])


def answers(output: Path) -> list[dict[str, Any]]:
    """The reproducible columns of a finished output."""
    return load_results(str(output), ANSWER_COLUMNS).to_pylist()


def start_cli(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start `python -m batchspec` as the leader of a process group of its own."""
    command = [sys.executable, "-m", "batchspec", *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def worker_pids(parent: int) -> list[int]:
    """The worker processes of a run, oldest first."""
    try:
        children = psutil.Process(parent).children()
        return [child.pid for child in children if "batchspec.pipeline.executors.process" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What `condition` returns, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.01)
    return found


def journaled_rows(output: Path) -> int:
    """Lines in the journals of an output, torn ones too."""
    total = 0
    for path in output.glob("_batchspec/journal/*"):
        with contextlib.suppress(FileNotFoundError):  # its shard was committed meanwhile
            total += path.read_bytes().count(b"\n")
    return total


def finished_rows(output: Path) -> int:
    """Rows of the output that are in parts or journals at this moment."""
    parts = 0
    for path in output.glob("part-*.parquet"):
        parts += pq.read_metadata(path).num_rows
    return parts + journaled_rows(output)
