"""The mutable state of one row while it is decoded, and the record it becomes."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from batchspec.stats import DecodeCounter
from batchspec.types import (
    NO_PROPOSAL,
    Completion,
    DraftRow,
    FinishReason,
    Method,
    Proposal,
    Request,
    Route,
    StepTimes,
)


@dataclass(slots=True)
class Sequence:
    """A live row. `token_ids` holds prompt + committed output; the first `num_computed` of them have their K and V
    in the cache (a pre-empted row starts again at 0, and its output is fed back like any known token), those of
    `num_cached_tokens` computed by another row. `chunk_digests` are PrefixCache's."""

    request: Request
    request_class: str
    token_ids: list[int]
    num_prompt_tokens: int
    admitted_at: float
    slot: int = -1
    num_computed: int = 0
    num_cached_tokens: int = 0
    chunk_digests: list[bytes] | None = None
    was_preempted: bool = False
    route: Route | None = None
    method: Method = Method.TARGET_ONLY
    num_speculative_tokens: int = 0
    num_route_changes: int = 0
    counter: DecodeCounter = field(default_factory=DecodeCounter)
    first_forward_at: float | None = None
    first_token_at: float | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    num_steps: int = 0
    sum_live: int = 0
    finish_reason: FinishReason | None = None
    text: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def remaining_budget(self) -> int:
        return self.request.sampling.max_new_tokens - self.num_output_tokens

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.num_prompt_tokens

    @property
    def caught_up(self) -> bool:
        """Only the latest token is left to feed: the step may propose and will give the row a token."""
        return self.num_computed == len(self.token_ids) - 1 and not self.in_prefill

    def follow(self, route: Route) -> None:
        """Take a route for the next step, counting changes of method or length."""
        before = self.route
        if before is not None and (before.method, before.num_speculative_tokens) != (
            route.method,
            route.num_speculative_tokens,
        ):
            self.num_route_changes += 1
        self.route = route

    def draft_row(self, route: Route, num_tokens: int) -> DraftRow:
        request = self.request
        return DraftRow(
            request.row_index,
            self.token_ids,
            self.num_prompt_tokens,
            num_tokens,
            route,
            request.sampling,
            request.row_key,
        )

    def count_step(self, row: StepRow, num_live: int) -> None:
        """Count a step of this row, whose outcome is noted on `row`.

        A proposal behind the token that ended the row was never judged; a block that ends inside its accepted prefix
        leaves its target token unused.
        """
        self.num_steps += 1
        self.sum_live += num_live
        if not row.samples:
            return
        self.counter.num_target_steps += 1
        num_proposed = len(row.proposal.token_ids)
        ended_inside = row.num_kept == row.num_accepted
        self.counter.num_discarded_tokens += ended_inside
        if num_proposed:
            assert self.route is not None
            self.method = self.route.method
            self.num_speculative_tokens = max(self.num_speculative_tokens, self.route.num_speculative_tokens)
            rejected = row.num_accepted < num_proposed and not ended_inside
            self.counter.record_draft(num_proposed, row.num_accepted, rejected, row.proposal.from_lookup)

    def times(self, now: float) -> StepTimes:
        first_forward_at = self.first_forward_at if self.first_forward_at is not None else now
        first_token_at = self.first_token_at if self.first_token_at is not None else now
        return StepTimes(
            queue_seconds=first_forward_at - self.admitted_at,
            first_token_seconds=first_token_at - self.admitted_at,
            e2e_seconds=now - self.admitted_at,
            prefill_seconds=self.prefill_seconds,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            overhead_seconds=self.overhead_seconds,
        )

    def completion(self, now: float) -> Completion:
        assert self.finish_reason is not None
        assert self.text is not None
        return Completion(
            row_index=self.request.row_index,
            token_ids=tuple(self.output_ids),
            text=self.text,
            finish_reason=self.finish_reason,
            input_tokens=self.num_prompt_tokens,
            cached_input_tokens=self.num_cached_tokens,
            method=self.method,
            num_speculative_tokens=self.num_speculative_tokens,
            num_route_changes=self.num_route_changes,
            route_reason=self.route.reason if self.route else "",
            mean_live_sequences=self.sum_live / max(1, self.num_steps),
            stats=self.counter.freeze(),
            times=self.times(now),
        )


@dataclass(slots=True)
class StepRow:
    """What one sequence brings to one step: known tokens to feed, and what was proposed after them; and, once the step
    is committed, how many tokens of its block the row kept, and how many of these were proposals."""

    sequence: Sequence
    known: Tokens[int]
    proposal: Proposal = NO_PROPOSAL
    prefill: bool = False
    samples: bool = False
    num_kept: int = 0
    num_accepted: int = 0

    @property
    def num_positions(self) -> int:
        return len(self.known) + len(self.proposal.token_ids)

    @property
    def num_choices(self) -> int:
        """Positions whose target token is wanted: the last known token's, and each proposal's."""
        return 1 + len(self.proposal.token_ids) if self.samples else 0
