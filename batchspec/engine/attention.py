"""Causal attention over the paged KV cache, hooked into `transformers` through its AttentionInterface.

Each query row reduces over its keys in an order that its own position fixes, whatever its batch mates, the number of
rows of its segment or the padding: contexts are rounded up to whole blocks and what lies beyond a row's position has
weight zero.
"""

from __future__ import annotations

from typing import Any

import torch

from batchspec.engine import cpu
from batchspec.engine.kv_cache import BLOCK_TOKENS
from batchspec.engine.packed import PackedStep
from batchspec.errors import UnsupportedModelError

ATTENTION_NAME = "batchspec"

# What models pass along without a meaning for the attention function: positions are in the step already.
_IGNORED_KEYWORDS = frozenset({"position_ids", "use_cache", "cache_position", "output_attentions", "cache"})

# Several rows take one matrix kernel, one row may take another with other rounding.
_MIN_MATMUL_ROWS = 4


def register() -> None:
    """Make `attn_implementation="batchspec"` known. No mask function is registered, so that no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, batchspec_attention)


def batchspec_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    batchspec_step: PackedStep,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = True,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> ([1, T, heads, dim], None).

    Writes K and V of the step's rows into the cache, then attends. Raises UnsupportedModelError for any keyword that
    it does not understand: dropping one (sinks, biases) would change the text in silence.
    """
    refuse_unknown_keywords(module, attention_mask, dropout, is_causal, keywords)
    step = batchspec_step
    layer: int = module.layer_idx  # type: ignore[assignment]
    settings = cpu.attention_settings(query, key, value, scaling, sliding_window, softcap)
    if settings is not None:
        rows_of = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        return cpu.paged_attention(settings, step, layer, *rows_of)[None], None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    keys, values = step.kv.keys[layer], step.kv.values[layer]
    keys.view(-1, *keys.shape[2:]).index_copy_(0, step.slot_mapping, key[0].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(0, step.slot_mapping, value[0].transpose(0, 1))

    rows = query[0].transpose(0, 1)  # [T, heads, dim]
    out = rows.new_zeros(rows.shape[0], rows.shape[1], values.shape[-1])
    starts = step.query_starts.tolist()
    groups = [(0, step.num_decode_segments)] if step.num_decode_segments else []
    groups += [(segment, segment + 1) for segment in range(step.num_decode_segments, len(starts) - 1)]
    for first, last in groups:
        _attend(rows, keys, values, out, step, starts, (first, last), scale, sliding_window, softcap)
    return out[None], None


def refuse_unknown_keywords(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    keywords: dict[str, Any],
) -> None:
    unknown = [name for name, given in keywords.items() if given is not None and name not in _IGNORED_KEYWORDS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if is_causal is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention, which this engine does not "
            "reproduce; use a model whose layers are plain full or sliding attention"
        )


def _attend(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    step: PackedStep,
    starts: list[int],
    segments: tuple[int, int],
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Attend for segments [first, last) at once: S segments of up to M rows over L tokens of context."""
    first, last = segments
    lengths = [starts[i + 1] - starts[i] for i in range(first, last)]
    num_segments, num_heads, dim = last - first, rows.shape[1], rows.shape[2]
    num_kv_heads, group = keys.shape[2], num_heads // keys.shape[2]
    width = max(max(lengths), -(-_MIN_MATMUL_ROWS // group))
    device = rows.device

    offsets = torch.arange(width, device=device)
    real = offsets < torch.tensor(lengths, device=device)[:, None]  # [S, M]
    query = rows.new_zeros(num_segments, width, num_heads, dim)
    query[real] = rows[starts[first] : starts[last]]
    query = query.view(num_segments, width, num_kv_heads, group, dim).transpose(1, 2).flatten(2, 3)  # [S, KV, M*G, D]

    query_positions = step.first_positions[first:last, None] + offsets  # [S, M]
    num_blocks = -(-int(query_positions[:, -1].max() + 1 - (width - max(lengths))) // BLOCK_TOKENS)
    tables = step.block_tables[first:last, :num_blocks].long()
    context_keys = keys[tables].flatten(1, 2).permute(0, 2, 3, 1)  # [S, KV, D, L]
    context_values = values[tables].flatten(1, 2).transpose(1, 2)  # [S, KV, L, D]

    scores = torch.matmul(query, context_keys).float() * scale  # [S, KV, M*G, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    key_positions = torch.arange(scores.shape[-1], device=device)
    hidden = key_positions > query_positions[..., None]  # [S, M, L]
    if sliding_window is not None:
        hidden |= key_positions <= query_positions[..., None] - sliding_window
    # a rounding-up row may see no key at all: the lowest finite score keeps its softmax free of NaN
    scores.view(num_segments, num_kv_heads, width, group, -1).masked_fill_(
        hidden[:, None, :, None, :], torch.finfo(scores.dtype).min
    )
    weights = torch.softmax(scores, dim=-1).to(rows.dtype)
    mixed = torch.matmul(weights, context_values)  # [S, KV, M*G, Dv]
    mixed = mixed.view(num_segments, num_kv_heads, width, group, -1).transpose(1, 2).flatten(2, 3)  # [S, M, heads, Dv]
    out[starts[first] : starts[last]] = mixed[real]
