"""Attention over the paged KV cache by torch's flash kernels (`torch.nn.attention.varlen`), on CUDA.

The kernels are asked not to split a row's keys (`num_splits=1`), which torch documents as batch-invariant. Kernels that
read block tables (FA3, FA4, where activated) read the cache in place; torch's own (FA2) gets the keys of the step
gathered. Which of them the installed torch has is found by trying.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache, LayerShape
from batchspec.engine.packed import PackedStep, Segment, pack

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256

# Largest difference from the plain products, of values around 1, that rounding explains.
_TRIAL_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of asking `varlen_attn`: keys in place or gathered, and with which keywords."""

    paged: bool
    keywords: tuple[tuple[str, Any], ...]


_NOT_SPLIT = (("num_splits", 1),)
_VARIANTS = (Variant(True, _NOT_SPLIT), Variant(False, _NOT_SPLIT), Variant(False, ()))


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the kernels ask of a step, the same in all layers. num_rows: rows of segments; key_starts: int32 [N + 1];
    num_keys: int32 [N]; key_at: int64 [keys of all segments], where each lies in the flat pool."""

    num_rows: int
    most_rows: int
    most_keys: int
    key_starts: torch.Tensor
    num_keys: torch.Tensor
    key_at: torch.Tensor


def variant_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None) -> Variant | None:
    """The way to attend for [1, heads, T, dim] tensors like these; None where no flash kernel can."""
    if query.device.type != "cuda" or softcap is not None or query.shape[-1] != value.shape[-1]:
        return None
    return _tried(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1])


@lru_cache(maxsize=8)
def _tried(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Variant | None:
    """The first way that runs and agrees with plain products, on a small step."""
    possible = dtype in _DTYPES and head_dim <= _MOST_HEAD_DIM and head_dim % 8 == 0
    for variant in _VARIANTS if possible else ():
        try:
            error = _trial_error(variant, device, dtype, heads, kv_heads, head_dim)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as reason:
            logger.info("flash attention, %s: %s", variant, reason)
            continue
        if error <= _TRIAL_TOLERANCE:
            return variant
        logger.warning("flash attention, %s: differs from plain products by %.2g", variant, error)
    logger.warning(
        "no flash attention here for heads of %d in %s: padded matrix products attend, slowly", head_dim, dtype
    )
    return None


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

    layout = _layout(step)
    common = dict(variant.keywords)
    if variant.paged:
        common |= {"seqused_k": layout.num_keys, "block_table": step.block_tables}
    else:
        keys, values = (pool.flatten(0, 1)[layout.key_at] for pool in (keys, values))
    out = torch.zeros_like(rows)
    attended = varlen_attn(
        rows[: layout.num_rows],
        keys,
        values,
        step.query_starts,
        None if variant.paged else layout.key_starts,
        layout.most_rows,
        layout.most_keys,
        scale=scale,
        # the last row of a segment sees its last key; the row itself counts to its window
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=rows.shape[1] != keys.shape[-2],
        **common,
    )
    assert isinstance(attended, torch.Tensor)  # nothing else was asked for
    out[: layout.num_rows] = attended
    return out


@lru_cache(maxsize=2)
def _layout(step: PackedStep) -> _Layout:
    """Made once for all layers, of what the host knows: the device is never waited for."""
    starts, firsts = step.host_query_starts, step.host_first_positions
    lengths = [after - before for before, after in pairwise(starts)]
    num_keys = [first + length for first, length in zip(firsts, lengths, strict=True)]
    total, device = sum(num_keys), step.input_ids.device
    of_segment = torch.tensor(num_keys, dtype=torch.int64).to(device, non_blocking=True)
    key_starts = torch.nn.functional.pad(of_segment.cumsum(0), (1, 0))
    segment = torch.repeat_interleave(of_segment, output_size=total)
    place = torch.arange(total, device=device) - key_starts[segment]
    block = step.block_tables[segment, place // BLOCK_TOKENS].long()
    return _Layout(
        num_rows=starts[-1],
        most_rows=max(lengths),
        most_keys=max(num_keys),
        key_starts=key_starts.int(),
        num_keys=of_segment.int(),
        key_at=block * BLOCK_TOKENS + place % BLOCK_TOKENS,
    )


def _trial_error(
    variant: Variant, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> float:
    """Largest difference from plain products over a step of a row, a block of rows, and a prompt."""
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
    got = attend(variant, rows, kv.keys[0], kv.values[0], step, scale, None)
    start, worst = 0, 0.0
    for segment, (context, count, _) in zip(segments, sizes, strict=True):
        blocks = torch.from_numpy(kv.block_tables[segment.slot]).long().to(device)
        keys, values = (
            pool[blocks].flatten(0, 1)[: context + count].float().repeat_interleave(heads // kv_heads, dim=1)
            for pool in (kv.keys[0], kv.values[0])
        )
        scores = torch.einsum("mhd,lhd->hml", rows[start : start + count].float(), keys) * scale
        places = torch.arange(context + count, device=device)
        later = places > places[context:, None]
        expected = torch.einsum("hml,lhd->mhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)
        worst = max(worst, float((got[start : start + count].float() - expected).abs().max()))
        start += count
    return worst
