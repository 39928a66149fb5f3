"""Step cost: which forwards are timed, and what a position, a sequence and a token of context cost by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batchspec.errors import UsageError
from batchspec.profile.records import Curve, StepCost
from batchspec.types import Method, SamplingParams

if TYPE_CHECKING:
    from batchspec.engine.engine import EngineParts
    from batchspec.engine.timing import Shape

_POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SHORT_CONTEXT = 64
_LONG_CONTEXT = 1024
_WIDE = 4
_CHUNK = 256

# Room for the positions of a wide step behind its context.
_STEP_TOKENS = 32


class StepCostTimer:
    """Times the target's forwards, and the draft model's where there is one, of an engine that is at rest. Asked again
    and again in the course of measuring, it averages over what the machine does meanwhile."""

    def __init__(self, parts: EngineParts, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        from batchspec.engine.drafters import DraftModelDrafter
        from batchspec.engine.sampling import Sampler
        from batchspec.engine.timing import StepTimer, most_tokens

        self._batch, self._clear = parts.info.max_batch, parts.scheduler.clear
        self._context = min(_LONG_CONTEXT, most_tokens(parts.model, parts.kv, self._batch) - _STEP_TOKENS)
        chunk = min(_CHUNK, most_tokens(parts.model, parts.kv, 1) // 2)
        if min(self._context, chunk) <= _SHORT_CONTEXT:
            raise UsageError("the KV cache is too small to time a full batch: raise --kv-memory, or lower --max-batch")
        drafter = parts.drafters.get(Method.DRAFT_MODEL)
        if isinstance(drafter, DraftModelDrafter):
            self._context = min(self._context, most_tokens(drafter.model, drafter.kv, self._batch) - _STEP_TOKENS)
            chunk = min(chunk, most_tokens(drafter.model, drafter.kv, 1) // 2)
        sampler = Sampler(parts.stop_ids)
        self._target_shapes = [self._shape(count) for count in _POSITIONS]
        self._draft_shapes = [self._shape(count) for count in _POSITIONS if count <= 2 * self._batch + 1]
        self._near: Shape = (self._batch, 1, _SHORT_CONTEXT, False)
        self._far: Shape = (self._batch, 1, self._context, False)
        self._wide_near: Shape = (self._batch, _WIDE, _SHORT_CONTEXT, False)
        self._wide_far: Shape = (self._batch, _WIDE, self._context, False)
        self._chunk: Shape = (1, chunk, chunk, True)
        few = [self._near, self._far, self._chunk]
        wide = [self._wide_near, self._wide_far]
        self._target = StepTimer(
            parts.model, parts.kv, sampler, _distinct(self._target_shapes + few + wide), token_ids, sampling
        )
        self._draft: StepTimer | None = None
        if isinstance(drafter, DraftModelDrafter):
            draft_shapes = _distinct(self._draft_shapes + few)
            self._draft = StepTimer(drafter.model, drafter.kv, sampler, draft_shapes, token_ids, sampling)

    def add_rounds(self, limit_seconds: float) -> None:
        """Spend up to the limit on either model."""
        self._clear()  # kept prompts hold blocks that the timed steps may need
        self._target.add_rounds(limit_seconds)
        if self._draft is not None:
            self._draft.add_rounds(limit_seconds)

    def step_cost(self, per_sequence: float, per_lookup: float) -> StepCost:
        """What the rounds so far say, with the engine's own work per row and the seconds of one row's lookup."""
        seconds = self._target.seconds()
        per_kv_token = self._per_kv_token(seconds, self._near, self._far)
        wide_per_kv_token = max(per_kv_token, self._per_kv_token(seconds, self._wide_near, self._wide_far))
        per_position_kv_token = (wide_per_kv_token - per_kv_token) / (_WIDE - 1)
        curve = _curve(seconds, self._target_shapes, per_kv_token, per_position_kv_token)
        prefill = seconds[self._chunk] / self._chunk[1]
        cost = StepCost(curve, per_kv_token, per_position_kv_token, per_sequence, per_lookup, prefill)
        if self._draft is None:
            return cost
        seconds = self._draft.seconds()
        per_kv_token = self._per_kv_token(seconds, self._near, self._far)
        return replace(
            cost,
            draft=_curve(seconds, self._draft_shapes, per_kv_token, 0.0),
            draft_per_kv_token=per_kv_token,
            draft_prefill_per_token=seconds[self._chunk] / self._chunk[1],
        )

    def _shape(self, positions: int) -> Shape:
        """About this many positions, over as many sequences as the batch allows."""
        sequences = min(positions, self._batch)
        return (sequences, -(-positions // sequences), _SHORT_CONTEXT, False)

    def _per_kv_token(self, seconds: Mapping[Shape, float], near: Shape, far: Shape) -> float:
        return max(0.0, (seconds[far] - seconds[near]) / (self._batch * (self._context - _SHORT_CONTEXT)))


def _distinct(shapes: Sequence[Shape]) -> list[Shape]:
    return list(dict.fromkeys(shapes))


def _curve(
    seconds: Mapping[Shape, float], shapes: Sequence[Shape], per_kv_token: float, per_position_kv_token: float
) -> Curve:
    """Seconds over positions, what the short context took taken off."""
    points = {}
    for shape in shapes:
        n, m, context, _ = shape
        for_context = n * context * (per_kv_token + (m - 1) * per_position_kv_token)
        points[n * m] = max(1e-6, seconds[shape] - for_context)
    counts = sorted(points)
    return Curve(tuple(counts), tuple(points[count] for count in counts)).convex()
