"""The parts around the step: block bookkeeping, the n-gram index, what is refused, and the probe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig

from batchspec.engine import attention, checks, probe, sampling
from batchspec.engine.drafters import LookupThenDraftDrafter, PromptLookupDrafter
from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache, LayerShape
from batchspec.engine.load import library_versions
from batchspec.engine.model import wrap_model
from batchspec.engine.sampling import Sampler
from batchspec.errors import UnsupportedModelError
from batchspec.ngrams import NUM_GRADES, Match, NgramIndex, Support, continuation, grade_of
from batchspec.types import DraftRow, Method, Proposal, Request, Route, RowFailure, SamplingParams, StepReport
from tests.engine.tiny import (
    SHAPE,
    FixedRoute,
    OracleDrafter,
    build_module,
    byte_tokenizer,
    generate,
    make_engine,
    requests_for,
    run,
)


def small_cache(num_blocks: int = 9, max_sequences: int = 4) -> KVCache:
    return KVCache([LayerShape(1, 2, 2)], num_blocks, max_sequences, 256, torch.float32, torch.device("cpu"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 256)), max_size=40))
def test_blocks_are_never_lost_or_shared(operations: list[tuple[int, int]]) -> None:
    kv = small_cache()
    slots = [kv.acquire_slot() for _ in range(4)]
    for index, num_tokens in operations:
        free_before = kv.num_free_blocks
        if not kv.reserve(slots[index], num_tokens):
            assert kv.num_free_blocks == free_before
            kv.trim(slots[index], num_tokens // 2)
        kv.check_integrity()
    for slot in slots:
        kv.release_slot(slot)
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_integrity_check_names_a_shared_block() -> None:
    kv = small_cache()
    a, b = kv.acquire_slot(), kv.acquire_slot()
    kv.reserve(a, 1)
    kv.reserve(b, 1)
    kv.block_tables[b, 0] = kv.block_tables[a, 0]
    with pytest.raises(ValueError, match=r"1 held \+ 6 free"):
        kv.check_integrity()


def test_rolling_back_gives_blocks_back() -> None:
    kv = small_cache()
    slot = kv.acquire_slot()
    kv.reserve(slot, BLOCK_TOKENS + 1)
    kv.trim(slot, BLOCK_TOKENS)
    assert kv.num_free_blocks == kv.num_usable_blocks - 1


def longest_match_by_search(tokens: Sequence[int], n: int) -> int:
    """Length of the longest earlier occurrence of the end, by trying every place."""
    best = 0
    for follower in range(n, len(tokens)):
        length = 0
        while length < min(8, follower) and tokens[follower - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= n else 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 3), st.integers(0, 10))
def test_the_index_finds_the_longest_match(tokens: list[int], n: int, split: int) -> None:
    index = NgramIndex(n)
    index.extend(tokens[:split])
    index.extend(tokens)
    match = index.longest_match(tokens)
    assert (match[1] if match else 0) == longest_match_by_search(tokens, n)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], Match(2, 2, Support.ALONE)),
        ([1, 2, 3, 1, 2, 3, 1, 2], Match(5, 5, Support.AGREED)),
        ([8, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], Match(7, 2, Support.CONTRADICTED)),
        # the short match of long ago says nothing beside one that is longer by more than four tokens
        ([5, 6, 9, 0, 1, 2, 3, 4, 5, 6, 8, 7, 1, 2, 3, 4, 5, 6], Match(10, 6, Support.CONTRADICTED)),
        ([5, 6, 9, 0, 1, 2, 3, 4, 3, 5, 6, 8, 0, 1, 2, 3, 4, 3, 5, 6], Match(11, 8, Support.ALONE)),
    ],
)
def test_a_match_tells_what_the_other_places_say(tokens: list[int], expected: Match) -> None:
    index = NgramIndex(2)
    index.extend(tokens)
    assert index.longest_match(tokens) == expected
    assert grade_of(8, Support.AGREED) == NUM_GRADES - 1


@pytest.mark.parametrize(
    ("tokens", "k", "min_match", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 3, 2, (3, 9, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, 2, (4,)),
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 1, 2, (3,)),
        ([7, 7, 7], 4, 1, (7, 7, 7, 7)),
        ([1, 2, 3], 4, 1, ()),
        ([1], 4, 2, ()),
        ([1, 2, 1, 2], 0, 1, ()),
    ],
)
def test_prompt_lookup_proposes_what_followed(
    tokens: list[int], k: int, min_match: int, expected: tuple[int, ...]
) -> None:
    route = Route(Method.PROMPT_LOOKUP, k, min_match_tokens=min_match)
    row = DraftRow(0, tokens, len(tokens), k, route, SamplingParams(), "row:0")
    assert PromptLookupDrafter().propose([row])[0].token_ids == expected


def test_the_draft_model_proposes_where_nothing_matches_and_not_where_a_match_is_worth_nothing() -> None:
    """As the profile counts it."""

    class Draft:
        def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
            return [Proposal((99,), num_draft_steps=1) for _ in rows]

        def forget(self, row_index: int) -> None:
            raise NotImplementedError

    by_grade = [0] * NUM_GRADES
    by_grade[grade_of(3, Support.ALONE)] = 2
    route = Route(Method.LOOKUP_THEN_DRAFT, 2, num_tokens_by_grade=tuple(by_grade))
    texts = [[1, 2, 3], [1, 2, 8, 1, 2], [1, 2, 3, 8, 9, 1, 2, 3]]  # no match, one of two tokens, one of three
    rows = [DraftRow(i, text, 0, 2, route, SamplingParams(), "") for i, text in enumerate(texts)]
    found = LookupThenDraftDrafter(PromptLookupDrafter(), Draft()).propose(rows)
    assert [proposal.token_ids for proposal in found] == [(99,), (), (8, 9)]


def test_a_continuation_past_the_end_repeats_the_period() -> None:
    assert continuation([1, 2, 3], 1, 5) == (2, 3, 2, 3, 2)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "linear_attention": ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    "dynamic_rope": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    "longrope_per_layer_type": (
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "rope_theta": 1e4}}},
        "longrope",
    ),
    "shared_kv": ({"num_kv_shared_layers": 2}, "share keys"),
    "encoder_decoder": ({"is_encoder_decoder": True}, "encoder-decoder"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_configuration_is_refused_with_its_reason(case: str) -> None:
    changes, reason = UNSUPPORTED[case]
    config = LlamaConfig(**SHAPE)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=reason):
        checks.refuse_unsupported_config(config)


def test_a_model_with_attention_sinks_is_refused_by_keyword() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", **{**SHAPE, "num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    )
    config.layer_types = ["full_attention", "full_attention"]
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModelError, match="s_aux"):
        wrap_model("sinks", module)


def test_a_forward_that_differs_from_the_model_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.batchspec_attention

    def forgets_the_scale(*arguments: Any, scaling: float | None = None, **keywords: Any) -> Any:
        return original(*arguments, scaling=1.0, **keywords)

    monkeypatch.setattr(attention, "batchspec_attention", forgets_the_scale)
    with pytest.raises(UnsupportedModelError, match="differs from the model's own"):
        wrap_model("scaled", build_module("llama"))


def test_the_probe_sees_a_row_that_depends_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap_model("tiny", copy.deepcopy(build_module("llama", dtype=torch.bfloat16)))
    assert probe.probe_batch_invariance(model, max_rows=64) is None
    embed = model.module.get_input_embeddings()
    embed.register_forward_hook(lambda _module, _inputs, output: output * (1 + 1e-2 * (output.shape[1] > 20)))
    assert "decoded beside" in (probe.probe_batch_invariance(model, max_rows=64) or "")


def test_the_probe_sees_a_choice_that_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap_model("tiny", build_module("llama", dtype=torch.bfloat16))
    sampler = Sampler(frozenset({2}))
    assert probe.probe_engine(model, sampler) is None
    whole = sampling.find_candidates

    def alone_is_colder(logits: torch.Tensor, params: Any, width: int) -> Any:
        return whole(logits * (3.0 if len(params) == 1 else 1.0), params, width)

    monkeypatch.setattr(sampling, "find_candidates", alone_is_colder)
    assert "sampling at temperature" in (probe.probe_engine(model, sampler) or "")


def test_a_row_that_no_cache_could_hold_is_a_row_error() -> None:
    engine = make_engine(build_module("llama"), num_blocks=3)
    outcomes = run(engine, requests_for(["abc", "abc" * 30], max_new_tokens=20))
    assert isinstance(outcomes[1], RowFailure)
    assert outcomes[1].error_type == "kv_overflow"
    assert not isinstance(outcomes[0], RowFailure)


class Overreaching:
    """Proposes as many tokens as it may, whatever they are."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal(tuple([1] * row.num_tokens)) for row in rows]

    def forget(self, row_index: int) -> None:
        pass


