"""Which rows are live, what each feeds to the next step, and which gives way when the KV cache runs short."""

from __future__ import annotations

import logging
from collections import deque
from itertools import pairwise

import torch

from batchspec.engine.kv_cache import KVCache, blocks_for
from batchspec.engine.packed import Segment
from batchspec.engine.prefix_cache import PrefixCache
from batchspec.engine.sequence import Sequence, StepRow
from batchspec.types import NO_PROPOSAL, Proposal

logger = logging.getLogger(__name__)

# Known output tokens are fed back after a pre-emption in blocks like those of speculation, since the bits of their
# K and V must be those of the decode kernel.
REPLAY_TOKENS = 16

# What a row is expected to write before anything has finished.
_PRIOR_OUTPUT_TOKENS = 64
_PRIOR_ROWS = 4


class Scheduler:
    """Live rows in order of admission. All limits of a step are kept here."""

    def __init__(
        self,
        kv: KVCache,
        max_batch: int,
        prefill_chunk_tokens: int,
        step_prefill_tokens: int,
        shares_prefixes: bool = True,
    ) -> None:
        if step_prefill_tokens < prefill_chunk_tokens:
            raise ValueError(f"a step takes {step_prefill_tokens} prompt tokens, less than a chunk")
        self.live: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.prefixes = PrefixCache(kv, prefill_chunk_tokens, shares_prefixes)
        self._kv = kv
        self._max_batch = max_batch
        self._chunk = prefill_chunk_tokens
        self._step_prefill_tokens = step_prefill_tokens
        self._sum_output_tokens = _PRIOR_OUTPUT_TOKENS * _PRIOR_ROWS
        self._num_finished = _PRIOR_ROWS

    def clear(self) -> None:
        """Forget all rows, live and waiting, and every prompt that was kept."""
        self.prefixes.clear()
        for sequence in self.live:
            self._kv.release_slot(sequence.slot)
        self.live.clear()
        self.waiting.clear()

    def has_slot(self) -> bool:
        return len(self.live) < self._max_batch

    def fits(self, sequence: Sequence) -> bool:
        """The blocks are expected to last for this row beside the live ones. A row alone always fits."""
        while self._kv.num_free_blocks < sum(blocks_for(self._expected_growth(s)) for s in [*self.live, sequence]):
            if not self.prefixes.reclaim():  # what goes may be what these rows were to share
                return not self.live
        return True

    def _expected_growth(self, sequence: Sequence) -> int:
        """Tokens that the row will still add to the cache: what nobody has computed yet, and the mean answer's rest."""
        mean_output_tokens = self._sum_output_tokens // self._num_finished
        rest = min(sequence.remaining_budget, max(1, mean_output_tokens - sequence.num_output_tokens))
        return len(sequence.token_ids) - sequence.num_computed - self.prefixes.known_tokens(sequence) + rest

    def admit(self, sequence: Sequence) -> None:
        sequence.slot = self._kv.acquire_slot()
        self.live.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        """The row has ended: give its slot and blocks back, and remember how long its answer was."""
        self._kv.release_slot(sequence.slot)
        self.prefixes.shrink()
        self.live.remove(sequence)
        self._sum_output_tokens += sequence.num_output_tokens
        self._num_finished += 1

    def shrink_batch(self, rows: list[StepRow]) -> bool:
        """The device's memory did not last for a step of these rows: the newest of them gives way, and no more rows
        than are left will be live from here. False where there is one alone."""
        if len(rows) < 2:
            return False
        tried = {id(row.sequence) for row in rows}
        self._preempt(next(sequence for sequence in reversed(self.live) if id(sequence) in tried))
        self._max_batch = len(self.live)
        torch.cuda.empty_cache()
        logger.warning("out of device memory: at most %d rows are live from here", self._max_batch)
        return True

    def plan(self, proposals: dict[int, Proposal]) -> list[StepRow]:
        """The rows of the next step, decode rows first, with their blocks reserved.

        Prefill ends at the prompt's end or at a multiple of the chunk size, so that a position is always computed in
        the same company of earlier positions; a step takes a bounded number of chunks. A prefix that another row has
        computed is shared. On shortage the newest row is pre-empted: its blocks go back and it will be recomputed, to
        the same bits.
        """
        rows: list[StepRow] = []
        room = self._step_prefill_tokens
        self.prefixes.begin_step()
        for sequence in list(self.live):
            if sequence.slot < 0:
                continue  # pre-empted by an older row of this very step
            if sequence.in_prefill:
                if not self.prefixes.adopt(sequence):
                    continue
                end = self._prefill_end(sequence, room)
                if end == sequence.num_computed:
                    continue
            else:
                end = min(len(sequence.token_ids), sequence.num_computed + REPLAY_TOKENS)
            row = StepRow(
                sequence,
                known=sequence.token_ids[sequence.num_computed : end],
                proposal=proposals.get(sequence.slot, NO_PROPOSAL),
                prefill=sequence.in_prefill,
                samples=end == len(sequence.token_ids),
            )
            if not self._reserve(row):
                continue
            if row.prefill:
                room -= len(row.known)
                self.prefixes.announce(sequence, end)
            rows.append(row)
        return sorted((r for r in rows if r.sequence.slot >= 0), key=lambda row: row.prefill)

    def segments(self, row: StepRow) -> list[Segment]:
        """What the row feeds to the forward; prefill chunk by chunk, however many go in one step."""
        start, token_ids = row.sequence.num_computed, [*row.known, *row.proposal.token_ids]
        end = start + len(token_ids)
        cuts = list(range((start // self._chunk + 1) * self._chunk, end, self._chunk)) if row.prefill else []
        segments = []
        for first, last in pairwise([start, *cuts, end]):
            wanted = range(last - first - row.num_choices, last - first) if last == end else range(0)
            segments.append(
                Segment(row.sequence.slot, token_ids[first - start : last - start], first, row.prefill, wanted)
            )
        return segments

    def _prefill_end(self, sequence: Sequence, room: int) -> int:
        """How far the row's prompt goes in this step: to its end if there is room, else to a chunk's."""
        whole = sequence.num_prompt_tokens
        if whole - sequence.num_computed <= room:
            return whole
        return max(sequence.num_computed, (sequence.num_computed + room) // self._chunk * self._chunk)

    def _reserve(self, row: StepRow) -> bool:
        """Blocks for the row's positions, taken from newer rows if need be. False where the row itself gave way."""
        sequence = row.sequence
        while not self._kv.reserve(sequence.slot, sequence.num_computed + row.num_positions):
            if self.prefixes.reclaim():
                continue
            newest = self.live[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._kv.release_slot(sequence.slot)
        sequence.slot = -1
        sequence.num_computed = 0
        sequence.was_preempted = True
        self.live.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
