"""Measuring an engine's own parts: seconds of forwards by shape, and a draft model's teacher-forced choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter

import torch

from batchspec.engine.drafters import DraftModelDrafter
from batchspec.engine.drafters.draft_model import fit_vocabulary
from batchspec.engine.engine import TorchEngine
from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache
from batchspec.engine.model import PackedModel
from batchspec.engine.packed import Segment
from batchspec.engine.sampling import SampledRow, Sampler
from batchspec.types import Method, SamplingParams

_MOST_ROUNDS = 15

# (sequences, positions per sequence, tokens of context before them, prefill)
Shape = tuple[int, int, int, bool]


class EngineTimer:
    """Times forwards of an engine that is at rest, on the tokens of real rows, in its own KV cache."""

    def __init__(self, engine: TorchEngine, texts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        parts = engine.parts
        self._target = parts.model
        self._kv = parts.kv
        self._sampler = Sampler(parts.stop_ids)
        self._sampling = sampling
        self._tokens = [token for text in texts for token in text]
        drafter = parts.drafters.get(Method.DRAFT_MODEL)
        self.draft: PackedModel | None = None
        self._draft_kv: KVCache | None = None
        if isinstance(drafter, DraftModelDrafter):
            self.draft, self._draft_kv = drafter.model, drafter.kv

    def most_context(self, num_sequences: int) -> int:
        """Tokens of context that this many sequences can have at once, room for a wide step left."""
        blocks = self._kv.num_usable_blocks // num_sequences
        return min(blocks * BLOCK_TOKENS, self._target.context_tokens) - 2 * BLOCK_TOKENS

    def most_draft_context(self) -> int:
        assert self.draft is not None
        return self.draft.context_tokens - 2 * BLOCK_TOKENS

    def target_seconds(self, shapes: Sequence[Shape], limit_seconds: float) -> dict[Shape, float]:
        """Median seconds per shape of a target forward and the choice of its tokens, rounds interleaved: as many as
        fit into the limit, one at least and `_MOST_ROUNDS` at most."""
        return self._seconds(self._target, self._kv, shapes, limit_seconds)

    def draft_seconds(self, shapes: Sequence[Shape], limit_seconds: float) -> dict[Shape, float]:
        """The same of the draft model."""
        assert self.draft is not None
        assert self._draft_kv is not None
        return self._seconds(self.draft, self._draft_kv, shapes, limit_seconds)

    def _seconds(
        self, model: PackedModel, kv: KVCache, shapes: Sequence[Shape], limit_seconds: float
    ) -> dict[Shape, float]:
        started, rounds = perf_counter(), list[dict[Shape, float]]()
        while len(rounds) <= _MOST_ROUNDS:
            for_another = (perf_counter() - started) / len(rounds) if rounds else 0.0
            if perf_counter() - started + for_another > limit_seconds and rounds:
                break
            order = shapes if len(rounds) % 2 else reversed(shapes)
            rounds.append({shape: self._one(model, kv, shape) for shape in order})
        warm = rounds[1:] or rounds  # the first one warms up
        return {shape: median(found[shape] for found in warm) for shape in shapes}

    def _one(self, model: PackedModel, kv: KVCache, shape: Shape) -> float:
        num_sequences, num_positions, context, prefill = shape
        slots = [kv.acquire_slot() for _ in range(num_sequences)]
        try:
            segments = []
            for index, slot in enumerate(slots):
                if not kv.reserve(slot, context + num_positions):
                    raise MemoryError(f"{num_sequences} sequences of {context} tokens exceed the KV cache")
                tokens = [self._tokens[(index * 97 + i) % len(self._tokens)] for i in range(num_positions)]
                wanted = (num_positions - 1,) if prefill else range(num_positions)
                segments.append(Segment(slot, tokens, context, prefill, wanted))
            rows = [SampledRow(self._sampling, "", 0, [], 0)] * sum(len(s.logit_offsets) for s in segments)
            started = perf_counter()
            self._sampler.choose(model.forward(segments, kv), rows)
            return perf_counter() - started
        finally:
            for slot in slots:
                kv.release_slot(slot)

    @torch.inference_mode()
    def draft_agrees(
        self, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams, row_key: str
    ) -> list[bool]:
        """For every output token of a row: does the draft model, given all tokens before it, name it?"""
        assert self.draft is not None
        assert self._draft_kv is not None
        slot = self._draft_kv.acquire_slot()
        try:
            fed = min(len(token_ids), self.draft.context_tokens)
            self._draft_kv.reserve(slot, fed)
            wanted = range(num_prompt_tokens - 1, fed - 1)
            logits = self.draft.forward([Segment(slot, token_ids[:fed], 0, True, wanted)], self._draft_kv)
            rows = [
                SampledRow(sampling, row_key, i, token_ids[: num_prompt_tokens + i], num_prompt_tokens)
                for i in range(len(wanted))
            ]
            named = self._sampler.choose(fit_vocabulary(logits, self._target.vocab_size), rows)
        finally:
            self._draft_kv.release_slot(slot)
        agreed = [a == b for a, b in zip(named, token_ids[num_prompt_tokens:], strict=False)]
        return agreed + [False] * (len(token_ids) - num_prompt_tokens - len(agreed))


def lines(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds put on each line between two readings of a meter."""
    return {line: seconds - before.get(line, 0.0) for line, seconds in after.items()}
