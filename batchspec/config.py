"""The configuration of a run: frozen, composed, every default written here once; the CLI reads them from here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from batchspec.errors import UsageError
from batchspec.types import Method, SamplingParams

DEMO_MODEL = "demo"
DEMO_MAX_ROWS = 1000
NO_PROFILE = "none"
AUTO_PROFILE = "auto"
MAX_SPECULATIVE_TOKENS = 16
MAX_MATCH_TOKENS = 8


def cache_dir() -> Path:
    """Where this user's fetched and measured things are kept; it may not exist yet.

    $BATCHSPEC_CACHE, else $XDG_CACHE_HOME/batchspec, else ~/.cache/batchspec. Raises UsageError where the user has
    no home directory either.
    """
    if own := os.environ.get("BATCHSPEC_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "batchspec"
    try:
        return Path.home() / ".cache" / "batchspec"
    except RuntimeError as error:
        raise UsageError("no home directory to keep a cache in: set BATCHSPEC_CACHE to a directory") from error


@dataclass(frozen=True)
class InputConfig:
    """What to read and what its columns are called. `prompt` or `messages` must exist, the rest may."""

    inputs: tuple[str, ...] = ()
    prompt_column: str = "prompt"
    messages_column: str = "messages"
    request_id_column: str = "request_id"
    request_class_column: str = "request_class"
    limit: int | None = None


@dataclass(frozen=True)
class OutputConfig:
    output: str | None = None
    output_prefix: str = ""
    overwrite: bool = False
    summary_file: str | None = None
    shard_rows: int = 2000
    shard_bytes: int = 64 * 2**20


@dataclass(frozen=True)
class EngineConfig:
    """What a worker loads and how large it may grow. `kv_memory_bytes` None: sized for `max_batch` at start."""

    engine: str = "torch"
    model: str = DEMO_MODEL
    draft_model: str | None = None
    draft_device: str | None = None
    dtype: str = "auto"
    max_batch: int = 32
    kv_memory_bytes: int | None = None
    prefill_chunk_tokens: int = 64
    no_shared_prefixes: bool = False
    acceptance_rule: str = "coupled"
    require_exact: bool = False
    neutralize_special_tokens: bool = False
    tensor_parallel_size: int = 1
    vllm_arg: tuple[str, ...] = ()
    fake_tokens_per_second: float = 0.0
    fake_acceptance: float = 0.7


@dataclass(frozen=True)
class RouteConfig:
    """The route of rows that nothing else says more about; `routes_file` maps classes to routes (TOML), and a
    `profile` routes by measurement instead: a file, `auto` (measured for this job), `none`, or None (one from the
    cache where nothing else is said)."""

    method: Method = Method.TARGET_ONLY
    num_speculative_tokens: int = 4
    min_match_tokens: int = 2
    routes_file: str | None = None
    profile: str | None = None
    accept_stale_profile: bool = False


@dataclass(frozen=True)
class RunOptions:
    """Operational settings: they may change between attempts of one job.

    `ray_num_cpus` and `ray_num_gpus` are what Ray sets aside for each worker (GPUs None: one tensor-parallel group).
    `grace_seconds` is what a signal leaves for the rows in flight. A worker whose step takes longer than
    `step_timeout` seconds is taken for hung. `max_worker_deaths` ends the job; deaths that were traced to a row and
    answered by an error row do not count.
    """

    executor: str = "local"
    workers: int = 1
    devices: tuple[str, ...] = ("auto",)
    threads: int | None = None
    ray_address: str | None = None
    ray_num_cpus: float = 1.0
    ray_num_gpus: float | None = None
    price_per_hour: float | None = None
    max_error_rate: float = 0.0
    holdout: float = 0.0
    retry_errors: bool = False
    allow_version_change: bool = False
    grace_seconds: float = 10.0
    step_timeout: float = 600.0
    max_worker_deaths: int = 8


@dataclass(frozen=True)
class RunConfig:
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    routes: RouteConfig = field(default_factory=RouteConfig)
    run: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True)
class ProfileOptions:
    """How to measure, beside what a run's own options say. `methods` are comma-separated, empty for all that are
    possible; `trace` is a file for one step of `trace_cell`. `job_rows`: stop where a job of so many rows is too short
    to repay measuring."""

    budget: float = 120.0
    sample_rows: int = 96
    methods: str = ""
    max_depth: int = 8
    least_matches: str = "1,2"
    if_stale: bool = False
    job_rows: int | None = None
    trace: str | None = None
    trace_cell: str = "prompt-lookup:4:8"
