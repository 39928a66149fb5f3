"""Putting an engine together from a configuration: model, tokenizer, memory, checks, probe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from batchspec.config import EngineConfig
from batchspec.engine import cpu, memory
from batchspec.engine.acceptance import CoupledRule, RejectionRule
from batchspec.engine.drafters import DraftModelDrafter, LookupThenDraftDrafter, PromptLookupDrafter
from batchspec.engine.engine import EngineParts, TorchEngine
from batchspec.engine.kv_cache import BLOCK_TOKENS, blocks_for, bytes_per_block
from batchspec.engine.load_record import Findings, LoadRecord
from batchspec.engine.meter import Meter
from batchspec.engine.model import PackedModel, load_model, stop_token_ids
from batchspec.engine.probe import probe_engine
from batchspec.engine.prompts import OutputDecoder, PromptEncoder, load_tokenizer
from batchspec.engine.sampling import Sampler
from batchspec.engine.scheduler import Scheduler
from batchspec.errors import MismatchError, UsageError
from batchspec.types import Drafter, EngineInfo, Method, StepAttribution

# Share of the memory that is free after loading which the KV cache may take where --kv-memory does not say.
_KV_SHARE_CPU = 0.3
_KV_SHARE_CUDA = 0.85

# Prompt tokens that one step takes in, beside its decode rows.
_STEP_PREFILL_TOKENS = 512


def load_torch_engine(
    config: EngineConfig, device: str, threads: int, device_share: float, attribution: StepAttribution
) -> TorchEngine:
    """Load, check and probe, unless these models passed before; the seconds go to the lines `compile` (of the CPU's
    kernels, once a machine), `load` and `warmup`. The models are local directories."""
    meter = Meter(device_share)
    torch.set_num_threads(threads)
    if device == "cpu":
        cpu.unavailable_reason()
    meter.lap("compile")
    tokenizer = load_tokenizer(Path(config.model))
    model, record = load_recorded(config, config.model, device)
    drafting = load_draft(config, tokenizer, device)
    draft = None if drafting is None else drafting[0]
    models = [model] if draft is None else [model, draft]
    meter.lap("load")
    stop_ids = stop_token_ids(model.module)
    sampler = Sampler(stop_ids)
    difference = probe_recorded(model, record, sampler)
    # a draft has a part in the text under the rejection rule alone
    if drafting is not None and config.acceptance_rule == "rejection" and difference is None:
        of_draft = probe_recorded(*drafting, sampler)
        difference = f"the draft model: {of_draft}" if of_draft else None
    if difference is not None and config.require_exact:
        raise UsageError(
            f"--require-exact: on this {device} in {model.dtype} the bits of a row depend on its batch ({difference}); "
            "use another --dtype, or drop --require-exact"
        )
    num_blocks = num_kv_blocks(models, config, device_share)
    kv = model.new_cache(num_blocks, config.max_batch)
    drafters: dict[Method, Drafter] = {Method.PROMPT_LOOKUP: PromptLookupDrafter()}
    if draft is not None:
        draft_kv = draft.new_cache(num_blocks, config.max_batch)
        drafters[Method.DRAFT_MODEL] = DraftModelDrafter(
            draft, draft_kv, sampler, stop_ids, model.vocab_size, config.acceptance_rule
        )
        drafters[Method.LOOKUP_THEN_DRAFT] = LookupThenDraftDrafter(
            drafters[Method.PROMPT_LOOKUP], drafters[Method.DRAFT_MODEL]
        )
    parts = EngineParts(
        model=model,
        kv=kv,
        scheduler=Scheduler(
            kv,
            config.max_batch,
            config.prefill_chunk_tokens,
            max(_STEP_PREFILL_TOKENS, config.prefill_chunk_tokens),
            shares_prefixes=not config.no_shared_prefixes,
        ),
        encoder=PromptEncoder(tokenizer, model.context_tokens, config.neutralize_special_tokens),
        decoder=OutputDecoder(tokenizer),
        rule=RejectionRule(sampler) if config.acceptance_rule == "rejection" else CoupledRule(sampler),
        stop_ids=stop_ids,
        drafters=drafters,
        attribution=attribution,
        meter=meter,
        info=EngineInfo(
            engine="torch",
            model=config.model,
            dtype=str(model.dtype).removeprefix("torch."),
            device=device,
            max_batch=config.max_batch,
            batch_invariant=difference is None,
            draft_model=config.draft_model,
            memory_bytes=memory_bytes(model, draft, num_blocks),
            versions=library_versions(),
            notes=(*notes(tokenizer, stop_ids, difference, device), *memory_notes(models, config, num_blocks)),
        ),
    )
    meter.lap("warmup")
    return TorchEngine(parts)


def load_recorded(config: EngineConfig, path: str, device: str) -> tuple[PackedModel, LoadRecord]:
    """A model, and what is known of it now: it is checked where it was not before."""
    record = LoadRecord(Path(path), config.dtype, device, again=config.require_exact)
    known = record.known
    model = load_model(Path(path), config.dtype, torch.device(device), None if known is None else known.refused_layers)
    if known is None:
        record.keep(Findings(model.refused_layers, batch_invariant=False))
    return model, record


def probe_recorded(model: PackedModel, record: LoadRecord, sampler: Sampler) -> str | None:
    """What makes a row of this model depend on its batch; None where nothing does, as is found now or was before."""
    if record.known is not None and record.known.batch_invariant:
        return None
    difference = probe_engine(model, sampler)
    record.keep(Findings(model.refused_layers, batch_invariant=difference is None))
    return difference


def load_draft(config: EngineConfig, tokenizer: Any, device: str) -> tuple[PackedModel, LoadRecord] | None:
    """The draft model, once its tokenizer is known to mean the same by every id."""
    if config.draft_model is None:
        return None
    path = Path(config.draft_model)
    refuse_other_token_map(tokenizer, load_tokenizer(path))
    return load_recorded(config, config.draft_model, config.draft_device or device)


def refuse_other_token_map(target: Any, draft: Any) -> None:
    """Raise MismatchError, naming the first difference, unless both tokenizers map the same tokens to the same ids.

    Maps are compared, not sizes: output layers of one tokenizer may be padded differently, and different tokenizers
    may be equal in size.
    """
    target_map, draft_map = target.get_vocab(), draft.get_vocab()
    for token, token_id in sorted(target_map.items(), key=lambda item: item[1]):
        if draft_map.get(token) != token_id:
            raise MismatchError(
                f"--draft-model: its tokenizer differs from the target's: token {token!r} has id {token_id} in the "
                f"target and {draft_map.get(token, 'none')} in the draft; use a draft with the target's own tokenizer"
            )
    surplus = sorted(draft_map.keys() - target_map.keys())
    if surplus:
        raise MismatchError(
            f"--draft-model: its tokenizer has a token that the target's lacks: {surplus[0]!r} "
            f"(id {draft_map[surplus[0]]}); use a draft with the target's own tokenizer"
        )


def num_kv_blocks(models: Sequence[PackedModel], config: EngineConfig, device_share: float) -> int:
    """Blocks of each model's KV cache: what `max_batch` full contexts need, or what memory allows if that is less.

    A draft model reads the same tokens as the target, so a block costs both models' bytes and a draft leaves room for
    fewer rows.
    """
    target = models[0]
    block_bytes = sum(bytes_per_block(model.layers, model.dtype) for model in models)
    wanted = config.max_batch * blocks_for(target.context_tokens)
    if config.kv_memory_bytes is not None:
        allowed = config.kv_memory_bytes // block_bytes
        if allowed < 2:
            raise UsageError(f"--kv-memory {config.kv_memory_bytes}: less than two blocks of {block_bytes} bytes")
    else:
        allowed = min(_blocks_on(device, models, device_share) for device in {model.device for model in models})
    return min(1 + wanted, allowed)


def _blocks_on(device: torch.device, models: Sequence[PackedModel], device_share: float) -> int:
    """Blocks that the free memory of a device holds for the models on it."""
    there = [model for model in models if model.device == device]
    block_bytes = sum(bytes_per_block(model.layers, model.dtype) for model in there)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * _KV_SHARE_CUDA * device_share) // block_bytes
    return int(memory.free_bytes() * _KV_SHARE_CPU * device_share) // block_bytes


def memory_bytes(model: PackedModel, draft: PackedModel | None, num_blocks: int) -> dict[str, int]:
    """Bytes by use. `speculative_kv_per_token` is what each proposed token of a row holds until it is judged."""
    sizes = {
        "target_weights": model.weight_bytes,
        "target_kv": num_blocks * bytes_per_block(model.layers, model.dtype),
        "speculative_kv_per_token": bytes_per_block(model.layers, model.dtype) // BLOCK_TOKENS,
    }
    if draft is not None:
        sizes["draft_weights"] = draft.weight_bytes
        sizes["draft_kv"] = num_blocks * bytes_per_block(draft.layers, draft.dtype)
        sizes["speculative_kv_per_token"] += bytes_per_block(draft.layers, draft.dtype) // BLOCK_TOKENS
    return sizes


def notes(tokenizer: Any, stop_ids: frozenset[int], difference: str | None, device: str) -> tuple[str, ...]:
    found = [] if difference is None else [f"batch_invariant is false: {difference} changed the bits of a row"]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stop_ids:
        found.append(f"the tokenizer's end token {tokenizer.eos_token!r} is not among the model's end tokens")
    if device == "cpu" and (reason := cpu.unavailable_reason()) is not None:
        found.append(f"plain torch decodes, slowly: {reason}")
    return tuple(found)


def memory_notes(models: Sequence[PackedModel], config: EngineConfig, num_blocks: int) -> list[str]:
    """Says so where the memory for K and V cannot hold `max_batch` rows of full context."""
    num_tokens = (num_blocks - 1) * BLOCK_TOKENS
    per_row = num_tokens // config.max_batch
    if per_row >= models[0].context_tokens:
        return []
    sizes = [bytes_per_block(model.layers, model.dtype) // BLOCK_TOKENS for model in models]
    of_draft = f" and {sizes[1]:,} in the draft's" if len(sizes) > 1 else ""
    return [
        f"the KV cache holds {num_tokens:,} tokens ({sizes[0]:,} bytes each in the target's{of_draft}): {per_row:,} "
        f"for each of {config.max_batch} rows. Longer rows leave room for fewer of them; raise --kv-memory for more"
    ]


def library_versions() -> dict[str, str]:
    import transformers

    from batchspec import __version__

    return {"batchspec": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
