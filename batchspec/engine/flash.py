"""Attention over the paged KV cache by torch's flash kernels (`torch.nn.attention.varlen`), on CUDA.

The kernels are asked not to split a row's keys (`num_splits=1`), which torch documents as batch-invariant. Kernels that
read block tables (FA3 and FA4, from packages of their own) read the cache in place; torch's own (FA2) get the keys of
the step gathered. Which of them there are is found by trying.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache, LayerShape
from batchspec.engine.packed import PackedStep, Segment, once_per_step, pack, to_device

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256

# Keys that are gathered at once, unless a single prompt has more: 1 GiB of a layer with 8 KV heads of 128.
_MOST_GATHERED_KEYS = 2**18

# Largest difference from the plain products, of values around 1, that rounding explains.
_TRIAL_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of asking `varlen_attn`: whose kernels (None: torch's own), keys in place or gathered, which keywords."""

    kernels: str | None
    paged: bool
    keywords: tuple[tuple[str, Any], ...] = (("num_splits", 1),)


_VARIANTS = (Variant("FA4", True), Variant("FA3", True), Variant(None, False), Variant(None, False, ()))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step that are attended at once. row_starts, key_starts: int32 [N + 1]; num_keys: int32 [N];
    block_tables: int32 [N, blocks]; key_at: int64 [keys], where each lies in the flat pool (None where kernels read
    block tables)."""

    rows: slice
    most_rows: int
    most_keys: int
    row_starts: torch.Tensor
    key_starts: torch.Tensor
    num_keys: torch.Tensor
    block_tables: torch.Tensor
    key_at: torch.Tensor | None


def variant_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None) -> Variant | None:
    """The way to attend for [1, heads, T, dim] tensors like these; None where no flash kernel can."""
    if query.device.type != "cuda" or softcap is not None or query.shape[-1] != value.shape[-1]:
        return None
    return _tried(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1])


@lru_cache(maxsize=8)
def _tried(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Variant | None:
    """The first way that runs and agrees with plain products, on a small step."""
    if dtype in _DTYPES and head_dim <= _MOST_HEAD_DIM and head_dim % 8 == 0:
        for variant in _VARIANTS:
            try:
                error = _trial_error(variant, device, dtype, heads, kv_heads, head_dim)
            except Exception as reason:  # whatever a package that is not there, or not for this GPU, raises
                logger.info("flash attention, %s: %s", variant, reason)
                continue
            if error <= _TRIAL_TOLERANCE:
                return variant
            logger.warning("flash attention, %s: differs from plain products by %.2g", variant, error)
    logger.warning(
        "no flash attention here for heads of %d in %s: padded matrix products attend, slowly", head_dim, dtype
    )
    return None


def _use(kernels: str | None) -> None:
    """Put these kernels in force: which ones serve `varlen_attn` is a setting of the whole process."""
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    if current_flash_attention_impl() == kernels:
        return
    if kernels is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(kernels)


def attend(
    variant: Variant,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: PackedStep,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """rows [T, heads, dim], keys and values as in the cache -> [T, heads, dim], zero in rows of no segment."""
    from torch.nn.attention.varlen import varlen_attn

    _use(variant.kernels)
    out = torch.zeros_like(rows)
    for part in _parts(step, variant.paged):
        keywords = dict(variant.keywords)
        if part.key_at is None:
            key, value = keys, values
            keywords |= {"seqused_k": part.num_keys, "block_table": part.block_tables}
        else:
            key, value = (pool.flatten(0, 1)[part.key_at] for pool in (keys, values))
        attended = varlen_attn(
            rows[part.rows],
            key,
            value,
            part.row_starts,
            None if variant.paged else part.key_starts,
            max(2, part.most_rows),  # kernels treat steps of one row a sequence in another way
            part.most_keys,
            scale=scale,
            # the last row of a sequence sees its last key; the row itself counts to its window
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=rows.shape[1] != keys.shape[-2],
            **keywords,
        )
        assert isinstance(attended, torch.Tensor)  # nothing else was asked for
        out[part.rows] = attended
    return out


@once_per_step
def _parts(step: PackedStep, paged: bool) -> tuple[_Part, ...]:
    """All rows at once where kernels read block tables, else as many as gather a bounded number of keys. Consecutive
    chunks of a prompt are one sequence, so that its keys are gathered once. Nobody waits for the device."""
    starts, firsts, slots = step.host_query_starts, step.host_first_positions, step.host_slots
    sequences: list[list[int]] = []  # slot, first row, rows, keys
    for slot, (start, end), first in zip(slots, pairwise(starts), firsts, strict=True):
        if sequences and sequences[-1][0] == slot:
            sequences[-1][2:] = sequences[-1][2] + end - start, first + end - start
        else:
            sequences.append([slot, start, end - start, first + end - start])
    parts: list[list[list[int]]] = [[]]
    gathered = 0
    for sequence in sequences:
        gathered += sequence[3]
        if parts[-1] and not paged and gathered > _MOST_GATHERED_KEYS:
            parts.append([])
            gathered = sequence[3]
        parts[-1].append(sequence)
    return tuple(_part(step, part, paged) for part in parts)


def _part(step: PackedStep, sequences: list[list[int]], paged: bool) -> _Part:
    slots, first_rows, num_rows, num_keys = np.array(sequences, dtype=np.int32).T
    row_starts, key_starts = (np.cumsum([0, *counts], dtype=np.int32) for counts in (num_rows, num_keys))
    device = step.input_ids.device
    tables = to_device(step.kv.block_tables[slots, : -(-int(num_keys.max()) // BLOCK_TOKENS)], device)
    keys_of, key_starts_there = to_device(num_keys.copy(), device), to_device(key_starts, device)
    key_at = None
    if not paged:
        total = int(key_starts[-1])
        sequence = torch.repeat_interleave(keys_of, output_size=total)
        place = torch.arange(total, device=device) - key_starts_there[sequence]
        key_at = tables[sequence, place // BLOCK_TOKENS].long() * BLOCK_TOKENS + place % BLOCK_TOKENS
    return _Part(
        rows=slice(int(first_rows[0]), int(first_rows[0] + row_starts[-1])),
        most_rows=int(num_rows.max()),
        most_keys=int(num_keys.max()),
        row_starts=to_device(row_starts, device),
        key_starts=key_starts_there,
        num_keys=keys_of,
        block_tables=tables,
        key_at=key_at,
    )


def _trial_error(
    variant: Variant, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> float:
    """Largest difference from plain products over a step of a row, a block of rows, and a prompt, with and without a
    sliding window; NaN where there is one."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    kv = KVCache([LayerShape(kv_heads, head_dim, head_dim)], 9, 3, 3 * BLOCK_TOKENS, dtype, device)
    sizes = ((40, 1, False), (33, 3, False), (0, 50, True))  # context, rows, prefill
    segments = []
    for context, count, prefill in sizes:
        slot = kv.acquire_slot()
        kv.reserve(slot, context + count)
        segments.append(Segment(slot, [0] * count, context, prefill, ()))
    step = pack(segments, kv, 1, device)
    kv.keys[0].copy_(noise(*kv.keys[0].shape))
    kv.values[0].copy_(noise(*kv.values[0].shape))
    rows = noise(step.input_ids.shape[1], heads, head_dim)
    scale = head_dim**-0.5
    errors = []
    for window in (None, 20):
        got = attend(variant, rows, kv.keys[0], kv.values[0], step, scale, window)
        start = 0
        for segment, (context, count, _) in zip(segments, sizes, strict=True):
            blocks = torch.from_numpy(kv.block_tables[segment.slot]).long().to(device)
            keys, values = (
                pool[blocks].flatten(0, 1)[: context + count].float().repeat_interleave(heads // kv_heads, dim=1)
                for pool in (kv.keys[0], kv.values[0])
            )
            scores = torch.einsum("mhd,lhd->hml", rows[start : start + count].float(), keys) * scale
            places = torch.arange(context + count, device=device)
            behind = places[context:, None] - places
            hidden = (behind < 0) | (behind >= (window or len(places)))
            expected = torch.einsum("hml,lhd->mhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
            errors.append((got[start : start + count].float() - expected).abs().max())
            start += count
    return float(torch.stack(errors).max())
