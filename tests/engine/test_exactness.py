"""Whatever the method, draft length, batch or memory: the tokens are those of `transformers.generate`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from batchspec.types import Completion, FinishReason, Method, Request, SamplingParams
from tests.engine.tiny import (
    ARCHITECTURES,
    FixedRoute,
    OracleDrafter,
    build_module,
    byte_tokenizer,
    generate,
    make_engine,
    requests_for,
    run,
)

PATTERNS = {
    "all_right": [True],
    "always_wrong": [False],
    "alternately_right": [True, False],
    "right_then_wrong": [True, True, True, False],
}


def random_prompts(seed: int, count: int, longest: int = 40) -> list[str]:
    """Words from a small vocabulary, so that prompt lookup finds matches."""
    chooser = random.Random(seed)
    words = ["abc", "xyz", "12", "the ", "ok", " ", "é", "ab"]
    return ["".join(chooser.choices(words, k=chooser.randint(1, longest // 3))) for _ in range(count)]


def ids_of(prompt: str) -> list[int]:
    return byte_tokenizer()(prompt)["input_ids"]


def answers(module: Any, prompts: list[str], max_new_tokens: int) -> dict[int, list[int]]:
    return {i: generate(module, ids_of(p), max_new_tokens) for i, p in enumerate(prompts)}


def output_ids(outcomes: dict[int, Any]) -> dict[int, list[int]]:
    return {index: list(outcome.token_ids) for index, outcome in outcomes.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_d22_target_only_in_a_batch_equals_generate_row_by_row(name: str) -> None:
    module = build_module(name)
    prompts = random_prompts(1, 12)
    outcomes = run(make_engine(module, max_batch=8), requests_for(prompts, max_new_tokens=40))
    assert output_ids(outcomes) == answers(module, prompts, 40)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_d09_d10_any_draft_at_any_length_equals_generate(name: str, pattern: str) -> None:
    module = build_module(name, seed=2)
    prompts = random_prompts(3, 6)
    expected = answers(module, prompts, 40)
    for k in range(1, 9):
        engine = make_engine(
            module, max_batch=4, drafters={Method.DRAFT_MODEL: OracleDrafter(expected, PATTERNS[pattern])}
        )
        outcomes = run(engine, requests_for(prompts, max_new_tokens=40), FixedRoute(Method.DRAFT_MODEL, k))
        assert output_ids(outcomes) == expected, f"k={k}"
        accepted = sum(o.stats.num_accepted_tokens for o in outcomes.values() if isinstance(o, Completion))
        assert (accepted == 0) == (pattern == "always_wrong")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompt_lookup_equals_generate_and_speculates(name: str) -> None:
    module = build_module(name, seed=4)
    prompts = random_prompts(5, 8, longest=60)
    expected = answers(module, prompts, 48)
    for k in (1, 4, 8):
        engine = make_engine(module, max_batch=5)
        outcomes = run(engine, requests_for(prompts, max_new_tokens=48), FixedRoute(Method.PROMPT_LOOKUP, k, 1))
        assert output_ids(outcomes) == expected, f"k={k}"
        assert sum(o.stats.num_draft_tokens for o in outcomes.values() if isinstance(o, Completion)) > 0


@pytest.mark.parametrize("seed", range(20))
def test_d09_random_mixes_of_everything_equal_generate(seed: int) -> None:
    """Random architecture, batch, chunk, cache size, drafts, k, budgets: 200 prompts over the seeds."""
    chooser = random.Random(seed)
    module = build_module(chooser.choice(list(ARCHITECTURES)), seed=seed)
    prompts = random_prompts(seed, 10, longest=90)
    budgets = [chooser.randint(1, 50) for _ in prompts]
    expected = {i: generate(module, ids_of(p), b) for i, (p, b) in enumerate(zip(prompts, budgets, strict=True))}
    drafter = OracleDrafter(expected, [chooser.random() < 0.6 for _ in range(7)])
    engine = make_engine(
        module,
        max_batch=chooser.randint(1, 8),
        chunk=chooser.choice([4, 16, 64]),
        num_blocks=chooser.choice([7, 10, None]),
        drafters={Method.DRAFT_MODEL: drafter},
    )
    route = FixedRoute(chooser.choice([Method.DRAFT_MODEL, Method.PROMPT_LOOKUP]), chooser.randint(1, 8), 1)
    requests = [
        Request(i, prompt=p, sampling=SamplingParams(max_new_tokens=b))
        for i, (p, b) in enumerate(zip(prompts, budgets, strict=True))
    ]
    assert output_ids(run(engine, requests, route)) == expected


def test_preempted_rows_are_recomputed_to_the_same_tokens() -> None:
    module = build_module("llama", seed=6)
    prompts = random_prompts(7, 4, longest=20)
    expected = answers(module, prompts, 120)
    engine = make_engine(module, max_batch=4, num_blocks=10)
    outcomes = run(engine, requests_for(prompts, max_new_tokens=120), FixedRoute(Method.PROMPT_LOOKUP, 4, 1))
    assert engine.parts.scheduler.num_preemptions > 0
    assert output_ids(outcomes) == expected


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("eos_at", range(8))
def test_d01_eos_inside_an_accepted_block_ends_the_row_there(eos_at: int, k: int) -> None:
    module = build_module("llama", seed=8)
    prompt = "abcxyz12"
    whole = generate(module, ids_of(prompt), 24)
    eos = whole[eos_at]
    cut = whole[: whole.index(eos) + 1]
    module.generation_config.eos_token_id = eos
    drafter = OracleDrafter({0: whole}, [True])
    for route in (FixedRoute(), FixedRoute(Method.PROMPT_LOOKUP, k, 1), FixedRoute(Method.DRAFT_MODEL, k)):
        engine = make_engine(module, drafters={Method.DRAFT_MODEL: drafter})
        outcome = run(engine, requests_for([prompt], max_new_tokens=24), route)[0]
        assert isinstance(outcome, Completion)
        assert list(outcome.token_ids) == cut
        assert outcome.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("k", [1, 3, 10])
def test_d02_the_budget_is_never_exceeded(k: int) -> None:
    module = build_module("llama", seed=9)
    prompt = "abababababab"
    whole = generate(module, ids_of(prompt), 40)
    for budget in (1, 2, 3, k, k + 1):
        for method in (Method.PROMPT_LOOKUP, Method.DRAFT_MODEL):
            engine = make_engine(module, drafters={Method.DRAFT_MODEL: OracleDrafter({0: whole}, [True])})
            outcome = run(engine, requests_for([prompt], max_new_tokens=budget), FixedRoute(method, k, 1))[0]
            assert isinstance(outcome, Completion)
            assert list(outcome.token_ids) == whole[:budget]
            assert outcome.finish_reason is FinishReason.LENGTH
            if budget == 1:
                assert outcome.stats.num_draft_tokens == 0


def test_d03_a_model_without_end_token_runs_to_the_budget() -> None:
    module = build_module("llama")
    module.generation_config.eos_token_id = None
    module.config.eos_token_id = None
    outcome = run(
        make_engine(module), requests_for(["abab" * 4], max_new_tokens=12), FixedRoute(Method.PROMPT_LOOKUP, 4, 2)
    )[0]
    assert isinstance(outcome, Completion)
    assert outcome.output_tokens == 12
    assert outcome.finish_reason is FinishReason.LENGTH


def test_d04_any_listed_end_token_ends_the_row_in_every_method() -> None:
    module = build_module("llama", seed=10)
    prompt = "the 12 the 12"
    whole = generate(module, ids_of(prompt), 24)
    later, earlier = whole[9], whole[5]
    module.generation_config.eos_token_id = [later, earlier]
    expected = whole[: min(whole.index(later), whole.index(earlier)) + 1]
    for route in (FixedRoute(), FixedRoute(Method.PROMPT_LOOKUP, 4, 1)):
        outcome = run(make_engine(module), requests_for([prompt], max_new_tokens=24), route)[0]
        assert isinstance(outcome, Completion)
        assert list(outcome.token_ids) == expected


def test_min_new_tokens_holds_every_end_token_back() -> None:
    module = build_module("llama", seed=11)
    prompt = "okokok"
    whole = generate(module, ids_of(prompt), 30)
    eos = [whole[2], whole[4]]
    expected = generate(module, ids_of(prompt), 30, eos=eos, min_new_tokens=10)
    module.generation_config.eos_token_id = eos
    drafter = OracleDrafter({0: whole}, [True])
    for route in (FixedRoute(), FixedRoute(Method.DRAFT_MODEL, 4), FixedRoute(Method.PROMPT_LOOKUP, 4, 1)):
        engine = make_engine(module, drafters={Method.DRAFT_MODEL: drafter})
        outcome = run(engine, requests_for([prompt], max_new_tokens=30, min_new_tokens=10), route)[0]
        assert isinstance(outcome, Completion)
        assert list(outcome.token_ids) == expected


def test_d20_end_tokens_inside_prompts_are_ordinary_context() -> None:
    """Lengths, not ids, say what is context: rows with end/pad ids in the middle and at the end, beside others."""
    module = build_module("llama", seed=12)
    module.generation_config.eos_token_id = 258
    prompts = ["abc<pad>xyz<pad>", "<pad><pad>12", "the ok"]
    outcomes = run(make_engine(module, max_batch=3), requests_for(prompts, max_new_tokens=20))
    expected = {i: generate(module, ids_of(p), 20, eos=[258]) for i, p in enumerate(prompts)}
    assert output_ids(outcomes) == expected


def test_argmax_ties_go_to_the_lowest_id() -> None:
    module = build_module("llama", seed=13, dtype=torch.bfloat16, tie_word_embeddings=False)
    prompt = "abcabc"
    winner = generate(module, ids_of(prompt), 1)[0]
    with torch.no_grad():
        module.lm_head.weight[251] = module.lm_head.weight[winner]
    outcome = run(make_engine(module), requests_for([prompt], max_new_tokens=1))[0]
    assert isinstance(outcome, Completion)
    assert outcome.token_ids == (min(winner, 251),)
