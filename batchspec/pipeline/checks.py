"""Everything that is wrong with a configuration, in one message, before any file is opened."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from batchspec.config import AUTO_PROFILE, NO_PROFILE, RunConfig
from batchspec.engine import ENGINES
from batchspec.errors import UsageError
from batchspec.profile.policy import static_policy
from batchspec.types import Method

DTYPES = ("auto", "bfloat16", "float16", "float32")
ACCEPTANCE_RULES = ("coupled", "rejection")
EXECUTORS = ("local", "ray")


def check_config(config: RunConfig) -> None:
    """Raise one UsageError that lists every problem."""
    problems = [
        *config.sampling.problems(),
        *_range_problems(config),
        *_choice_problems(config),
        *_route_problems(config),
        *_profile_problems(config),
        *_rejection_problems(config),
        *_draft_problems(config),
        *_vllm_problems(config),
    ]
    if problems:
        raise UsageError("\n".join(problems))


def _range_problems(config: RunConfig) -> Iterator[str]:
    output, engine, run = config.output, config.engine, config.run
    least = {
        "--limit": (config.input.limit, 0),
        "--shard-rows": (output.shard_rows, 1),
        "--shard-bytes": (output.shard_bytes, 1),
        "--max-batch": (engine.max_batch, 1),
        "--kv-memory": (engine.kv_memory_bytes, 1),
        "--prefill-chunk-tokens": (engine.prefill_chunk_tokens, 1),
        "--fake-tokens-per-second": (engine.fake_tokens_per_second, 0),
        "--workers": (run.workers, 1),
        "--threads": (run.threads, 1),
        "--tensor-parallel-size": (engine.tensor_parallel_size, 1),
        "--price-per-hour": (run.price_per_hour, 0),
        "--grace-seconds": (run.grace_seconds, 0),
        "--max-worker-deaths": (run.max_worker_deaths, 1),
    }
    for name, (value, lowest) in least.items():
        if value is not None and not lowest <= value < math.inf:
            yield f"{name} must be at least {lowest}, got {value}"
    for name, reserved in {"--ray-num-cpus": run.ray_num_cpus, "--ray-num-gpus": run.ray_num_gpus}.items():
        if reserved is not None and not 0 < reserved < math.inf:
            yield f"{name} must be above 0, got {reserved}"
    if not run.step_timeout > 0:
        yield f"--step-timeout must be above 0, got {run.step_timeout}"
    if not 0 <= run.holdout <= 0.5:
        yield f"--holdout must be between 0 and 0.5, got {run.holdout}"
    if not 0 <= run.max_error_rate <= 1:
        yield f"--max-error-rate must be between 0 and 1, got {run.max_error_rate}"
    if not 0 <= engine.fake_acceptance <= 1:
        yield f"--fake-acceptance must be between 0 and 1, got {engine.fake_acceptance}"


def _choice_problems(config: RunConfig) -> Iterator[str]:
    choices = {
        "--engine": (config.engine.engine, ENGINES),
        "--dtype": (config.engine.dtype, DTYPES),
        "--acceptance-rule": (config.engine.acceptance_rule, ACCEPTANCE_RULES),
        "--executor": (config.run.executor, EXECUTORS),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            yield f"{name} must be one of {', '.join(known)}, got {value!r}"


def _profile_problems(config: RunConfig) -> Iterator[str]:
    routes = config.routes
    if routes.profile not in (None, NO_PROFILE) and (routes.routes_file or routes.method is not Method.TARGET_ONLY):
        given = "--routes" if routes.routes_file else "--method"
        yield f"--profile {routes.profile} routes every class itself: drop it or {given}"
    if routes.profile == AUTO_PROFILE and (config.engine.engine, config.run.executor) != ("torch", "local"):
        yield "--profile auto measures --engine torch on this machine: name a file for another engine or executor"


def _rejection_problems(config: RunConfig) -> Iterator[str]:
    if config.engine.acceptance_rule != "rejection":
        return
    if config.run.holdout:
        yield "--holdout: under --acceptance-rule rejection the text depends on the route, so none may be changed"
    if config.routes.profile == AUTO_PROFILE:
        yield "--profile auto: under --acceptance-rule rejection the text depends on the route: name a profile's file"


def _draft_problems(config: RunConfig) -> Iterator[str]:
    device = config.engine.draft_device
    if device is None:
        return
    if config.engine.draft_model is None:
        yield "--draft-device needs --draft-model"
    if device != "cpu" and re.fullmatch(r"cuda(:\d+)?", device) is None:
        yield f"--draft-device {device}: give cpu, cuda or cuda:N"


def _vllm_problems(config: RunConfig) -> Iterator[str]:
    if config.engine.engine != "vllm":
        if config.engine.vllm_arg:
            yield "--vllm-arg needs --engine vllm"
        if config.engine.tensor_parallel_size > 1 and config.engine.engine == "torch":
            yield "--tensor-parallel-size needs --engine vllm"
        return
    if config.run.holdout:
        yield "--holdout: --engine vllm decodes the rows of one route at a time, so no step can be held out"
    if not _route_problems(config):
        policy = static_policy(config.routes, config.engine.draft_model)
        if Method.LOOKUP_THEN_DRAFT in {route.method for route in (policy.default, *policy.by_class.values())}:
            yield "--engine vllm has no lookup-then-draft: use prompt-lookup or draft-model"
    for argument in config.engine.vllm_arg:
        if not argument.partition("=")[0].isidentifier() or "=" not in argument:
            yield f"--vllm-arg {argument!r} is not of the form name=value"


def _route_problems(config: RunConfig) -> list[str]:
    try:
        static_policy(config.routes, config.engine.draft_model)
    except UsageError as error:
        return str(error).splitlines()
    return []
