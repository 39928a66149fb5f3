"""An engine without a model: real batching, counters and clocks around answers drawn from a hash.

It serves to try a pipeline, its input and its sizes without weights, and the tests run on it. A row's answer, and
which proposals hold, are pure functions of the row; batch mates, routes and workers change neither. Output token ids
0..255 are words, 256 is the end; input tokens are counted as one per four bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from batchspec.config import EngineConfig
from batchspec.engine.fake_answers import Answer, accepted_draft_mask, answer, count_input_tokens
from batchspec.engine.meter import Meter
from batchspec.stats import DecodeCounter
from batchspec.types import (
    Completion,
    EngineInfo,
    Method,
    Outcome,
    Request,
    RequestSource,
    Route,
    RoutePolicy,
    RowFailure,
    StepAttribution,
    StepTimes,
)
from batchspec.workload import RequestClassifier

CONTEXT_TOKENS = 8192
_NOT_ROUTED = Route(Method.TARGET_ONLY)


@dataclass(slots=True, eq=False)
class _Row:
    """A row in the batch: its answer, known from the start, and how much of it is out."""

    request: Request
    request_class: str
    answer: Answer
    input_tokens: int
    admitted: float
    overhead_seconds: float
    num_output_tokens: int = 0
    num_proposed: int = 0
    accepted_mask: list[bool] = field(default_factory=list)
    route: Route = _NOT_ROUTED
    drafting_route: Route | None = None
    num_route_changes: int = 0
    sum_live_sequences: int = 0
    counter: DecodeCounter = field(default_factory=DecodeCounter)
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.num_output_tokens == len(self.answer.token_ids)


class FakeEngine:
    """Continuous batching over canned answers; every second since loading began goes to exactly one metered line.

    `config.fake_tokens_per_second` paces the whole batch (0: no pause), `config.fake_acceptance` is the chance that a
    proposed token holds. The time in which the caller handles an outcome counts as idle: the device waits for it.
    """

    def __init__(self, config: EngineConfig, device: str, device_share: float, attribution: StepAttribution) -> None:
        self._config = config
        self._device = device
        self._attribution = attribution
        self._classifier = RequestClassifier()
        self._meter = Meter(device_share)
        self._carried_seconds = 0.0

    @classmethod
    def load(
        cls, config: EngineConfig, device: str, threads: int, device_share: float, attribution: StepAttribution
    ) -> FakeEngine:
        engine = cls(config, device, device_share, attribution)
        engine._meter.lap("load")
        return engine

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="fake",
            model="fake",
            dtype="none",
            device=self._device,
            max_batch=self._config.max_batch,
            batch_invariant=True,
            draft_model=self._config.draft_model,
        )

    @property
    def metered_seconds(self) -> Mapping[str, float]:
        return dict(self._meter.seconds)

    def run(self, source: RequestSource, policy: RoutePolicy) -> Iterator[Outcome]:
        live: list[_Row] = []
        self._meter.lap("idle")
        while True:
            failures = self._admit(source, live)
            if failures is None:
                return
            yield from self._hand_over(failures)
            if live:
                finished = self._step(live, policy)
                live = [row for row in live if not row.done]
                yield from self._hand_over(finished)

    def close(self) -> None:
        self._idle()

    def _hand_over(self, outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
        for outcome in outcomes:
            self._carried_seconds += self._meter.lap()
            yield outcome
            self._meter.lap("idle")

    def _idle(self) -> None:
        """Put the time up to here, and what was to go to rows that never came, on the idle line."""
        self._meter.lap("idle")
        self._meter.seconds["idle"] += self._carried_seconds
        self._carried_seconds = 0.0

    def _admit(self, source: RequestSource, live: list[_Row]) -> list[RowFailure] | None:
        """Fill free slots; None when the source has ended. Hands refused rows over before it takes more."""
        failures: list[RowFailure] = []
        while len(live) < self._config.max_batch and not failures:
            self._carried_seconds += self._meter.lap()
            admitted = time.perf_counter()
            request = source.take(wait=False)
            if request is None:
                if live:
                    break
                request = source.take(wait=True)
                self._idle()
                if request is None:
                    return None
                admitted = time.perf_counter()
            input_tokens, budget = count_input_tokens(request), request.sampling.max_new_tokens
            if input_tokens + budget > CONTEXT_TOKENS:
                message = (
                    f"{input_tokens} prompt tokens + max_new_tokens {budget} exceed the model's context of "
                    f"{CONTEXT_TOKENS} tokens; shorten the prompt or lower max_new_tokens"
                )
                times = StepTimes(overhead_seconds=self._meter.lap("overhead"))
                failures.append(RowFailure(request.row_index, "context_overflow", message, input_tokens, times))
                continue
            cell = self._classifier.classify(request.request_class, input_tokens, budget).cell
            row_answer = answer(request)
            live.append(_Row(request, cell, row_answer, input_tokens, admitted, self._meter.lap("overhead")))
        return failures

    def _step(self, live: list[_Row], policy: RoutePolicy) -> list[Completion]:
        """Propose, forward, accept and commit for every live row; the completions of those that ended."""
        self._carried_seconds += self._meter.lap()
        started = time.perf_counter()
        self._propose(live, policy)
        drafting = [row for row in live if row.num_proposed]
        proposing_seconds = self._meter.lap()
        if drafting:
            self._meter.seconds["draft"] += proposing_seconds
            for row in drafting:
                row.draft_seconds += proposing_seconds / len(drafting)
        else:
            self._carried_seconds += proposing_seconds

        prefilling = [row.num_output_tokens == 0 for row in live]
        shares = self._attribution.shares(
            [row.num_proposed + 1 if row.num_output_tokens else row.input_tokens for row in live],
            [row.input_tokens + row.num_output_tokens for row in live],
        )
        num_committed = sum([_commit(row, len(live)) for row in live])
        if self._config.fake_tokens_per_second:
            time.sleep(num_committed / self._config.fake_tokens_per_second)
        ended = time.perf_counter()
        self._charge_step(live, shares, prefilling, started, ended)
        return [_complete(row, ended) for row in live if row.done]

    def _propose(self, live: list[_Row], policy: RoutePolicy) -> None:
        routes: dict[str, Route] = {}
        for row in live:
            route = routes.get(row.request_class)
            if route is None:
                route = routes[row.request_class] = policy.route(row.request_class, len(live))
            if route is not row.route:
                row.num_route_changes += row.num_output_tokens > 0 and _differs(route, row.route)
                row.route = route
            num_left = row.request.sampling.max_new_tokens - row.num_output_tokens
            if route.num_speculative_tokens and row.num_output_tokens and num_left > 1:
                row.drafting_route = route
                row.num_proposed = min(route.num_speculative_tokens, num_left - 1)
                if not row.accepted_mask:
                    num_tokens = len(row.answer.token_ids)
                    row.accepted_mask = accepted_draft_mask(row.request, num_tokens, self._config.fake_acceptance)

    def _charge_step(
        self, live: list[_Row], shares: list[float], prefilling: list[bool], started: float, ended: float
    ) -> None:
        """Give the step's forward and the overhead since the last step to its rows."""
        forward_seconds, overhead_seconds = self._meter.lap(), self._carried_seconds
        self._carried_seconds = 0.0
        prefill_share = verify_share = 0.0
        for row, share, in_prefill in zip(live, shares, prefilling, strict=True):
            row.overhead_seconds += share * overhead_seconds
            if in_prefill:
                prefill_share += share
                row.prefill_seconds += share * forward_seconds
                row.queue_seconds = started - row.admitted
                row.first_token_seconds = ended - row.admitted
            else:
                verify_share += share
                row.verify_seconds += share * forward_seconds
        self._meter.seconds["overhead"] += overhead_seconds
        self._meter.seconds["prefill"] += forward_seconds * prefill_share
        self._meter.seconds["verify"] += forward_seconds * verify_share


