"""One packed forward: what the rows of a step bring, laid out as the attention needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch

from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one sequence: `token_ids` at positions `first_position`, ... of KV slot `slot`.

    `logit_offsets` name the tokens (by their place in `token_ids`) whose logits are wanted.
    """

    slot: int
    token_ids: Sequence[int]
    first_position: int
    prefill: bool
    logit_offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The keyword `batchspec_step` of a model call: N segments in T rows, decode segments first, nothing padded.

    input_ids, positions: int64 [1, T]; slot_mapping: int64 [T], where each row's K and V go in the flat pool;
    query_starts: int32 [N + 1], the rows of segment i are query_starts[i] .. query_starts[i + 1];
    first_positions: int32 [N]; block_tables: int32 [N, max blocks of the step];
    logit_rows: int64 [R], the rows whose logits are wanted, segment by segment. T and R may be rounded up by rows
    that write to block 0 and that nobody reads; they belong to no segment. `host_*` are the same numbers where reading
    them makes nobody wait for the device. `kept` holds what is derived of a step once for all layers.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    first_positions: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    num_decode_segments: int
    num_logit_rows: int
    host_query_starts: tuple[int, ...]
    host_first_positions: tuple[int, ...]
    host_slots: tuple[int, ...]
    kv: KVCache
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)


@torch.inference_mode()
def forward_packed(module: Any, step: PackedStep) -> torch.Tensor:
    """Logits of `step.logit_rows`, [R, vocab], by a causal LM whose attention is ours."""
    output = module(
        input_ids=step.input_ids,
        position_ids=step.positions,
        use_cache=False,
        logits_to_keep=step.logit_rows,
        batchspec_step=step,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


Made = TypeVar("Made")
Arguments = TypeVarTuple("Arguments")


def once_per_step(make: Callable[[PackedStep, *Arguments], Made]) -> Callable[[PackedStep, *Arguments], Made]:
    """What `make` derives of a step (and of further arguments) is made once, and goes when the step does."""

    @wraps(make)
    def made(step: PackedStep, *args: *Arguments) -> Made:
        key = (make, *args)
        if key not in step.kept:
            step.kept[key] = make(step, *args)
        found: Made = step.kept[key]
        return found

    return made


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the array, on its way to the device: nobody waits for it to arrive."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def pack(segments: Sequence[Segment], kv: KVCache, min_rows: int, device: torch.device) -> PackedStep:
    """Lay segments (decode first) out as one step; rows are rounded up to `min_rows`, since a single row takes
    another matrix kernel, with other rounding, than several."""
    lengths = np.array([len(s.token_ids) for s in segments], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    firsts = np.array([s.first_position for s in segments], dtype=np.int32)
    num_rows = int(starts[-1])
    pad = max(0, min_rows - num_rows)

    ids = np.zeros(num_rows + pad, dtype=np.int64)
    ids[:num_rows] = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in segments])
    positions = np.zeros(num_rows + pad, dtype=np.int64)
    positions[:num_rows] = np.arange(num_rows) - np.repeat(starts[:-1] - firsts, lengths)
    slots = np.array([s.slot for s in segments])
    tables = kv.block_tables[slots, : -(-int((firsts + lengths).max()) // BLOCK_TOKENS)]
    slot_mapping = np.zeros(num_rows + pad, dtype=np.int64)
    block_of_row = tables[np.repeat(np.arange(len(segments)), lengths), positions[:num_rows] // BLOCK_TOKENS]
    slot_mapping[:num_rows] = block_of_row.astype(np.int64) * BLOCK_TOKENS + positions[:num_rows] % BLOCK_TOKENS

    logit_rows = [int(start) + offset for s, start in zip(segments, starts, strict=False) for offset in s.logit_offsets]
    num_logit_rows = len(logit_rows)
    if logit_rows:
        logit_rows += [0] * max(0, min_rows - num_logit_rows)

    return PackedStep(
        input_ids=to_device(ids[None], device),
        positions=to_device(positions[None], device),
        slot_mapping=to_device(slot_mapping, device),
        query_starts=to_device(starts, device),
        first_positions=to_device(firsts, device),
        block_tables=to_device(np.ascontiguousarray(tables), device),
        logit_rows=to_device(np.array(logit_rows, dtype=np.int64), device),
        num_decode_segments=sum(not s.prefill for s in segments),
        num_logit_rows=num_logit_rows,
        host_query_starts=tuple(starts.tolist()),
        host_first_positions=tuple(firsts.tolist()),
        host_slots=tuple(slots.tolist()),
        kv=kv,
    )
