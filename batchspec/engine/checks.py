"""What a model must pass before a row is decoded with it: supported parts, and a packed forward that agrees with the
model's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from batchspec.engine import attention, cpu
from batchspec.engine.kv_cache import KVCache, LayerShape, blocks_for
from batchspec.engine.packed import Segment, forward_packed, pack
from batchspec.engine.plain import ZeroLinears, plain_products
from batchspec.errors import UnsupportedModelError

_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

# Largest relative error (L2 over the logits) between the packed and the plain forward that rounding explains.
_CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def refuse_unsupported_config(config: Any) -> None:
    """Raise UnsupportedModelError for what the configuration already tells."""
    text_config = config.get_text_config()
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model")
    other_layers = set(getattr(text_config, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    if other_layers:
        reasons.append(f"its layers include {', '.join(sorted(other_layers))}, not only full or sliding attention")
    if getattr(text_config, "num_kv_shared_layers", 0):
        reasons.append("its layers share keys and values with each other")
    batch_dependent = _rope_types(getattr(text_config, "rope_parameters", None)) & _BATCH_DEPENDENT_ROPE
    if batch_dependent:
        reasons.append(
            f"its rotary embedding ({', '.join(sorted(batch_dependent))}) depends on the longest position in the batch"
        )
    if reasons:
        raise UnsupportedModelError(
            f"model type {config.model_type} is not supported: {'; '.join(reasons)}. "
            "Rows could not be answered exactly, or would influence each other"
        )


def _rope_types(parameters: Any) -> set[str]:
    """The rope types in `rope_parameters`, which some models nest by layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    found = set().union(*map(_rope_types, nested)) if nested else set()
    if isinstance(parameters.get("rope_type"), str):
        found.add(parameters["rope_type"])
    return found


@contextmanager
def _attention_implementation(module: Any, name: str) -> Iterator[None]:
    before = module.config._attn_implementation
    module.set_attn_implementation(name)
    if module.config._attn_implementation != name:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not let its attention be replaced (no transformers AttentionInterface)"
        )
    try:
        yield
    finally:
        module.set_attn_implementation(before)


@torch.inference_mode()
def record_layers(module: Any) -> tuple[LayerShape, ...]:
    """K and V shapes of every layer, as they reach the attention function in a two-token forward."""
    seen: dict[int, tuple[LayerShape, int | None]] = {}

    def record(
        layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **keywords: Any
    ) -> tuple[torch.Tensor, None]:
        known = {name: keywords.pop(name, None) for name in ("scaling", "dropout", "sliding_window", "softcap")}
        is_causal = keywords.pop("is_causal", True)
        attention.refuse_unknown_keywords(layer, mask, known["dropout"] or 0.0, is_causal, keywords)
        seen[layer.layer_idx] = (LayerShape(key.shape[1], key.shape[3], value.shape[3]), known["sliding_window"])
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("batchspec_record", record)
    with _attention_implementation(module, "batchspec_record"), plain_products(module), ZeroLinears():
        module(input_ids=torch.zeros(1, 2, dtype=torch.long, device=module.device), use_cache=False)

    config = module.config.get_text_config()
    if sorted(seen) != list(range(config.num_hidden_layers)):
        raise UnsupportedModelError(
            f"{type(module).__name__}: {len(seen)} of {config.num_hidden_layers} layers reach the attention function"
        )
    for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type == "sliding_attention" and seen[index][1] is None:
            raise UnsupportedModelError(
                f"{type(module).__name__}: the sliding window of layer {index} does not reach the attention function"
            )
    return tuple(seen[index][0] for index in sorted(seen))


def prepare(module: Any, refused_layers: Collection[str]) -> tuple[LayerShape, ...]:
    """Make a model serve packed forwards of which `prepare_and_check` has found before which layers it refuses."""
    layers = record_layers(module)
    module.set_attn_implementation(attention.ATTENTION_NAME)
    cpu.prepare_model(module, layers, refused_layers)
    return layers


def prepare_and_check(module: Any) -> tuple[tuple[LayerShape, ...], tuple[str, ...]]:
    """Make a model serve packed forwards, and compare a packed two-row prefill + decode with its own plain forward.

    The shapes of its layers, and the names of those that keep their code because the fused form answers otherwise.
    Raises UnsupportedModelError where packed and plain disagree by more than rounding.
    """
    layers = record_layers(module)
    vocab_size = module.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (9, 14)]
    with torch.inference_mode(), plain_products(module):
        plain = [module(torch.tensor([row], device=module.device), use_cache=False).logits[0].float() for row in rows]
    module.set_attn_implementation(attention.ATTENTION_NAME)
    refused = cpu.prepare_model(module, layers)
    packed = _packed_logits(module, layers, rows)
    for expected, got in zip(plain, packed, strict=True):
        error = float((expected - got).norm() / expected.norm().clamp_min(1e-6))
        if not error <= _CHECK_TOLERANCE[module.dtype]:
            raise UnsupportedModelError(
                f"{type(module).__name__}: a packed forward differs from the model's own by {error:.2g} (relative), "
                f"more than {module.dtype} rounding explains; it does something that this engine does not reproduce"
            )
    return layers, refused


@torch.inference_mode()
def _packed_logits(module: Any, layers: tuple[LayerShape, ...], rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every position of `rows`: all but the last three tokens as one prefill, those as one decode block."""
    longest = max(map(len, rows))
    num_blocks = 1 + len(rows) * blocks_for(longest)
    kv = KVCache(layers, num_blocks, len(rows), longest, module.dtype, module.device)
    slots = [kv.acquire_slot() for _ in rows]
    for slot, row in zip(slots, rows, strict=True):
        kv.reserve(slot, len(row))
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    for first, last, prefill in ((0, -3, True), (-3, None, False)):
        segments = []
        for slot, row in zip(slots, rows, strict=True):
            tokens = row[first:last]
            segments.append(Segment(slot, tokens, len(row) + first if first else 0, prefill, range(len(tokens))))
        step = pack(segments, kv, min_rows=4, device=module.device)
        try:
            logits = forward_packed(module, step)
        except TypeError as error:
            raise UnsupportedModelError(f"{type(module).__name__} cannot run packed: {error}") from None
        if logits.shape[0] != step.logit_rows.shape[0]:
            raise UnsupportedModelError(f"{type(module).__name__} does not honour logits_to_keep")
        for part, piece in zip(parts, torch.split(logits.float(), [len(s.token_ids) for s in segments]), strict=True):
            part.append(piece)
    return [torch.cat(part) for part in parts]
