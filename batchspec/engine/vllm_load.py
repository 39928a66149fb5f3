"""Loading vLLM for the rows of one route."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchspec.config import EngineConfig
from batchspec.engine import memory
from batchspec.engine.load import refuse_other_token_map
from batchspec.engine.meter import Meter
from batchspec.engine.prompts import OutputDecoder, PromptEncoder, load_tokenizer
from batchspec.engine.versions import vllm_version
from batchspec.engine.vllm import VllmEngine
from batchspec.errors import UsageError
from batchspec.types import EngineInfo, Method, Route, StepAttribution

_KV_SHARE_CPU = 0.3

# Share of a GPU that vLLM takes by itself.
_GPU_SHARE = 0.92
_MAX_LOOKUP_MATCH = 3


def load_vllm_engine(
    config: EngineConfig,
    route: Route,
    device: str,
    device_share: float,
    attribution: StepAttribution,
) -> VllmEngine:
    """Load vLLM for the rows of `route`; its seconds go to the line `load`."""
    meter = Meter(device_share)
    batch_invariant = True if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else None
    if config.require_exact and not batch_invariant:
        raise UsageError("--require-exact: vLLM's results depend on the batch unless VLLM_BATCH_INVARIANT=1 is set")
    tokenizer = load_tokenizer(Path(config.model))
    if config.draft_model is not None and route.method is Method.DRAFT_MODEL and _has_tokenizer(config.draft_model):
        refuse_other_token_map(tokenizer, load_tokenizer(Path(config.draft_model)))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # An engine core in a process of its own would outlive a killed worker and keep the memory its successor needs.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options = llm_options(config, route, device, device_share)
    if device.startswith("cuda:"):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(int(device[5:]), config.tensor_parallel_size)
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # as many threads as OMP_NUM_THREADS says
    from vllm import LLM

    try:
        llm = LLM(config.model, **options)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--engine vllm cannot load {config.model}: {error}") from error
    meter.lap("load")
    info = EngineInfo(
        engine="vllm",
        model=config.model,
        dtype=str(llm.model_config.dtype).removeprefix("torch."),
        device=device,
        max_batch=config.max_batch,
        batch_invariant=batch_invariant,
        draft_model=config.draft_model if route.method is Method.DRAFT_MODEL else None,
        versions={"vllm": vllm_version()},
        notes=(f"serves {route.method.value}, {route.num_speculative_tokens} speculative tokens",),
    )
    encoder = PromptEncoder(tokenizer, llm.model_config.max_model_len, config.neutralize_special_tokens)
    return VllmEngine(llm, route, encoder, OutputDecoder(tokenizer), attribution, meter, info)


def llm_options(config: EngineConfig, route: Route, device: str, device_share: float) -> dict[str, Any]:
    """The keyword arguments of vLLM's LLM; `--vllm-arg` has the last word."""
    options: dict[str, Any] = {
        "dtype": config.dtype,
        "max_num_seqs": config.max_batch,
        "tensor_parallel_size": config.tensor_parallel_size,
        "disable_log_stats": False,
    }
    if config.kv_memory_bytes is not None:
        options["kv_cache_memory_bytes"] = config.kv_memory_bytes
    elif device == "cpu":
        options["kv_cache_memory_bytes"] = int(memory.free_bytes() * _KV_SHARE_CPU * device_share)
    elif device_share < 1:  # the rest of the GPU is another worker's
        options["gpu_memory_utilization"] = _GPU_SHARE * device_share
    if route.method is not Method.TARGET_ONLY:
        options["speculative_config"] = speculative_config(config, route)
        options["per_request_spec_decode_metrics"] = "detailed"
    return options | parse_vllm_args(config.vllm_arg)


def visible_devices(first: int, count: int) -> str:
    """`CUDA_VISIBLE_DEVICES` for a group of GPUs, of those that this process may see: vLLM takes all that it sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return ",".join(str(first + i) for i in range(count))
    return ",".join(seen.split(",")[first : first + count])


def speculative_config(config: EngineConfig, route: Route) -> dict[str, Any]:
    """vLLM's `speculative_config`. It finds out itself whether a drafter's directory holds a model or an EAGLE head."""
    k = route.num_speculative_tokens
    if route.method is Method.PROMPT_LOOKUP:
        longest = max(route.min_match_tokens, _MAX_LOOKUP_MATCH)
        lookup = {"prompt_lookup_min": route.min_match_tokens, "prompt_lookup_max": longest}
        return {"method": "ngram", "num_speculative_tokens": k, **lookup}
    if route.method is Method.DRAFT_MODEL:
        return {"model": config.draft_model, "num_speculative_tokens": k}
    raise UsageError(f"--engine vllm has no {route.method.option_name}: use prompt-lookup or draft-model")


def parse_vllm_args(arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs; a value that is JSON is taken as such, anything else is text."""
    options: dict[str, Any] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _has_tokenizer(path: str) -> bool:
    return (Path(path) / "tokenizer.json").is_file() or (Path(path) / "tokenizer_config.json").is_file()
