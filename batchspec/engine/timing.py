"""Measuring an engine's own parts: seconds of forwards by shape, and of its meter's lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from time import perf_counter

from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache
from batchspec.engine.model import PackedModel
from batchspec.engine.packed import Segment
from batchspec.engine.sampling import SampledRow, Sampler
from batchspec.types import SamplingParams

# Rounds of one call at most: what more of them would tell is better asked at another time.
_MOST_ROUNDS = 6

# (sequences, positions per sequence, tokens of context before them, prefill)
Shape = tuple[int, int, int, bool]


class StepTimer:
    """Times forwards of one model of an engine that is at rest, and the choice of their tokens, on the tokens of real
    rows in the model's own KV cache. Rounds add up over calls: a machine's speed changes within minutes."""

    def __init__(
        self,
        model: PackedModel,
        kv: KVCache,
        sampler: Sampler,
        shapes: Sequence[Shape],
        token_ids: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._shapes = tuple(shapes)
        self._tokens = token_ids
        self._sampling = sampling
        self._rounds: list[dict[Shape, float]] = []

    def add_rounds(self, limit_seconds: float) -> None:
        """Time every shape in turn: after a round that warms up, as many as fit into the limit, one at least."""
        started = perf_counter()
        self._round()
        for done in range(_MOST_ROUNDS):
            spent = perf_counter() - started
            if done and spent + spent / (done + 1) > limit_seconds:
                return
            self._rounds.append(self._round())

    def seconds(self) -> dict[Shape, float]:
        """Mean seconds of a forward by shape, without the fastest and the slowest tenth. Where a machine has a fast and
        a slow state, a median would take the one for some shapes and the other for their neighbours."""
        return {shape: _trimmed_mean([found[shape] for found in self._rounds]) for shape in self._shapes}

    def _round(self) -> dict[Shape, float]:
        order = self._shapes if len(self._rounds) % 2 else self._shapes[::-1]
        return {shape: self._one(shape) for shape in order}

    def _one(self, shape: Shape) -> float:
        num_sequences, num_positions, context, prefill = shape
        slots = [self._kv.acquire_slot() for _ in range(num_sequences)]
        try:
            segments = []
            for index, slot in enumerate(slots):
                if not self._kv.reserve(slot, context + num_positions):
                    raise MemoryError(f"{num_sequences} sequences of {context} tokens exceed the KV cache")
                tokens = [self._tokens[(index * 97 + i) % len(self._tokens)] for i in range(num_positions)]
                wanted = (num_positions - 1,) if prefill else range(num_positions)
                segments.append(Segment(slot, tokens, context, prefill, wanted))
            rows = [SampledRow(self._sampling, "", 0, [], 0)] * sum(len(s.logit_offsets) for s in segments)
            started = perf_counter()
            self._sampler.choose(self._model.forward(segments, self._kv), rows)
            return perf_counter() - started
        finally:
            for slot in slots:
                self._kv.release_slot(slot)


def _trimmed_mean(seconds: Sequence[float]) -> float:
    cut = -(-len(seconds) // 10) if len(seconds) > 2 else 0
    return mean(sorted(seconds)[cut : len(seconds) - cut])


def most_tokens(model: PackedModel, kv: KVCache, num_sequences: int) -> int:
    """Tokens that each of this many sequences can have at once."""
    return min(kv.num_usable_blocks // num_sequences * BLOCK_TOKENS, model.context_tokens)


def lines(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds put on each line between two readings of a meter."""
    return {line: seconds - before.get(line, 0.0) for line, seconds in after.items()}
