"""The policy of a run with a profile: the precomputed table of routes, kept honest by what the run sees. No torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchspec.profile.acceptance import DecodedRow, replay_lookup
from batchspec.profile.marginal import Decision, any_class, class_options, decide
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.records import Profile
from batchspec.types import Method, Route, StepReport
from batchspec.workload import label_of

logger = logging.getLogger(__name__)

# Proposed tokens over which a class's live acceptance is judged.
WINDOW_TOKENS = 256

# A class that fell back returns when a replay of what it writes beats the break-even by this factor.
_RETURN_MARGIN = 1.2


@dataclass
class LiveAcceptance:
    """A class's recent proposals: what they gained against what they had to."""

    steps: deque[tuple[int, int, float]] = field(default_factory=deque)
    proposed: int = 0
    accepted: int = 0
    needed: float = 0.0

    def add(self, proposed: int, accepted: int, break_even: float) -> None:
        self.steps.append((proposed, accepted, break_even))
        self.proposed += proposed
        self.accepted += accepted
        self.needed += proposed * break_even
        while self.proposed - self.steps[0][0] >= WINDOW_TOKENS:
            old_proposed, old_accepted, old_break_even = self.steps.popleft()
            self.proposed -= old_proposed
            self.accepted -= old_accepted
            self.needed -= old_proposed * old_break_even

    @property
    def full(self) -> bool:
        return self.proposed >= WINDOW_TOKENS


class MeasuredPolicy:
    """Routes by class and live occupancy. A class whose live acceptance falls below the break-even goes target-only,
    and comes back when prompt lookup, replayed over what it writes meanwhile, would pay again."""

    def __init__(self, profile: Profile, methods: frozenset[Method], max_batch: int) -> None:
        self._cost = profile.step_cost
        self._options = (*class_options(profile), any_class(profile))
        self._methods = methods
        self._max_batch = max_batch
        self._table: dict[int, Mapping[str, Decision]] = {}
        self._live: dict[str, LiveAcceptance] = {}
        self._fallen: set[str] = set()
        self.events: list[str] = []

    def decisions(self, occupancy: int) -> Mapping[str, Decision]:
        """Every class's decision at this occupancy, `*` for classes that the profile does not know."""
        occupancy = max(1, min(occupancy, self._max_batch))
        if occupancy not in self._table:
            decided = decide(self._options, self._cost, occupancy, self._methods)
            self._table[occupancy] = {d.request_class: d for d in decided}
        return self._table[occupancy]

    def route(self, request_class: str | None, occupancy: int) -> Route:
        label = label_of(request_class)
        decision = self._decision(label, occupancy)
        if label in self._fallen and decision.route.method is not Method.TARGET_ONLY:
            return Route(Method.TARGET_ONLY, reason="live acceptance is below the break-even")
        return decision.route

    def _decision(self, label: str, occupancy: int) -> Decision:
        decisions = self.decisions(occupancy)
        return decisions.get(label) or decisions[ANY_CLASS]

    def observe(self, step: StepReport) -> None:
        for request_class, proposed, accepted in step.drafts:
            label = label_of(request_class)
            live = self._live.setdefault(label, LiveAcceptance())
            live.add(proposed, accepted, self._decision(label, step.num_live).break_even)
            if live.full and live.accepted < live.needed and label not in self._fallen:
                self._fall_back(label, live)
        for request_class, token_ids, num_prompt_tokens in step.retired:
            label = label_of(request_class)
            if label in self._fallen:
                self._replay(label, DecodedRow(label, tuple(token_ids), num_prompt_tokens), step.num_live)

    def _fall_back(self, label: str, live: LiveAcceptance) -> None:
        self._fallen.add(label)
        self._event(
            f"{label}: {live.accepted} of the last {live.proposed} proposed tokens were accepted, "
            f"{live.needed:.0f} would pay; target-only from here"
        )
        self._live[label] = LiveAcceptance()

    def _replay(self, label: str, row: DecodedRow, occupancy: int) -> None:
        decision = self._decision(label, occupancy)
        live = self._live.setdefault(label, LiveAcceptance())
        k = max(1, decision.route.num_speculative_tokens)
        for cell in replay_lookup([row], k, decision.route.min_match_tokens):
            proposed = sum(cell.accepted_per_pos) + sum(cell.rejections_per_pos)
            live.add(proposed, sum(cell.accepted_per_pos), decision.break_even)
        if live.full and live.accepted > live.needed * _RETURN_MARGIN:
            self._fallen.discard(label)
            self._live[label] = LiveAcceptance()
            self._event(f"{label}: replayed proposals pay again; speculating from here")

    def _event(self, text: str) -> None:
        logger.info("route: %s", text)
        self.events.append(text)
