"""Rows that begin with the same tokens: computed once, the same tokens as ever, every block accounted for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batchspec.engine.engine import TorchEngine
from batchspec.engine.packed import Segment
from batchspec.engine.sequence import Sequence as LiveRow
from batchspec.types import Completion, Method, Request, SamplingParams
from tests.engine.test_exactness import ids_of
from tests.engine.tiny import FixedRoute, build_module, generate, make_engine, requests_for, run

PREFIX = "You are a careful clerk. Answer in one word, and never in two; if in doubt say nothing at all. Text: "
PROMPTS = [PREFIX + tail for tail in ("abc", "what is this?", "z", "abc", "one more line of it")]


def answers(engine: TorchEngine, requests: Sequence[Request], route: FixedRoute | None = None) -> list[Completion]:
    """The rows' completions in order; none of them failed."""
    outcomes = run(engine, requests, route)
    found = [outcomes[request.row_index] for request in requests]
    return [outcome for outcome in found if isinstance(outcome, Completion) or pytest.fail(str(outcome))]


def fed_tokens(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first position, tokens) of every prefill segment that the engine feeds from now on."""
    fed: list[tuple[int, int]] = []
    forward = type(engine.parts.model).forward

    def spy(self: Any, segments: Sequence[Segment], kv: Any) -> torch.Tensor:
        fed.extend((s.first_position, len(s.token_ids)) for s in segments if s.prefill)
        return forward(self, segments, kv)

    monkeypatch.setattr(type(engine.parts.model), "forward", spy)
    return fed


@pytest.mark.parametrize("architecture", ["llama", "gemma3_sliding"])
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_a_shared_prefix_is_computed_once_and_changes_no_token(
    architecture: str, max_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build_module(architecture)
    engine = make_engine(module, max_batch=max_batch, chunk=32, num_blocks=200)
    fed = fed_tokens(engine, monkeypatch)
    outcomes = answers(engine, requests_for(PROMPTS, max_new_tokens=12), FixedRoute(Method.PROMPT_LOOKUP, 3))
    for index, prompt in enumerate(PROMPTS):
        ids = ids_of(prompt)
        outcome = outcomes[index]
        assert list(outcome.token_ids) == generate(module, ids, 12)
        assert outcome.cached_input_tokens == (96 if index else 0)
    assert sum(first == 0 for first, _ in fed) == 1
    assert sum(count for _, count in fed) == sum(o.input_tokens - o.cached_input_tokens for o in outcomes)


def test_reuse_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(build_module("llama"), chunk=32, num_blocks=200, shares_prefixes=False)
    fed = fed_tokens(engine, monkeypatch)
    outcomes = answers(engine, requests_for(PROMPTS, max_new_tokens=4))
    assert all(o.cached_input_tokens == 0 for o in outcomes)
    assert sum(first == 0 for first, _ in fed) == len(PROMPTS)


def test_the_last_prompt_token_is_always_computed() -> None:
    """A prompt that is known as a whole still needs the logits of its last token."""
    module = build_module("llama")
    prompts = ["x" * 63, "x" * 63, "x" * 64, "x" * 95]
    engine = make_engine(module, max_batch=1, chunk=32, num_blocks=200)
    outcomes = answers(engine, requests_for(prompts, max_new_tokens=6))
    for index, prompt in enumerate(prompts):
        ids = ids_of(prompt)
        outcome = outcomes[index]
        assert list(outcome.token_ids) == generate(module, ids, 6)
        assert outcome.cached_input_tokens <= len(ids) - 1
    assert outcomes[1].cached_input_tokens == 32


@pytest.mark.parametrize("seed", range(1, 6))
def test_small_caches_evict_and_preempt_to_the_same_tokens(seed: int) -> None:
    chooser = random.Random(seed)
    module = build_module("llama", seed=seed)
    starts = ["a" * 70, "b" * 100, "the same beginning of many a row, long enough to be shared by them"]
    prompts = [chooser.choice(starts) + "".join(chooser.choices("xyz", k=chooser.randint(1, 40))) for _ in range(8)]
    engine = make_engine(module, max_batch=chooser.randint(2, 6), chunk=chooser.choice([8, 32]), num_blocks=12)
    outcomes = answers(engine, requests_for(prompts, max_new_tokens=150), FixedRoute(Method.PROMPT_LOOKUP, 4, 1))
    for index, prompt in enumerate(prompts):
        ids = ids_of(prompt)
        outcome = outcomes[index]
        assert list(outcome.token_ids) == generate(module, ids, 150)
    assert engine.parts.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("num_blocks", "num_kept"), [(1 + 32 * 3, 4), (1 + 32 * 9, 9)])
def test_what_nobody_needs_any_more_is_kept_up_to_a_share_of_the_cache_or_of_one_context(
    num_blocks: int, num_kept: int
) -> None:
    engine = make_engine(build_module("llama"), max_batch=2, chunk=32, num_blocks=num_blocks)
    prompts = [f"{index:03d}" + "q" * 90 for index in range(20)]
    run(engine, requests_for(prompts, max_new_tokens=2))
    assert len(engine.parts.scheduler.prefixes.kept_blocks) == num_kept


def test_rows_of_one_prefix_and_other_sampling_keep_their_own_tokens() -> None:
    module = build_module("llama")
    sampling = [SamplingParams(max_new_tokens=10, temperature=t, seed=s) for t, s in ((0, 0), (1, 1), (1, 2), (0.5, 3))]
    rows = [Request(i, prompt=PREFIX + "q", sampling=s) for i, s in enumerate(sampling)]
    shared = answers(make_engine(module, max_batch=2, chunk=32, num_blocks=200), rows)
    apart = answers(make_engine(module, max_batch=2, chunk=32, num_blocks=200, shares_prefixes=False), rows)
    for index in range(len(rows)):
        assert shared[index].token_ids == apart[index].token_ids


def test_shared_kv_is_counted_once_so_that_more_rows_fit() -> None:
    """Twelve blocks: three prompts of three blocks each with their answers, or eight that share theirs."""
    prompts = ["p" * 96 + str(index) for index in range(8)]
    live = {}
    for shares in (True, False):
        engine = make_engine(build_module("llama"), max_batch=8, chunk=32, num_blocks=13, shares_prefixes=shares)
        run(engine, requests_for([prompts[0]], max_new_tokens=4))
        outcomes = answers(engine, requests_for(prompts, max_new_tokens=20))
        live[shares] = max(o.mean_live_sequences for o in outcomes)
        assert engine.parts.scheduler.num_preemptions == 0
    assert live[True] > 1.5 * live[False]


def test_a_closed_engine_meets_its_next_rows_with_a_cold_cache() -> None:
    engine = make_engine(build_module("llama"), max_batch=2, chunk=32, num_blocks=1 + 32 * 8)
    assert answers(engine, requests_for(PROMPTS[:1], max_new_tokens=2))[0].cached_input_tokens == 0
    assert answers(engine, requests_for(PROMPTS[:1], max_new_tokens=2))[0].cached_input_tokens == 96
    engine.close()
    engine.parts.kv.check_integrity()
    assert answers(engine, requests_for(PROMPTS[:1], max_new_tokens=2))[0].cached_input_tokens == 0


def test_a_long_prefix_outlives_the_row_that_computed_it_even_where_one_row_is_live() -> None:
    """What is kept of a prompt is its beginning: the rest is of no use without it."""
    prompts = ["once upon a time there was " * 9 + tail for tail in ("a", "b", "c")]
    engine = make_engine(build_module("llama"), max_batch=1, chunk=32, num_blocks=17)
    outcomes = answers(engine, requests_for(prompts, max_new_tokens=4))
    kept_tokens = 512 // 4
    assert [o.cached_input_tokens for o in outcomes] == [0, kept_tokens, kept_tokens]


def test_what_is_given_up_to_admit_a_row_is_not_counted_as_shared_by_it() -> None:
    """The only blocks that could be freed for the row are those that it was to share: it does not fit."""
    engine = make_engine(build_module("llama"), max_batch=2, chunk=32, num_blocks=1 + 6)
    scheduler, kv = engine.parts.scheduler, engine.parts.kv
    ids = ids_of("x" * 97)
    run(engine, [Request(0, prompt="x" * 97, sampling=SamplingParams(max_new_tokens=1))])
    assert len(scheduler.prefixes.kept_blocks) == 3
    sampling = SamplingParams(max_new_tokens=1)
    other = LiveRow(Request(1, prompt="y", sampling=sampling), "c", [5], 1, admitted_at=0.0)
    scheduler.admit(other)
    assert kv.reserve(other.slot, 3 * 32)
    waiting = LiveRow(Request(2, prompt="x" * 97, sampling=sampling), "c", ids, len(ids), admitted_at=0.0)
    assert kv.num_free_blocks == 0
    assert scheduler.prefixes.known_tokens(waiting) == 96
    assert not scheduler.fits(waiting)