def test_rows_of_different_routes_share_a_step_and_keep_their_own_statistics() -> None:
    class ByClass(FixedRoute):
        def route(self, request_class: str | None, occupancy: int) -> Route:
            speculative = (request_class or "").startswith("spec")
            return Route(Method.DRAFT_MODEL, 3, "by class") if speculative else Route(Method.TARGET_ONLY, 0, "by class")

    requests = [
        Request(i, prompt="abc", request_class=c, sampling=SamplingParams(max_new_tokens=8))
        for i, c in enumerate(("spec", "plain", "spec", None))
    ]
    engine = make_engine(build_module("llama"), drafters={Method.DRAFT_MODEL: Overreaching()})
    outcomes = run(engine, requests, ByClass())
    assert [outcomes[i].method for i in range(4)] == [  # type: ignore[union-attr]
        Method.DRAFT_MODEL,
        Method.TARGET_ONLY,
        Method.DRAFT_MODEL,
        Method.TARGET_ONLY,
    ]
    assert outcomes[1].stats.num_draft_tokens == 0  # type: ignore[union-attr]
    assert outcomes[0].token_ids == outcomes[1].token_ids  # type: ignore[union-attr]


def test_row_seconds_and_lines_add_up() -> None:
    engine = make_engine(build_module("llama"))
    before = dict(engine.metered_seconds)
    outcomes = run(engine, requests_for(["abc", "xyz" * 8, ""], max_new_tokens=10), FixedRoute(Method.PROMPT_LOOKUP, 2))
    spent = {line: s - before.get(line, 0.0) for line, s in engine.metered_seconds.items()}
    rows = sum(outcome.times.device_seconds for outcome in outcomes.values())
    on_rows = sum(spent.get(line, 0.0) for line in ("prefill", "draft", "verify", "overhead"))
    assert rows <= on_rows + 1e-9
    assert rows >= 0.9 * on_rows


def test_what_a_policy_learns_are_the_tokens_that_reached_the_output() -> None:
    """A block that ends inside its accepted prefix gives fewer tokens than it has."""

    class Listening(FixedRoute):
        tokens = 0

        def observe(self, step: StepReport) -> None:
            self.tokens += step.tokens

    module = build_module("llama", seed=8)
    whole = generate(module, byte_tokenizer()("abcxyz12")["input_ids"], 24)
    module.generation_config.eos_token_id = whole[5]
    policy = Listening(Method.DRAFT_MODEL, 8)
    engine = make_engine(module, drafters={Method.DRAFT_MODEL: OracleDrafter({0: whole}, [True])})
    outcome = run(engine, requests_for(["abcxyz12"], max_new_tokens=24), policy)[0]
    assert policy.tokens == outcome.output_tokens  # type: ignore[union-attr]
    assert outcome.stats.num_discarded_tokens > 0  # type: ignore[union-attr]


def test_what_an_engine_says_of_itself_loads_no_torch_where_it_is_read() -> None:
    """torch.__version__ is a class of torch's own: unpickled in the parent, it would import torch there."""
    assert {type(version) for version in library_versions().values()} == {str}
