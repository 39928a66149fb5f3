"""The policy of a run with a profile: the precomputed table of routes, kept honest by what the run sees. No torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt

from batchspec.profile.acceptance import DecodedRow, replay_lookup
from batchspec.profile.live_cost import LiveStepCost
from batchspec.profile.marginal import Decision, decide
from batchspec.profile.options import any_class, class_options
from batchspec.profile.policy import ANY_CLASS, StaticPolicy, beyond_measured
from batchspec.profile.records import Profile
from batchspec.types import Method, Route, StepReport
from batchspec.workload import label_of

logger = logging.getLogger(__name__)

# Proposed tokens over which a class's live acceptance is judged.
WINDOW_TOKENS = 256

# By how many standard deviations the window must fall short before a method is lost: steps differ by much.
_SURE = 2.0

# A class that fell back returns when a replay of what it writes beats the break-even by this factor.
_RETURN_MARGIN = 1.2


@dataclass
class LiveAcceptance:
    """A class's recent proposals: what they gained against what they had to, over the last steps that proposed
    `WINDOW_TOKENS` tokens. `squares` sums the squares of each step's gain or loss."""

    steps: deque[tuple[int, int, float]] = field(default_factory=deque)
    proposed: int = 0
    accepted: int = 0
    needed: float = 0.0
    squares: float = 0.0

    def add(self, proposed: int, accepted: int, break_even: float) -> None:
        self.steps.append((proposed, accepted, proposed * break_even))
        self._count(*self.steps[-1], 1)
        while self.proposed - self.steps[0][0] >= WINDOW_TOKENS:
            self._count(*self.steps.popleft(), -1)

    def _count(self, proposed: int, accepted: int, needed: float, sign: int) -> None:
        self.proposed += sign * proposed
        self.accepted += sign * accepted
        self.needed += sign * needed
        self.squares += sign * (accepted - needed) ** 2

    @property
    def full(self) -> bool:
        return self.proposed >= WINDOW_TOKENS

    @property
    def falls_short(self) -> bool:
        """Whether the proposals surely did not pay: a few long ones that failed say less than many short ones."""
        return self.full and self.needed - self.accepted > _SURE * sqrt(max(0.0, self.squares))


class MeasuredPolicy:
    """Routes by class and live occupancy, by the profile's acceptance and what steps cost as the run goes. A class
    whose live acceptance falls below the break-even loses the method that it was decoded with, wherever so little
    does not pay; prompt lookup comes back when a replay over what the class writes says it would pay."""

    def __init__(self, profile: Profile, methods: frozenset[Method], max_batch: int) -> None:
        self._cost = LiveStepCost(profile.step_cost)
        self._options = (*class_options(profile), any_class(profile))
        self._methods = methods
        self._max_batch, self._measured_rows = max_batch, profile.max_batch
        self._table: dict[tuple[int, frozenset[Method]], Mapping[str, Decision]] = {}
        self._live: dict[tuple[str, Method], LiveAcceptance] = {}
        self._replayed: dict[str, LiveAcceptance] = {}
        self._lost: dict[str, dict[Method, float]] = {}  # with the acceptance that each was lost for
        self.events: list[str] = []

    def decisions(self, occupancy: int, lost: frozenset[Method] = frozenset()) -> Mapping[str, Decision]:
        """Every class's decision at this occupancy, `*` for classes that the profile does not know; without the `lost`
        methods."""
        occupancy = max(1, min(occupancy, self._max_batch))
        if (occupancy, lost) not in self._table:
            measured = occupancy <= self._measured_rows
            methods = self._methods - lost if measured else frozenset()
            decided = decide(self._options, self._cost.cost, occupancy, methods)
            if not measured:
                reason = beyond_measured(self._measured_rows)
                decided = [replace(d, route=replace(d.route, reason=reason)) for d in decided]
            self._table[occupancy, lost] = {d.request_class: d for d in decided}
        return self._table[occupancy, lost]

    def route(self, request_class: str | None, occupancy: int) -> Route:
        return self._decision(label_of(request_class), occupancy).route

    def frozen(self, occupancy: int) -> StaticPolicy:
        """The routes at this many live rows, for ever: for rows whose text depends on their route."""
        by_class = {label: decision.route for label, decision in self.decisions(occupancy).items()}
        return StaticPolicy(by_class.pop(ANY_CLASS), by_class)

    def _decision(self, label: str, occupancy: int) -> Decision:
        decision = self._of(label, self.decisions(occupancy))
        lost = self._lost.get(label)
        if not lost:
            return decision
        too_little = frozenset(method for method, acceptance in lost.items() if acceptance < decision.break_even)
        return self._of(label, self.decisions(occupancy, too_little))

    def _of(self, label: str, decisions: Mapping[str, Decision]) -> Decision:
        return decisions.get(label) or decisions[ANY_CLASS]

    def observe(self, step: StepReport) -> None:
        if self._cost.observe(step):
            self._table.clear()
        for request_class, proposed, accepted in step.drafts:
            label = label_of(request_class)
            decision = self._decision(label, step.num_live)
            method = decision.route.method
            live = self._live.setdefault((label, method), LiveAcceptance())
            live.add(proposed, accepted, decision.break_even)
            if live.falls_short and method is not Method.TARGET_ONLY:
                self._lose(label, method, live)
        for request_class, token_ids, num_prompt_tokens in step.retired:
            label = label_of(request_class)
            if Method.PROMPT_LOOKUP in self._lost.get(label, ()):
                self._replay(label, DecodedRow(label, tuple(token_ids), num_prompt_tokens), step.num_live)

    def _lose(self, label: str, method: Method, live: LiveAcceptance) -> None:
        self._lost.setdefault(label, {})[method] = live.accepted / live.proposed
        self._event(
            f"{label}: {live.accepted} of the last {live.proposed} proposed tokens were accepted, "
            f"{live.needed:.0f} would pay; no more {method.value} where so few do not"
        )
        del self._live[label, method]

    def _replay(self, label: str, row: DecodedRow, occupancy: int) -> None:
        """Judge prompt lookup on what a row wrote: as it would propose, every proposed token counted, as in a live
        step."""
        decision = self._of(label, self.decisions(occupancy, frozenset(self._lost[label]) - {Method.PROMPT_LOOKUP}))
        route = decision.route
        if route.method is not Method.PROMPT_LOOKUP:
            return
        replayed = self._replayed.setdefault(label, LiveAcceptance())
        for cell in replay_lookup([row], route.num_speculative_tokens, route.min_match_tokens):
            k = 0 if cell.grade is None else route.tokens_for_match(cell.grade)
            if k and cell.num_steps:
                replayed.add(k * cell.num_steps, sum(cell.accepted_per_pos[:k]), decision.break_even)
        if replayed.full and replayed.accepted > replayed.needed * _RETURN_MARGIN:
            del self._lost[label][Method.PROMPT_LOOKUP]
            del self._replayed[label]
            self._event(f"{label}: replayed proposals pay again; prompt_lookup from here")

    def _event(self, text: str) -> None:
        logger.info("route: %s", text)
        self.events.append(text)
