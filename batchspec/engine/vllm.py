"""vLLM as an engine: its offline LLM, fed row by row, one route per engine.

A vLLM engine speculates for all of its rows or for none, and with speculation built in a target-only row is slower than
in a plain engine. So an engine serves the rows of one route; a job with several routes serves them one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from batchspec.engine.meter import Meter
from batchspec.engine.prompts import OutputDecoder, PromptEncoder
from batchspec.engine.vllm_routes import TARGET_ONLY_REASON, engine_key, needs_target_only
from batchspec.engine.vllm_rows import VllmRow, vllm_seed
from batchspec.errors import RowError
from batchspec.types import (
    EngineInfo,
    Method,
    Outcome,
    Request,
    RequestSource,
    Route,
    RoutePolicy,
    RowFailure,
    StepAttribution,
)
from batchspec.workload import RequestClassifier


class VllmEngine:
    """Decodes the rows of one route with `llm`. Requests wait inside vLLM, so that it refills a slot by itself."""

    def __init__(
        self,
        llm: Any,
        route: Route,
        encoder: PromptEncoder,
        decoder: OutputDecoder,
        attribution: StepAttribution,
        meter: Meter,
        info: EngineInfo,
    ) -> None:
        self._engine = llm.llm_engine
        self._route = route
        self._encoder = encoder
        self._decoder = decoder
        self._attribution = attribution
        self._meter = meter
        self._info = info
        self._classifier = RequestClassifier()
        self._rows: dict[str, VllmRow] = {}
        self._encoded: tuple[Request, list[int]] | None = None
        self._overhead_seconds = 0.0
        self._forward_seconds = 0.0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def metered_seconds(self) -> Mapping[str, float]:
        return dict(self._meter.seconds)

    def serves(self, request: Request, policy: RoutePolicy) -> bool:
        """Whether this engine is the one for the row; rows that turn out bad are anybody's."""
        try:
            route = self._route_of(request, self._encode(request), policy)
        except RowError:
            return True
        return engine_key(route) == engine_key(self._route)

    def run(self, source: RequestSource, policy: RoutePolicy) -> Iterator[Outcome]:
        """Decode until the source ends. While the caller handles an outcome the device is idle."""
        ended = False
        while not ended or self._rows:
            self._meter.lap("idle")
            failures, ended = self._admit(source, policy)
            yield from failures
            if self._rows:
                self._meter.lap("idle")
                yield from self._step()

    def close(self) -> None:
        """End vLLM's processes."""
        self._meter.lap("idle")
        self._engine.engine_core.shutdown()

    def _admit(self, source: RequestSource, policy: RoutePolicy) -> tuple[list[Outcome], bool]:
        """Hand rows to vLLM: its batch, and a quarter more to wait. Also whether the source has ended."""
        failures: list[Outcome] = []
        room = self._info.max_batch + max(1, self._info.max_batch // 4)
        while len(self._rows) < room and not failures:
            request = source.take(wait=False)
            if request is None:
                if self._rows:
                    break
                request = source.take(wait=True)
                self._meter.lap("idle")
                if request is None:
                    return failures, True
            try:
                self._add(request, policy)
            except RowError as error:
                failures.append(RowFailure(request.row_index, error.error_type, error.message))
        if self._rows:
            self._overhead_seconds += self._meter.lap()
        else:
            self._meter.lap("failed")
        return failures, False

    def _add(self, request: Request, policy: RoutePolicy) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        admitted_at = perf_counter()
        prompt_ids = self._encode(request)
        row = VllmRow(request, self._route_of(request, prompt_ids, policy), prompt_ids, admitted_at)
        asked = request.sampling
        params = SamplingParams(
            temperature=0.0 if asked.greedy else asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=dict(asked.logit_bias) or None,
            seed=vllm_seed(request),
            stop=list(asked.stop) or None,
            max_tokens=asked.max_new_tokens,
            min_tokens=asked.min_new_tokens,
            detokenize=bool(asked.stop),
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(request.row_index)
        try:
            self._engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)
        except ValueError as error:
            raise RowError("bad_sampling", f"vLLM refuses the row's settings: {error}") from None
        self._rows[name] = row

    def _step(self) -> list[Outcome]:
        """One step of vLLM; the completions of the rows that ended in it."""
        self._overhead_seconds += self._meter.lap()
        outputs = [output for output in self._engine.step() if output.outputs[0].token_ids or output.finished]
        self._forward_seconds += self._meter.lap()
        rows = [self._rows[output.request_id] for output in outputs]
        self._charge(rows)
        now = perf_counter()
        completions: list[Outcome] = []
        for row, output in zip(rows, outputs, strict=True):
            self._commit(row, output, len(rows), now)
            if output.finished:
                del self._rows[output.request_id]
                completions.append(row.completion(output, self._decoder, now))
        return completions

    def _charge(self, rows: Sequence[VllmRow]) -> None:
        """Share the seconds since the last tokens among the rows that have got one now."""
        if not rows:
            return
        shares = self._attribution.shares([row.num_positions for row in rows], [row.context_tokens for row in rows])
        for row, share in zip(rows, shares, strict=True):
            forward, overhead = self._forward_seconds * share, self._overhead_seconds * share
            self._meter.seconds[row.charge(forward, overhead)] += forward
            self._meter.seconds["overhead"] += overhead
        self._forward_seconds = self._overhead_seconds = 0.0

    def _commit(self, row: VllmRow, output: Any, num_live: int, now: float) -> None:
        if not row.step_tokens:
            row.first_token_at = now
            row.cached_input_tokens = output.num_cached_tokens or 0
            if output.metrics is not None:
                row.queue_seconds = output.metrics.scheduled_ts - output.metrics.queued_ts
        token_ids = output.outputs[0].token_ids
        row.token_ids += token_ids
        row.sum_live += num_live
        row.step_tokens.append(len(token_ids))

    def _encode(self, request: Request) -> list[int]:
        if self._encoded is None or self._encoded[0] is not request:
            self._encoded = (request, self._encoder.encode(request))
        return self._encoded[1]

    def _route_of(self, request: Request, prompt_ids: Sequence[int], policy: RoutePolicy) -> Route:
        if needs_target_only(request.sampling):
            return Route(Method.TARGET_ONLY, reason=TARGET_ONLY_REASON)
        budget = request.sampling.max_new_tokens
        cell = self._classifier.classify(request.request_class, len(prompt_ids), budget).cell
        return policy.route(cell, self._info.max_batch)
