"""Measuring an engine that decodes on one route at a time (vLLM): one engine after the other, each in a process that
gives its memory back."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from time import perf_counter

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine import load_engine
from batchspec.errors import BatchspecError, InputError
from batchspec.pipeline.devices import Place
from batchspec.profile.curves import occupancies
from batchspec.profile.fit import fit_profile
from batchspec.profile.records import Profile
from batchspec.profile.route_run import RouteRun, run_route
from batchspec.profile.sample import SampledCompletion
from batchspec.profile.scope import Budget, Scope
from batchspec.types import Method, Request, Route

# Tokens that the speculative engines propose while they are measured, at most.
_MOST_TRIED_TOKENS = 4


def measure_route_engines(
    config: EngineConfig,
    place: Place,
    requests: Sequence[Request],
    fingerprint: dict[str, str],
    scope: Scope,
    say: Callable[[str], None],
) -> Profile:
    """A profile of the plain engine and of one speculative engine per method, on `requests` (already a stratified
    sample). An engine that no longer fits into the budget, by what the plain one took, is skipped and named."""
    budget = Budget(scope.budget_seconds, perf_counter())
    counts = occupancies(config.max_batch)
    say(f"target-only: loading, decoding {len(requests)} rows, timing steps")
    plain = _in_own_process(config, place, requests, Route(Method.TARGET_ONLY, reason="profile"), counts)
    took = budget.seconds - budget.left
    if not plain.completions:
        raise InputError("no sampled row was answered: see whether the rows fit the model")
    drafting, skipped = [], []
    for method in sorted(scope.methods):
        if took > budget.left:
            skipped.append(
                f"{method.value}: its engine would take about {took:.0f} s more, {budget.left:.0f} s are left"
            )
            continue
        route = Route(method, min(scope.max_depth, _MOST_TRIED_TOKENS), "profile", max(scope.least_matches))
        say(f"{method.value} with {route.num_speculative_tokens} tokens: the same")
        drafting.append(_in_own_process(config, place, requests, route, [config.max_batch]))
    seconds = budget.seconds - budget.left
    sampled = _sampled(config, requests, plain)
    return fit_profile(plain, drafting, sampled, fingerprint, config.max_batch, scope, tuple(skipped), seconds)


def _in_own_process(
    config: EngineConfig, place: Place, requests: Sequence[Request], route: Route, counts: Sequence[int]
) -> RouteRun:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _set_threads, (place.threads,)) as pool:
        try:
            return pool.submit(_run, config, place, requests, route, counts).result()
        except BrokenProcessPool:
            raise BatchspecError(
                f"the process of the {route.method.value} engine died, perhaps for want of memory: lower --max-batch "
                "or --kv-memory"
            ) from None


def _set_threads(threads: int) -> None:
    """Before anything heavy is imported: libraries read these once."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.dup2(2, 1)  # the parent's standard output is for the profile alone


def _run(
    config: EngineConfig, place: Place, requests: Sequence[Request], route: Route, counts: Sequence[int]
) -> RouteRun:
    engine = load_engine(config, place.device, place.threads, 1.0, StepAttributionRule(), route)
    try:
        return run_route(engine, requests, route, counts)
    finally:
        engine.close()


def _sampled(config: EngineConfig, requests: Sequence[Request], run: RouteRun) -> list[SampledCompletion]:
    """What the run wrote, with the ids of its prompts."""
    from batchspec.engine.prompts import PromptEncoder, load_tokenizer

    encoder = PromptEncoder(load_tokenizer(Path(config.model)), 2**31, config.neutralize_special_tokens)
    request_of = {request.row_index: request for request in requests}
    found = []
    for completion in run.completions:
        request = request_of[completion.row_index]
        prompt = encoder.encode(request)
        found.append(SampledCompletion(request, (*prompt, *completion.token_ids), len(prompt)))
    return found