def _differs(route: Route, earlier: Route) -> bool:
    return (route.method, route.num_speculative_tokens) != (earlier.method, earlier.num_speculative_tokens)


def _commit(row: _Row, num_live: int) -> int:
    """Put one step's tokens out: the accepted prefix and the target's token, cut where the answer ends."""
    row.sum_live_sequences += num_live
    counter = row.counter
    counter.num_target_steps += 1
    num_committed = 1
    if row.num_proposed:
        held = row.accepted_mask[row.num_output_tokens : row.num_output_tokens + row.num_proposed]
        num_accepted = held.index(False) if False in held else len(held)
        ended = row.num_output_tokens + num_accepted == len(row.answer.token_ids)
        rejected = num_accepted < row.num_proposed and not ended
        from_lookup = row.route.method is Method.PROMPT_LOOKUP
        counter.record_draft(row.num_proposed, num_accepted, rejected, from_lookup)
        if not from_lookup:
            counter.num_draft_steps += row.num_proposed
        counter.num_discarded_tokens += ended
        num_committed = num_accepted + (not ended)
        row.num_proposed = 0
    row.num_output_tokens += num_committed
    return num_committed


def _complete(row: _Row, ended: float) -> Completion:
    drafting_route = row.drafting_route
    stats = row.counter.freeze()
    return Completion(
        row_index=row.request.row_index,
        token_ids=row.answer.token_ids,
        text=row.answer.text,
        finish_reason=row.answer.finish_reason,
        input_tokens=row.input_tokens,
        cached_input_tokens=0,
        method=drafting_route.method if drafting_route else Method.TARGET_ONLY,
        num_speculative_tokens=drafting_route.num_speculative_tokens if drafting_route else 0,
        num_route_changes=row.num_route_changes,
        route_reason=(drafting_route or row.route).reason,
        mean_live_sequences=row.sum_live_sequences / stats.num_target_steps,
        stats=stats,
        times=StepTimes(
            queue_seconds=row.queue_seconds,
            first_token_seconds=row.first_token_seconds,
            e2e_seconds=ended - row.admitted,
            prefill_seconds=row.prefill_seconds,
            draft_seconds=row.draft_seconds,
            verify_seconds=row.verify_seconds,
            overhead_seconds=row.overhead_seconds,
        ),
    )
