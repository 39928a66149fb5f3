"""The engine: continuous batching with speculation. One step reads top to bottom as
admit, propose, forward, accept, commit, retire."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

from batchspec.engine.acceptance import AcceptanceRule, Block
from batchspec.engine.kv_cache import KVCache, blocks_for
from batchspec.engine.meter import Meter
from batchspec.engine.model import PackedModel
from batchspec.engine.packed import Segment
from batchspec.engine.prompts import OutputDecoder, PromptEncoder
from batchspec.engine.scheduler import Scheduler
from batchspec.engine.sequence import Sequence, StepRow
from batchspec.errors import RowError
from batchspec.types import (
    Drafter,
    DraftRow,
    EngineInfo,
    FinishReason,
    Method,
    Outcome,
    Proposal,
    Request,
    RequestSource,
    RoutePolicy,
    RowFailure,
    StepAttribution,
    StepReport,
)
from batchspec.workload import RequestClassifier

_DECODE_LINES = ("draft", "verify", "overhead")


@dataclass(frozen=True)
class EngineParts:
    """What an engine is put together from; `load.py` builds them from a configuration, tests by hand."""

    model: PackedModel
    kv: KVCache
    scheduler: Scheduler
    encoder: PromptEncoder
    decoder: OutputDecoder
    rule: AcceptanceRule
    stop_ids: frozenset[int]
    drafters: Mapping[Method, Drafter]
    attribution: StepAttribution
    meter: Meter
    info: EngineInfo


class TorchEngine:
    """Decodes requests with a `PackedModel`. Rows of different routes share every step; a target-only row is a row
    with an empty proposal."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._classifier = RequestClassifier()

    @property
    def info(self) -> EngineInfo:
        return self.parts.info

    @property
    def metered_seconds(self) -> Mapping[str, float]:
        return dict(self.parts.meter.seconds)

    def run(self, source: RequestSource, policy: RoutePolicy) -> Iterator[Outcome]:
        """Decode until the source ends. While the caller handles an outcome the device is idle."""
        scheduler = self.parts.scheduler
        ended = False
        while not ended or scheduler.live or scheduler.waiting:
            self.parts.meter.lap("idle")
            outcomes, ended = self._step(source, policy)
            yield from outcomes

    def close(self) -> None:
        """Give up the rows in flight and the prompts that were kept: what comes next meets a cold cache."""
        self.parts.scheduler.clear()

    def _step(self, source: RequestSource, policy: RoutePolicy) -> tuple[list[Outcome], bool]:
        failures, ended = self._admit(source)
        proposals = self._propose(policy)
        rows = self.parts.scheduler.plan(proposals)
        try:
            blocks = self._accept(rows, self._forward(rows))
        except torch.OutOfMemoryError:  # nothing is text yet: the next step does it again with fewer rows
            if not self.parts.scheduler.shrink_batch(rows):
                raise
            rows, blocks = [], []
        finished = self._commit(rows, blocks)
        completions = self._retire(rows, finished)
        policy.observe(self._report(rows, finished))
        return failures + completions, ended

    def _admit(self, source: RequestSource) -> tuple[list[Outcome], bool]:
        """Fill free slots while the KV blocks are expected to last: pre-empted rows first, then new ones.

        Returns the rows that failed at the door, and whether the source has ended.
        """
        scheduler, meter = self.parts.scheduler, self.parts.meter
        failures: list[Outcome] = []
        while scheduler.has_slot():
            if not scheduler.waiting:
                waits = not scheduler.live and not failures  # only with every outcome handed over
                request = source.take(wait=waits)
                if waits:
                    meter.lap("idle")
                if request is None:
                    return failures, waits
                try:
                    scheduler.waiting.append(self._new_sequence(request))
                except RowError as error:
                    failures.append(RowFailure(request.row_index, error.error_type, error.message))
                    if not scheduler.live:
                        meter.lap("failed")
                    continue
            if not scheduler.fits(scheduler.waiting[0]):
                break
            scheduler.admit(scheduler.waiting.popleft())
        return failures, False

    def _new_sequence(self, request: Request) -> Sequence:
        now = perf_counter()
        prompt_ids = self.parts.encoder.encode(request)
        budget = request.sampling.max_new_tokens
        need, have = blocks_for(len(prompt_ids) + budget), self.parts.kv.num_usable_blocks
        if need > have:
            raise RowError(
                "kv_overflow",
                f"{len(prompt_ids)} prompt tokens + max_new_tokens {budget} need {need} KV blocks of {have}; "
                "raise --kv-memory or lower max_new_tokens",
            )
        outside = [token for token, _ in request.sampling.logit_bias if not 0 <= token < self.parts.model.vocab_size]
        if outside:
            raise RowError("bad_sampling", f"logit_bias names token ids outside the vocabulary: {outside}")
        cell = self._classifier.classify(request.request_class, len(prompt_ids), budget).cell
        return Sequence(request, cell, prompt_ids, len(prompt_ids), admitted_at=now)

    def _propose(self, policy: RoutePolicy) -> dict[int, Proposal]:
        """Ask each speculative row's drafter for up to k tokens, never more than the budget leaves before its last.

        Returns proposals by slot.
        """
        scheduler = self.parts.scheduler
        overhead = self.parts.meter.lap("overhead" if scheduler.live else "failed")
        asking: dict[Method, list[tuple[Sequence, DraftRow]]] = defaultdict(list)
        for sequence in scheduler.live:
            sequence.overhead_seconds += overhead / len(scheduler.live)
            if not sequence.caught_up:
                continue
            if sequence.route is None or not self.parts.rule.fixes_route:
                sequence.follow(policy.route(sequence.request_class, len(scheduler.live)))
            route = sequence.route
            assert route is not None
            room = min(route.num_speculative_tokens, sequence.remaining_budget - 1)
            if route.method is not Method.TARGET_ONLY and room > 0:
                asking[route.method].append((sequence, sequence.draft_row(route, room)))

        proposals: dict[int, Proposal] = {}
        for method, asked in asking.items():
            drafted = self.parts.drafters[method].propose([row for _, row in asked])
            seconds = self.parts.meter.lap("draft") / len(asked)
            for (sequence, _), proposal in zip(asked, drafted, strict=True):
                sequence.draft_seconds += seconds
                sequence.counter.num_draft_steps += proposal.num_draft_steps
                proposals[sequence.slot] = proposal
        return proposals

    def _forward(self, rows: list[StepRow]) -> torch.Tensor:
        """One ragged target pass over every row's known tokens and proposals; logits [sum of num_choices, vocab]."""
        if not rows:
            return torch.empty(0, 0)
        now = perf_counter()
        segments: list[Segment] = []
        for row in rows:
            sequence = row.sequence
            sequence.first_forward_at = sequence.first_forward_at or now
            segments += self.parts.scheduler.segments(row)
        return self.parts.model.forward(segments, self.parts.kv)

    def _accept(self, rows: list[StepRow], logits: torch.Tensor) -> list[Block]:
        """Per row, the block that the target writes: the accepted prefix and one token of its own."""
        blocks = self.parts.rule.blocks(logits, rows)
        self._attribute_forward(rows)
        return blocks

    def _commit(self, rows: list[StepRow], blocks: list[Block]) -> list[Sequence]:
        """Append the blocks, cut where the row ends, count, and roll the KV cache back to what is now text.

        Returns the rows that ended.
        """
        now = perf_counter()
        finished = []
        for row, (block, num_accepted) in zip(rows, blocks, strict=True):
            sequence = row.sequence
            num_kept = self._end_of(sequence, block) if row.samples else 0
            num_accepted = min(num_accepted, num_kept)
            sequence.token_ids += block[:num_kept]
            computed_before = sequence.num_computed
            sequence.num_computed += len(row.known) + num_accepted
            if row.prefill:
                self.parts.scheduler.prefixes.keep(sequence, computed_before)
            row.num_kept, row.num_accepted = num_kept, num_accepted
            sequence.count_step(row, num_live=len(rows))
            self.parts.kv.trim(sequence.slot, sequence.num_computed)
            if row.samples and sequence.first_token_at is None:
                sequence.first_token_at = now
            if sequence.finish_reason is not None:
                finished.append(sequence)
        return finished

    def _end_of(self, sequence: Sequence, block: list[int]) -> int:
        """How many of the block's tokens the row keeps: up to an end-of-sequence id, the token that completes a stop
        string, or the budget, whichever comes first. Notes the reason on the sequence."""
        params = sequence.request.sampling
        kept = next((i + 1 for i, token in enumerate(block) if token in self.parts.stop_ids), len(block))
        before = sequence.num_output_tokens
        output = sequence.output_ids + block[:kept]
        if output[-1] in self.parts.stop_ids:
            sequence.finish_reason = FinishReason.STOP
            output.pop()
        elif sequence.remaining_budget == kept:
            sequence.finish_reason = FinishReason.LENGTH
        decoder = self.parts.decoder
        match = decoder.find_stop(output, before, params.stop, params.min_new_tokens) if params.stop else None
        if match is not None:
            sequence.finish_reason = FinishReason.STOP
            kept, sequence.text = match[0] - before, match[1]
        elif sequence.finish_reason is not None:
            sequence.text = decoder.text(output)
        return kept

    def _retire(self, rows: list[StepRow], finished: list[Sequence]) -> list[Outcome]:
        """Attribute the step's remaining time, and turn ended rows into completions."""
        overhead = self.parts.meter.lap("overhead" if rows else "failed" if self.parts.scheduler.live else None)
        for row in rows:
            row.sequence.overhead_seconds += overhead / len(rows)
        now = perf_counter()
        completions: list[Outcome] = []
        for sequence in finished:
            self.parts.scheduler.retire(sequence)
            for drafter in self.parts.drafters.values():
                drafter.forget(sequence.request.row_index)
            completions.append(sequence.completion(now))
        return completions

    def _report(self, rows: list[StepRow], finished: list[Sequence]) -> StepReport:
        """What the policy learns: tokens per device second, and how each class's proposals fared."""
        drafts = [
            (row.sequence.request_class, len(row.proposal.token_ids), row.num_accepted)
            for row in rows
            if row.proposal.token_ids
        ]
        decode = self.parts.meter.since_last(*_DECODE_LINES)
        forward_seconds = decode["verify"] / self.parts.meter.device_share
        return StepReport(
            num_live=len(rows),
            tokens=sum(row.num_kept for row in rows),
            decode_seconds=sum(decode.values()),
            forward_seconds=None if any(row.prefill for row in rows) else forward_seconds,
            context_tokens=sum(row.sequence.num_computed for row in rows),
            num_preemptions=self.parts.scheduler.num_preemptions,
            drafts=drafts,
            retired=[(s.request_class, s.token_ids, s.num_prompt_tokens) for s in finished],
        )

    def _attribute_forward(self, rows: list[StepRow]) -> None:
        """Split the seconds since the proposals among the rows of the forward."""
        if not rows:
            return
        seconds = self.parts.meter.lap()
        shares = self.parts.attribution.shares(
            [row.num_positions for row in rows],
            [row.sequence.num_computed + row.num_positions for row in rows],
        )
        for row, share in zip(rows, shares, strict=True):
            line = "prefill" if row.prefill else "verify"
            self.parts.meter.seconds[line] += seconds * share
            if row.prefill:
                row.sequence.prefill_seconds += seconds * share
            else:
                row.sequence.verify_seconds += seconds * share
