"""A request inside vLLM: what it asks for, what each step gave it, and the completion that comes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchspec.engine.prompts import OutputDecoder
from batchspec.stats import DecodeCounter, DecodeStats
from batchspec.types import Completion, FinishReason, Method, Request, Route, SamplingParams, StepTimes


@dataclass(slots=True, eq=False)
class VllmRow:
    """`step_tokens` are how many tokens each step gave the row. Times are of the engine's clock, in seconds."""

    request: Request
    route: Route
    prompt_ids: list[int]
    admitted_at: float
    token_ids: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    sum_live: int = 0
    cached_input_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_at: float = 0.0
    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0

    @property
    def num_positions(self) -> int:
        """Positions that the step now running computes, as far as vLLM tells: all of the prompt for the first token."""
        return 1 if self.step_tokens else len(self.prompt_ids)

    @property
    def context_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def charge(self, forward_seconds: float, overhead_seconds: float) -> str:
        """Take a share of a step that gave the row a token; the line that the forward is on."""
        self.overhead_seconds += overhead_seconds
        if self.step_tokens:
            self.verify_seconds += forward_seconds
            return "verify"
        self.prefill_seconds += forward_seconds
        return "prefill"

    def completion(self, output: Any, decoder: OutputDecoder, now: float) -> Completion:
        """`output` is vLLM's last word on the row: a RequestOutput."""
        last = output.outputs[0]
        reason = FinishReason.LENGTH if last.finish_reason == "length" else FinishReason.STOP
        ids, text = finished_text(self.token_ids, self.request.sampling, reason, last.stop_reason, decoder)
        stats = decode_stats(len(ids), self.step_tokens, last.spec_decode_metrics, self.route.method)
        drafted = stats.num_drafts > 0
        return Completion(
            row_index=self.request.row_index,
            token_ids=tuple(ids),
            text=text,
            finish_reason=reason,
            input_tokens=len(self.prompt_ids),
            cached_input_tokens=self.cached_input_tokens,
            method=self.route.method if drafted else Method.TARGET_ONLY,
            num_speculative_tokens=self.route.num_speculative_tokens if drafted else 0,
            num_route_changes=0,
            route_reason=self.route.reason,
            mean_live_sequences=self.sum_live / len(self.step_tokens),
            stats=stats,
            times=StepTimes(
                queue_seconds=self.queue_seconds,
                first_token_seconds=self.first_token_at - self.admitted_at,
                e2e_seconds=now - self.admitted_at,
                prefill_seconds=self.prefill_seconds,
                # vLLM drafts inside the step that verifies, and does not say how long it took
                draft_seconds=0.0 if self.route.method is Method.TARGET_ONLY else None,
                verify_seconds=self.verify_seconds,
                overhead_seconds=self.overhead_seconds,
            ),
        )


def finished_text(
    token_ids: list[int],
    sampling: SamplingParams,
    reason: FinishReason,
    stop_reason: object,
    decoder: OutputDecoder,
) -> tuple[list[int], str]:
    """The ids that the row keeps, and its text. A step may have gone past the stop string that vLLM saw in its text."""
    if isinstance(stop_reason, str):
        match = decoder.find_stop(token_ids, 0, sampling.stop, sampling.min_new_tokens)
        if match is not None:
            return token_ids[: match[0]], match[1]
    ended_by_id = reason is FinishReason.STOP and not isinstance(stop_reason, str)
    return token_ids, decoder.text(token_ids[:-1] if ended_by_id else token_ids)


def decode_stats(output_tokens: int, step_tokens: Sequence[int], metrics: Any, method: Method) -> DecodeStats:
    """Our counters from vLLM's RequestSpecDecodeMetrics (level `detailed`; None for a plain engine).

    Proposed and accepted are vLLM's own numbers. It counts what it accepted behind the end of a row, too: that and the
    target token behind it are `num_discarded_tokens`. Its draft models run once per proposed token.
    """
    counter = DecodeCounter(num_target_steps=len(step_tokens))
    if metrics is not None:
        from_lookup = method is Method.PROMPT_LOOKUP
        for accepted, drafted in zip(metrics.per_step_accepted, metrics.per_step_drafted, strict=True):
            counter.record_draft(drafted, accepted, accepted < drafted, from_lookup)
        counter.num_draft_steps = 0 if from_lookup else counter.num_draft_tokens
    counter.num_discarded_tokens = sum(counter.accepted_per_pos) + len(step_tokens) - output_tokens
    return counter.freeze()


def vllm_seed(request: Request) -> int | None:
    """A stream of its own for every sampled row: equal for the same row key and seed, whatever else runs."""
    if request.sampling.greedy:
        return None
    digest = hashlib.sha256(f"{request.sampling.seed}\0{request.row_key}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:7], "big")
