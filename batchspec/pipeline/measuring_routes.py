"""Measuring an engine that decodes on one route at a time (vLLM): one engine after the other, each in a process that
gives its memory back."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from math import inf
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
from batchspec.profile.sample import sampled_completions
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
    """A profile of the plain engine and of one speculative engine per method, on as many of `requests` (a stratified
    sample) as the budget allows. An engine that no longer fits into it, by what the plain one took, is skipped and
    named."""
    from batchspec.engine.prompts import PromptEncoder, load_tokenizer

    budget = Budget(scope.budget_seconds, perf_counter())
    counts, each = occupancies(config.max_batch), budget.seconds / (1 + len(scope.methods))
    say(f"target-only: loading, decoding up to {len(requests)} rows, timing steps")
    plain = _in_own_process(config, place, requests, Route(Method.TARGET_ONLY, reason="profile"), counts, each)
    took = budget.seconds - budget.left
    if not plain.completions:
        raise InputError("no sampled row was answered: see whether the rows fit the model")
    encoder = PromptEncoder(load_tokenizer(Path(config.model)), 2**31, config.neutralize_special_tokens)
    sampled = sampled_completions(requests, plain.completions, encoder.encode)
    drafting, skipped = [], []
    if len(sampled) < len(requests):
        skipped.append(
            f"{len(requests) - len(sampled)} of {len(requests)} sampled rows: they failed, or no time was left"
        )
    for method in sorted(scope.methods):
        if took > budget.left:
            skipped.append(
                f"{method.value}: its engine would take about {took:.0f} s more, {budget.left:.0f} s are left"
            )
            continue
        route = Route(method, min(scope.max_depth, _MOST_TRIED_TOKENS), "profile", max(scope.least_matches))
        say(f"{method.value} with {route.num_speculative_tokens} tokens: the same on {len(sampled)} rows")
        answered = [s.request for s in sampled]
        drafting.append(_in_own_process(config, place, answered, route, [config.max_batch], inf))
    seconds = budget.seconds - budget.left
    return fit_profile(plain, drafting, sampled, fingerprint, config.max_batch, scope, tuple(skipped), seconds)


def _in_own_process(
    config: EngineConfig,
    place: Place,
    requests: Sequence[Request],
    route: Route,
    counts: Sequence[int],
    limit_seconds: float,
) -> RouteRun:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _set_threads, (place.threads,)) as pool:
        try:
            return pool.submit(_run, config, place, requests, route, counts, limit_seconds).result()
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
    config: EngineConfig,
    place: Place,
    requests: Sequence[Request],
    route: Route,
    counts: Sequence[int],
    limit_seconds: float,
) -> RouteRun:
    engine = load_engine(config, place.device, place.threads, 1.0, StepAttributionRule(), route)
    try:
        return run_route(engine, requests, route, counts, limit_seconds)
    finally:
        engine.close()
