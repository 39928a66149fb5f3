"""The paged KV cache: one pool of fixed-size blocks per layer, and a table of blocks per sequence slot. Blocks whose
tokens several sequences have in common are in several tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchspec.engine import memory

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class LayerShape:
    """K and V of one layer, as the attention function saw them."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Blocks of keys and values for up to `max_sequences` sequences of up to `max_tokens` tokens.

    keys[layer], values[layer]: [num_blocks, BLOCK_TOKENS, num_kv_heads, head_dim]. Block 0 belongs to nobody: the
    rows that round a forward up write there. A slot's table names its blocks in order, so token t of a slot lives at
    flat position `block_tables[slot, t // BLOCK_TOKENS] * BLOCK_TOKENS + t % BLOCK_TOKENS`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def pool(layer: LayerShape, dim: int) -> torch.Tensor:
            return _zeros((num_blocks, BLOCK_TOKENS, layer.num_kv_heads, dim), dtype, device)

        self.keys = [pool(layer, layer.key_dim) for layer in layers]
        self.values = [pool(layer, layer.value_dim) for layer in layers]
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.block_tables = np.zeros((max_sequences, blocks_for(max_tokens)), dtype=np.int32)
        self._num_blocks_of_slot = [0] * max_sequences
        self._num_holders = [0] * num_blocks  # slots and keepers of each block; nobody: it is free
        self._free_blocks = list(range(num_blocks - 1, 0, -1))
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def acquire_slot(self) -> int:
        """A slot with an empty table. Raises IndexError where all are taken."""
        return self._free_slots.pop()

    def release_slot(self, slot: int) -> None:
        """Give the slot and all its blocks back."""
        self.trim(slot, 0)
        self._free_slots.append(slot)

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Grow the slot's table to hold `num_tokens`. False, with nothing changed, where the blocks do not last."""
        have = self._num_blocks_of_slot[slot]
        need = blocks_for(num_tokens)
        if need - have > len(self._free_blocks):
            return False
        for index in range(have, need):
            self.block_tables[slot, index] = self._free_blocks.pop()
            self._num_holders[self.block_tables[slot, index]] = 1
        self._num_blocks_of_slot[slot] = max(have, need)
        return True

    def trim(self, slot: int, num_tokens: int) -> None:
        """Give back the blocks beyond the first `num_tokens` tokens (what a rejected proposal had taken)."""
        keep, have = blocks_for(num_tokens), self._num_blocks_of_slot[slot]
        if keep < have:
            self.drop(self.block_tables[slot, keep:have].tolist())
            self.block_tables[slot, keep:have] = 0
            self._num_blocks_of_slot[slot] = keep

    def blocks_of(self, slot: int, first_token: int, last_token: int) -> list[int]:
        """The blocks of tokens [first, last) of a slot, both on a block's border."""
        return [int(b) for b in self.block_tables[slot, first_token // BLOCK_TOKENS : last_token // BLOCK_TOKENS]]

    def share(self, slot: int, blocks: Sequence[int]) -> None:
        """Put filled blocks that others hold behind those of the slot, all of which are full."""
        have = self._num_blocks_of_slot[slot]
        self.block_tables[slot, have : have + len(blocks)] = blocks
        self._num_blocks_of_slot[slot] = have + len(blocks)
        self.hold(blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Keep blocks from becoming free, beside the slots that have them."""
        for block in blocks:
            self._num_holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Undo a `hold`, or a slot's own; a block that nobody holds is free."""
        for block in blocks:
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free_blocks.append(block)

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def check_integrity(self, kept: Sequence[int] = ()) -> None:
        """Raise ValueError, with the numbers, unless every block is free or has as many holders as slots have it and
        `kept` names it."""
        held = Counter(kept)
        for slot, count in enumerate(self._num_blocks_of_slot):
            held.update(self.block_tables[slot, :count].tolist())
        wrong = [block for block in range(1, self.num_blocks) if held[block] != self._num_holders[block]]
        if wrong or sorted([*held, *self._free_blocks]) != list(range(1, self.num_blocks)):
            raise ValueError(
                f"KV blocks lost or shared: {len(held)} held + {len(self._free_blocks)} free, {self.num_usable_blocks} "
                f"expected; {len(wrong)} with another number of holders than known"
            )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because a masked key still meets a zero weight, and 0 x NaN is NaN. On CPU untouched until used (torch's
    own zeros write every page), so that a cache sized for the longest rows costs the memory of the rows that come."""
    return memory.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def bytes_per_block(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return BLOCK_TOKENS * dtype.itemsize * sum(layer.elements_per_token for layer in layers)
