"""A part of the job without speculation, drawn at random, so that its saving is measured and not believed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from batchspec.profile.measured import MeasuredPolicy
from batchspec.types import Method, Route, RoutePolicy, StepReport

# Long enough that a block's rate is worth comparing, short enough that its neighbours saw the same rows.
BLOCK_STEPS = 16

# A block: tokens committed, device seconds of decoding.
Block = tuple[int, float]


@dataclass(frozen=True)
class Pair:
    """A held block and the blocks beside it: (tokens, decode device seconds) of each side."""

    held: Block
    beside: Block


class HoldoutPolicy:
    """Runs random blocks of steps target-only for all rows, and keeps each beside its neighbours."""

    def __init__(self, policy: RoutePolicy, share: float, seed: int) -> None:
        self._policy = policy
        self._share = share
        self._random = random.Random(seed)
        self._held = False
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._before: Block | None = None
        self._open: tuple[Block, Block | None] | None = None  # a held block, and what was before it
        self.pairs: list[Pair] = []

    @property
    def events(self) -> tuple[str, ...]:
        """What the policy changed on its own, and why."""
        return tuple(self._policy.events) if isinstance(self._policy, MeasuredPolicy) else ()

    def route(self, request_class: str | None, occupancy: int) -> Route:
        route = self._policy.route(request_class, occupancy)
        return replace(route, method=Method.TARGET_ONLY, reason="holdout") if self._held else route

    def observe(self, step: StepReport) -> None:
        self._policy.observe(step)
        self._steps += 1
        self._tokens += step.tokens
        self._seconds += step.decode_seconds
        if self._steps == BLOCK_STEPS:
            self._close((self._tokens, self._seconds))
            self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def _close(self, block: Block) -> None:
        """Keep a finished block, and draw whether the next is held. Two held blocks never touch."""
        if self._held:
            self._open = (block, self._before)
            self._held = False
            return
        if self._open is not None:
            held, before = self._open
            around = block if before is None else (block[0] + before[0], block[1] + before[1])
            self.pairs.append(Pair(held, around))
            self._open = None
        self._before = block
        # no draw follows a held block, so that this share of those that do follow another holds `share` of all
        self._held = self._random.random() < self._share / (1 - self._share)
