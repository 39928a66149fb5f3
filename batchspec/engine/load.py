"""Putting an engine together from a configuration: model, tokenizer, memory, checks, probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from batchspec.config import DEMO_MODEL, EngineConfig
from batchspec.engine import checks
from batchspec.engine.drafters import PromptLookupDrafter
from batchspec.engine.engine import EngineParts, TorchEngine
from batchspec.engine.kv_cache import blocks_for, bytes_per_block
from batchspec.engine.meter import Meter
from batchspec.engine.model import PackedModel, load_model, stop_token_ids
from batchspec.engine.prompts import OutputDecoder, PromptEncoder
from batchspec.engine.sampling import Sampler
from batchspec.engine.scheduler import Scheduler
from batchspec.errors import UsageError
from batchspec.types import EngineInfo, Method, StepAttribution

# Share of the memory that is free after loading which the KV cache may take where --kv-memory does not say.
_KV_SHARE_CPU = 0.3
_KV_SHARE_CUDA = 0.85

# Prompt tokens that one step takes in, beside its decode rows, in chunks.
_STEP_PREFILL_CHUNKS = 2


def load_torch_engine(
    config: EngineConfig, device: str, threads: int, device_share: float, attribution: StepAttribution
) -> TorchEngine:
    """Load, check and probe; the seconds go to the lines `load` and `warmup`."""
    meter = Meter(device_share)
    torch.set_num_threads(threads)
    torch_device = torch.device(device)
    path = resolve_model(config.model)
    tokenizer = load_tokenizer(path)
    model = load_model(path, config.dtype, torch_device)
    meter.lap("load")
    difference = checks.probe_batch_invariance(model)
    if difference is not None and config.require_exact:
        raise UsageError(
            f"--require-exact: on this {device} in {model.dtype} the bits of a row depend on its batch ({difference}); "
            "use --dtype float32, or drop --require-exact"
        )
    num_blocks = num_kv_blocks(model, config, device_share)
    kv = model.new_cache(num_blocks, config.max_batch)
    stop_ids = stop_token_ids(model.module)
    notes = [] if difference is None else [f"batch_invariant is false: {difference} changed the bits of a row"]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stop_ids:
        notes.append(f"the tokenizer's end token {tokenizer.eos_token!r} is not among the model's end tokens")
    info = EngineInfo(
        engine="torch",
        model=config.model,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        max_batch=config.max_batch,
        batch_invariant=difference is None,
        memory_bytes={
            "target_weights": model.weight_bytes,
            "target_kv": num_blocks * bytes_per_block(model.layers, model.dtype),
        },
        versions=library_versions(),
        notes=tuple(notes),
    )
    parts = EngineParts(
        model=model,
        kv=kv,
        scheduler=Scheduler(
            kv, config.max_batch, config.prefill_chunk_tokens, _STEP_PREFILL_CHUNKS * config.prefill_chunk_tokens
        ),
        encoder=PromptEncoder(tokenizer, model.context_tokens, config.neutralize_special_tokens),
        decoder=OutputDecoder(tokenizer),
        sampler=Sampler(stop_ids, torch_device),
        stop_ids=stop_ids,
        drafters={Method.PROMPT_LOOKUP: PromptLookupDrafter()},
        attribution=attribution,
        meter=meter,
        info=info,
    )
    meter.lap("warmup")
    return TorchEngine(parts)


def resolve_model(model: str) -> Path:
    """A local directory, the demo model, or a hub name (a local path wins)."""
    path = Path(model)
    if path.is_dir():
        return path
    if model == DEMO_MODEL:
        from batchspec.engine.demo_model import demo_model_dir

        return demo_model_dir()
    return Path(model.removeprefix("hf://"))


def load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path}: no tokenizer that transformers can read: {error}") from None


def num_kv_blocks(model: PackedModel, config: EngineConfig, device_share: float) -> int:
    """Blocks of the KV cache: what `max_batch` full contexts need, or what memory allows, whichever is less."""
    block_bytes = bytes_per_block(model.layers, model.dtype)
    wanted = config.max_batch * blocks_for(model.context_tokens)
    if config.kv_memory_bytes is not None:
        allowed = config.kv_memory_bytes // block_bytes
        if allowed < 2:
            raise UsageError(f"--kv-memory {config.kv_memory_bytes}: less than two blocks of {block_bytes} bytes")
    elif model.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(model.device)
        allowed = int(free_bytes * _KV_SHARE_CUDA) // block_bytes
    else:
        allowed = int(free_memory_bytes() * _KV_SHARE_CPU * device_share) // block_bytes
    return 1 + min(wanted, allowed)


def free_memory_bytes() -> int:
    """Memory that this machine could hand out now (Linux: MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * 2**30


def library_versions() -> dict[str, str]:
    import transformers

    from batchspec import __version__

    return {"batchspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
