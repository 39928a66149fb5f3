"""Shared prefixes: prompts that begin with the same tokens have their K and V computed once.

The grain is the prefill chunk (rounded up to whole KV blocks): chunks end at fixed positions, so a chunk's K and V have
the same bits whichever row computed them. A chunk is known by a digest of all tokens up to its end, as in vLLM's
automatic prefix caching. Blocks of a chunk are shared, never copied; nobody writes to a full block.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache, blocks_for
from batchspec.engine.sequence import Sequence

# What may be kept for rows to come, beyond what live rows hold: a share of the cache, or of one context if that is
# more. Every idle block is memory.
_KEPT_OF_CACHE = 1 / 32
_KEPT_OF_CONTEXT = 1 / 4

Digest = bytes


class PrefixCache:
    """Chunks by digest, in the order in which they are given up: the least recently used first, and of a prompt the
    last first, since a chunk is of no use without those before it."""

    def __init__(self, kv: KVCache, prefill_chunk_tokens: int, enabled: bool = True) -> None:
        self.grain = math.lcm(prefill_chunk_tokens, BLOCK_TOKENS)
        self._kv = kv
        self._enabled = enabled
        self._chunks: OrderedDict[Digest, list[int]] = OrderedDict()
        self._computing: set[Digest] = set()

    @property
    def kept_blocks(self) -> list[int]:
        return [block for blocks in self._chunks.values() for block in blocks]

    def begin_step(self) -> None:
        self._computing.clear()

    def adopt(self, sequence: Sequence) -> bool:
        """Give the row the chunks that it needs next and that are known. False where another row computes the next
        one in this very step: then waiting is cheaper than computing it twice."""
        while (digest := self._next_chunk(sequence)) is not None:
            if digest in self._computing:
                return False
            blocks = self._chunks.get(digest)
            if blocks is None:
                break
            self._kv.share(sequence.slot, blocks)
            sequence.num_computed += self.grain
            sequence.num_cached_tokens += 0 if sequence.was_preempted else self.grain
        self._touch(sequence)
        return True

    def known_tokens(self, sequence: Sequence) -> int:
        """Prompt tokens ahead of the row that it need not compute: they are in the cache already, counted once."""
        if self._next_chunk(sequence) is None:
            return 0
        ahead = self._digests(sequence)[sequence.num_computed // self.grain :]
        return self.grain * sum(1 for _ in takewhile(self._chunks.__contains__, ahead))

    def announce(self, sequence: Sequence, end: int) -> None:
        """The row computes its prompt up to `end` in this step."""
        if self._enabled:
            digests = self._digests(sequence)
            self._computing.update(digests[sequence.num_computed // self.grain : end // self.grain])

    def keep(self, sequence: Sequence, start: int) -> None:
        """The row's prompt is computed from `start` on to `num_computed`: share its whole chunks."""
        if not self._enabled:
            return
        digests = self._digests(sequence)
        for index in range(start // self.grain, min(len(digests), sequence.num_computed // self.grain)):
            if digests[index] not in self._chunks:
                blocks = self._kv.blocks_of(sequence.slot, index * self.grain, (index + 1) * self.grain)
                self._chunks[digests[index]] = blocks
                self._kv.hold(blocks)
        self._touch(sequence)

    def _touch(self, sequence: Sequence) -> None:
        """The chunks of what the row has computed were used just now."""
        if not self._enabled:
            return
        for digest in reversed(self._digests(sequence)[: sequence.num_computed // self.grain]):
            if digest in self._chunks:
                self._chunks.move_to_end(digest)

    def shrink(self) -> None:
        """Let go of chunks that no live row has, beyond what may be kept for rows to come."""
        idle = [digest for digest in self._chunks if self._is_idle(digest)]
        kept_blocks = max(
            self._kv.num_usable_blocks * _KEPT_OF_CACHE, blocks_for(self._kv.max_tokens) * _KEPT_OF_CONTEXT
        )
        num_kept = int(kept_blocks) // (self.grain // BLOCK_TOKENS)
        for digest in idle[: max(0, len(idle) - num_kept)]:
            self._forget(digest)

    def clear(self) -> None:
        """Let go of every chunk; live rows keep theirs."""
        for digest in list(self._chunks):
            self._forget(digest)

    def reclaim(self) -> bool:
        """Free the blocks of one chunk that no live row has. False where there is none."""
        digest = next((digest for digest in self._chunks if self._is_idle(digest)), None)
        if digest is not None:
            self._forget(digest)
        return digest is not None

    def _forget(self, digest: Digest) -> None:
        self._kv.drop(self._chunks.pop(digest))

    def _is_idle(self, digest: Digest) -> bool:
        return all(self._kv.num_holders(block) == 1 for block in self._chunks[digest])

    def _next_chunk(self, sequence: Sequence) -> Digest | None:
        """The digest of the chunk that the row would compute next; None where that is none that could be shared."""
        if not self._enabled or sequence.num_computed % self.grain:
            return None
        digests = self._digests(sequence)
        index = sequence.num_computed // self.grain
        return digests[index] if index < len(digests) else None

    def _digests(self, sequence: Sequence) -> list[Digest]:
        """Of every whole chunk of the prompt, the last token left out: the row itself must compute that."""
        if sequence.chunk_digests is None:
            prompt = np.array(sequence.token_ids[: sequence.num_prompt_tokens], dtype=np.int64)
            digest, sequence.chunk_digests = b"", []
            for end in range(self.grain, len(prompt), self.grain):
                digest = blake2b(digest + prompt[end - self.grain : end].tobytes(), digest_size=16).digest()
                sequence.chunk_digests.append(digest)
        return sequence.chunk_digests
