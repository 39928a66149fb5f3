"""Causal attention over the paged KV cache, hooked into `transformers` through its AttentionInterface.

Each query row reduces over its keys in an order that its own position fixes, whatever its batch mates and the number of
rows of its segment. Our own kernels attend on CPU, torch's flash kernels on CUDA; where neither can, padded matrix
products do: contexts are rounded up to whole blocks and what lies beyond a row's position has weight zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from batchspec.engine import cpu, flash
from batchspec.engine.kv_cache import BLOCK_TOKENS
from batchspec.engine.packed import PackedStep, once_per_step, to_device
from batchspec.errors import UnsupportedModelError

ATTENTION_NAME = "batchspec"

# What models pass along without a meaning for the attention function: positions are in the step already.
_IGNORED_KEYWORDS = frozenset({"position_ids", "use_cache", "cache_position", "output_attentions", "cache"})

# Several rows take one matrix kernel, one row may take another with other rounding.
_MIN_MATMUL_ROWS = 4


def register() -> None:
    """Make `attn_implementation="batchspec"` known. No mask function is registered, so that no mask is built."""
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
    variant = flash.variant_for(query, key, value, softcap)
    if variant is not None:
        return flash.attend(variant, rows, keys, values, step, scale, sliding_window)[None], None
    out = rows.new_zeros(rows.shape[0], rows.shape[1], values.shape[-1])
    heads_per_kv_head = query.shape[1] // key.shape[1]
    for group in _groups(step, -(-_MIN_MATMUL_ROWS // heads_per_kv_head)):
        _attend(rows, keys, values, out, group, scale, sliding_window, softcap)
    return out[None], None


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments that are attended at once: S of up to M rows, which lie together in the pack as `rows`.

    row_at: int64 [S, M], the row of the pack that stands there, any where there is none; place_of: int64 [rows], where
    each row stands in S * M; positions: int64 [S, M]; block_tables: int64 [S, blocks of the longest].
    """

    rows: slice
    row_at: torch.Tensor
    place_of: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor


@once_per_step
def _groups(step: PackedStep, least_width: int) -> tuple[_Group, ...]:
    """The decode segments together, each prefill by itself; of what the host knows, so that nobody waits for the
    device."""
    num_decode, num_segments = step.num_decode_segments, len(step.host_first_positions)
    borders = [(0, num_decode)] if num_decode else []
    borders += [(segment, segment + 1) for segment in range(num_decode, num_segments)]
    return tuple(_group(step, first, last, least_width) for first, last in borders)


def _group(step: PackedStep, first: int, last: int, least_width: int) -> _Group:
    starts, device = np.array(step.host_query_starts[first : last + 1]), step.input_ids.device
    firsts, lengths = np.array(step.host_first_positions[first:last]), np.diff(starts)
    width = max(int(lengths.max()), least_width)
    offsets = np.arange(width)
    row_at = np.where(offsets < lengths[:, None], starts[:-1, None] + offsets, starts[0])
    place_of = np.concatenate([index * width + np.arange(length) for index, length in enumerate(lengths)])
    num_blocks = -(-int((firsts + lengths).max()) // BLOCK_TOKENS)

    return _Group(
        slice(int(starts[0]), int(starts[-1])),
        to_device(row_at.astype(np.int64), device),
        to_device(place_of.astype(np.int64), device),
        to_device((firsts[:, None] + offsets).astype(np.int64), device),
        step.block_tables[first:last, :num_blocks].long(),
    )


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
    group: _Group,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Attend for a group of segments, over L tokens of context."""
    num_segments, width = group.row_at.shape
    num_kv_heads = keys.shape[2]
    heads = rows.shape[1] // num_kv_heads
    query = rows[group.row_at].view(num_segments, width, num_kv_heads, heads, -1)
    query = query.transpose(1, 2).flatten(2, 3)  # [S, KV, M*G, D]
    context_keys = keys[group.block_tables].flatten(1, 2).permute(0, 2, 3, 1)  # [S, KV, D, L]
    context_values = values[group.block_tables].flatten(1, 2).transpose(1, 2)  # [S, KV, L, D]

    scores = torch.matmul(query, context_keys).float() * scale  # [S, KV, M*G, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    key_positions = torch.arange(scores.shape[-1], device=scores.device)
    hidden = key_positions > group.positions[..., None]  # [S, M, L]
    if sliding_window is not None:
        hidden |= key_positions <= group.positions[..., None] - sliding_window
    # a row beyond its segment may see no key at all: the lowest finite score keeps its softmax free of NaN
    scores.view(num_segments, num_kv_heads, width, heads, -1).masked_fill_(
        hidden[:, None, :, None, :], torch.finfo(scores.dtype).min
    )
    weights = torch.softmax(scores, dim=-1).to(rows.dtype)
    mixed = torch.matmul(weights, context_values)  # [S, KV, M*G, Dv]
    mixed = mixed.view(num_segments, num_kv_heads, width, heads, -1).transpose(1, 2).flatten(2, 3)  # [S, M, heads, Dv]
    out[group.rows] = mixed.flatten(0, 1)[group.place_of]
