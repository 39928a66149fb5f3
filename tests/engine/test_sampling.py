"""Sampling: the target's distribution exactly, the same text on every route, and every option at every position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.engine import acceptance, noise
from batchspec.engine.acceptance import RejectionRule, draw, sampled_row
from batchspec.engine.drafters import DraftModelDrafter, LookupThenDraftDrafter, PromptLookupDrafter
from batchspec.engine.model import wrap_model
from batchspec.engine.sampling import SampledRow, Sampler, find_candidates
from batchspec.engine.sequence import Sequence as Row
from batchspec.engine.sequence import StepRow
from batchspec.profile.scope import ListSource
from batchspec.types import Completion, Method, Proposal, Request, Route, SamplingParams, StepReport
from tests.engine.tiny import (
    FixedRoute,
    build_module,
    byte_tokenizer,
    generate,
    make_engine,
    run,
)

PROMPTS = ["abc abc abc", "the 12 the 12 the", "xyz", "ok ok ab ok ok"]


def noisy_copy(module: Any, scale: float) -> Any:
    """A draft that mostly agrees: the module with noise on its weights."""
    made = copy.deepcopy(module)
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += scale * parameter.std() * torch.randn_like(parameter)
    return made


def draft_engine(module: Any, draft: Any, rule: str = "coupled", **options: Any) -> Any:
    """An engine with all drafters, the draft model's cache as large as the target's."""
    engine = make_engine(module, rule=rule, **options)
    model = wrap_model("draft", copy.deepcopy(draft))
    slots = options.get("max_batch", 8)
    drafter = DraftModelDrafter(
        model, model.new_cache(1 + 16 * slots, slots), Sampler(frozenset()), frozenset(), 260, rule
    )
    engine.parts.drafters[Method.DRAFT_MODEL] = drafter
    engine.parts.drafters[Method.LOOKUP_THEN_DRAFT] = LookupThenDraftDrafter(PromptLookupDrafter(), drafter)
    return engine


def requests(params: Sequence[SamplingParams], prompts: Sequence[str] = PROMPTS) -> list[Request]:
    return [Request(i, prompt=p, sampling=params[i % len(params)]) for i, p in enumerate(prompts)]


def ids(outcomes: dict[int, Any]) -> dict[int, tuple[int, ...]]:
    return {index: outcome.token_ids for index, outcome in outcomes.items()}


# --- coupled: the route does not matter -------------------------------------------------------------------------

MIXED = [
    SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=7),
    SamplingParams(max_new_tokens=24, temperature=1.3, top_k=5, seed=7),
    SamplingParams(max_new_tokens=24),
    SamplingParams(max_new_tokens=24, temperature=1.0, min_p=0.05, repetition_penalty=1.2, seed=3),
]


@pytest.mark.parametrize("draft", ["good", "noisy", "bad"])
@pytest.mark.parametrize("method", [Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT, Method.PROMPT_LOOKUP])
def test_sampled_text_is_the_same_on_every_route(method: Method, draft: str) -> None:
    module = build_module("llama", seed=30)
    drafts = {"good": module, "noisy": noisy_copy(module, 0.1), "bad": build_module("llama", seed=31)}
    expected = ids(run(make_engine(module, max_batch=1), requests(MIXED)))
    accepted = 0
    for k in (1, 2, 4, 8):
        outcomes = run(draft_engine(module, drafts[draft], max_batch=3), requests(MIXED), FixedRoute(method, k, 2))
        assert ids(outcomes) == expected, f"k={k}"
        accepted += sum(o.stats.num_accepted_tokens for o in outcomes.values() if isinstance(o, Completion))
    assert accepted > 0 or draft == "bad" or method is Method.PROMPT_LOOKUP


def test_d02_a_perfect_draft_is_always_accepted_under_the_coupled_rule() -> None:
    module = build_module("llama", seed=30)
    outcomes = run(draft_engine(module, module), requests(MIXED), FixedRoute(Method.DRAFT_MODEL, 4))
    for outcome in outcomes.values():
        assert isinstance(outcome, Completion)
        assert outcome.stats.acceptance_rate == 1.0
        assert outcome.stats.num_draft_steps == outcome.stats.num_draft_tokens


def test_lookup_then_draft_counts_its_two_sources_apart() -> None:
    module = build_module("llama", seed=30)
    outcomes = run(draft_engine(module, module), requests(MIXED[2:3]), FixedRoute(Method.LOOKUP_THEN_DRAFT, 3, 2))
    stats = [o.stats for o in outcomes.values() if isinstance(o, Completion)]
    assert any(0 < s.num_lookup_draft_tokens < s.num_draft_tokens for s in stats)
    assert all(s.num_lookup_accepted_tokens <= s.num_lookup_draft_tokens for s in stats)


def test_a_draft_catches_up_after_steps_in_which_it_was_not_asked() -> None:
    class EverySecondStep(FixedRoute):
        calls = 0

        def route(self, request_class: str | None, occupancy: int) -> Any:
            self.calls += 1
            chosen = (Method.DRAFT_MODEL, 3) if self.calls % 3 == 0 else (Method.TARGET_ONLY, 0)
            return FixedRoute(*chosen).route(request_class, occupancy)

    module = build_module("llama", seed=30)
    expected = ids(run(make_engine(module), requests(MIXED)))
    outcomes = run(draft_engine(module, module), requests(MIXED), EverySecondStep())
    assert ids(outcomes) == expected
    for outcome in outcomes.values():
        assert isinstance(outcome, Completion)
        assert outcome.stats.acceptance_rate == 1.0
        assert outcome.num_route_changes > 0


@pytest.mark.parametrize("draft_vocab", [250, 272])
def test_d12_a_draft_with_padded_or_narrower_logits_is_exact(draft_vocab: int) -> None:
    module = build_module("llama", seed=30)
    draft = build_module("llama", seed=32, vocab_size=draft_vocab, pad_token_id=None)
    expected = ids(run(make_engine(module), requests(MIXED)))
    assert ids(run(draft_engine(module, draft), requests(MIXED), FixedRoute(Method.DRAFT_MODEL, 3))) == expected


def test_a_draft_model_does_not_begin_to_read_what_the_rest_of_the_row_cannot_repay() -> None:
    class Late:
        """Target-only until so many tokens are written (as where many rows are live), then the draft model."""

        def __init__(self, after: int) -> None:
            self._steps_left = after

        def route(self, request_class: str | None, occupancy: int) -> Route:
            self._steps_left -= 1
            drafts = Route(Method.DRAFT_MODEL, 3, most_lag_per_token=2.0)
            return drafts if self._steps_left < 0 else Route(Method.TARGET_ONLY)

        def observe(self, step: StepReport) -> None:
            pass

    module, prompt = build_module("llama"), "a prompt of forty tokens, give or take."
    expected = generate(module, byte_tokenizer()(prompt)["input_ids"], 32)
    for after, drafts in ((0, True), (4, True), (24, False)):
        engine = draft_engine(module, module, max_batch=1)
        row = Request(0, prompt=prompt, sampling=SamplingParams(max_new_tokens=32))
        (outcome,) = engine.run(ListSource([row]), Late(after))
        assert isinstance(outcome, Completion)
        assert list(outcome.token_ids) == expected
        assert (outcome.stats.num_draft_tokens > 0) == drafts


def test_a_draft_with_a_shorter_context_declines_beyond_it() -> None:
    module = build_module("llama", seed=30)
    draft = build_module("llama", seed=30, max_position_embeddings=30)
    outcome = run(draft_engine(module, draft), requests(MIXED[2:3], PROMPTS[:1]), FixedRoute(Method.DRAFT_MODEL, 2))[0]
    assert isinstance(outcome, Completion)
    assert list(outcome.token_ids) == generate(module, byte_tokenizer()(PROMPTS[0])["input_ids"], 24)
    assert 0 < outcome.stats.num_drafts < outcome.stats.num_target_steps - 1


def test_d23_a_row_keeps_its_text_in_any_order_company_and_batch() -> None:
    module = build_module("llama", seed=33)
    params = [SamplingParams(max_new_tokens=16, temperature=1.0, seed=s) for s in (1, 2, 0)]
    rows = [Request(i, prompt="abc", request_id=f"r{i}", sampling=params[i % 3]) for i in range(6)]
    alone = {row.request_id: run(make_engine(module, max_batch=1), [row])[row.row_index].token_ids for row in rows}  # type: ignore[union-attr]
    shuffled = [Request(5 - i, prompt="abc", request_id=r.request_id, sampling=r.sampling) for i, r in enumerate(rows)]
    together = run(make_engine(module, max_batch=4), shuffled)
    assert {row.request_id: together[row.row_index].token_ids for row in shuffled} == alone  # type: ignore[union-attr]
    assert len(set(alone.values())) == 6


def test_the_row_index_is_the_key_where_there_is_no_id() -> None:
    module = build_module("llama", seed=33)
    params = SamplingParams(max_new_tokens=16, temperature=1.0)
    both = run(make_engine(module), [Request(i, prompt="abc", sampling=params) for i in (3, 4)])
    assert both[3].token_ids != both[4].token_ids  # type: ignore[union-attr]
    assert run(make_engine(module), [Request(4, prompt="abc", sampling=params)])[4].token_ids == both[4].token_ids  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1e-4}, True),
        ({"temperature": 1.0, "top_p": 1e-9}, True),
        ({"temperature": 1.0, "top_k": 10**9}, False),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, False),
    ],
)
def test_d24_corners_of_temperature_and_filters(changes: dict[str, Any], greedy: bool) -> None:
    module = build_module("llama", seed=34)
    params = SamplingParams(max_new_tokens=12, **changes)
    assert not params.problems()
    outcomes = run(draft_engine(module, module), requests([params]), FixedRoute(Method.DRAFT_MODEL, 3))
    argmax = {i: tuple(generate(module, byte_tokenizer()(p)["input_ids"], 12)) for i, p in enumerate(PROMPTS)}
    assert (ids(outcomes) == argmax) == greedy


# --- distributions ----------------------------------------------------------------------------------------------


def softmax_reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, min-p as transformers' own warpers apply them."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = torch.tensor(logits, dtype=torch.float64)
    unused: Any = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(unused, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(unused, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(unused, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(unused, scores)
    return torch.softmax(scores, dim=-1).numpy()


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.5, top_k=7, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("width", [12, 64])
def test_the_distribution_is_that_of_the_transformers_warpers(params: SamplingParams, width: int) -> None:
    logits = np.random.default_rng(1).normal(size=(20, 12)) * 2
    rows = [SampledRow(params, f"row:{i}", 0, [], 0) for i in range(20)]
    got = Sampler(frozenset()).distribution(torch.tensor(logits), rows)
    np.testing.assert_allclose(got, softmax_reference(logits, params), atol=2e-6)


@pytest.mark.parametrize("params", FILTERS)
def test_few_candidates_say_when_they_do_not_suffice(params: SamplingParams) -> None:
    """Every row either gets the whole answer's candidates or says that it needs more."""
    logits = torch.tensor(np.random.default_rng(2).normal(size=(50, 400)) * 2)
    found = find_candidates(logits, [params] * 50, 8)
    whole = softmax_reference(logits.numpy(), params)
    for row in range(50):
        if np.isnan(found.rest[row]):
            continue
        np.testing.assert_allclose(found.probabilities[row], whole[row, found.ids[row]], atol=1e-6)
        assert found.rest[row] == pytest.approx(1 - whole[row, found.ids[row]].sum(), abs=1e-6)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The statistic in standard deviations above its mean (cells with enough expectation)."""
    cells = expected.ravel() > 5
    statistic = ((observed.ravel() - expected.ravel())[cells] ** 2 / expected.ravel()[cells]).sum()
    degrees = cells.sum() - 1
    return float((statistic - degrees) / np.sqrt(2 * degrees))


VOCAB = 10
TABLE = np.random.default_rng(5).normal(size=(VOCAB, VOCAB)) * 1.5
DRAFT_TABLE = TABLE + np.random.default_rng(6).normal(size=(VOCAB, VOCAB))


def test_draws_over_many_rows_have_the_target_distribution_even_when_the_rest_wins() -> None:
    """A vocabulary larger than the first candidates, flat enough that the tokens not looked at often win."""
    logits = np.random.default_rng(3).normal(size=300)
    count = 20_000
    rows = [SampledRow(SamplingParams(temperature=1.0), f"row:{i}", 0, [], 0) for i in range(count)]
    tokens = Sampler(frozenset()).choose(torch.tensor(logits).expand(count, -1), rows)
    expected = np.exp(logits) / np.exp(logits).sum()
    assert abs(chi_square(np.bincount(tokens, minlength=300), count * expected)) < 5


def toy_step(row: Row, proposal: Proposal) -> tuple[StepRow, np.ndarray]:
    step = StepRow(row, row.token_ids[-1:], proposal, samples=True)
    return step, TABLE[[row.token_ids[-1], *proposal.token_ids]]


def first_two_tokens(params: SamplingParams, q_params: SamplingParams | None, count: int = 12_000) -> np.ndarray:
    """Counts [first, second] over `count` rows decoded by the rejection rule from a two-table Markov model.

    Drafts are drawn from another table under `q_params`, or are certain guesses (prompt lookup) where it is None.
    """
    sampler = Sampler(frozenset())
    rule = RejectionRule(sampler)
    rows = [Row(Request(i, sampling=params), "default", [0], 1, admitted_at=0.0, num_computed=0) for i in range(count)]
    while pending := [row for row in rows if row.num_output_tokens < 2]:
        proposals = draft(pending, q_params, sampler)
        steps = [toy_step(row, proposal) for row, proposal in zip(pending, proposals, strict=True)]
        logits = torch.tensor(np.concatenate([logits for _, logits in steps]))
        for (step, _), (block, _) in zip(steps, rule.blocks(logits, [step for step, _ in steps]), strict=True):
            step.sequence.token_ids += block
    counts = np.zeros((VOCAB, VOCAB))
    for row in rows:
        counts[row.output_ids[0], row.output_ids[1]] += 1
    return counts


def draft(rows: Sequence[Row], q_params: SamplingParams | None, sampler: Sampler) -> list[Proposal]:
    if q_params is None:
        return [Proposal((int(TABLE[row.token_ids[-1]].argmax()), 3), from_lookup=True) for row in rows]
    proposals: list[list[int]] = [[] for _ in rows]
    qs: list[list[np.ndarray]] = [[] for _ in rows]
    for depth in range(2):
        last = [(row.token_ids + tokens)[-1] for row, tokens in zip(rows, proposals, strict=True)]
        sampled = [
            sampled_row(StepRow(row, [], Proposal(tuple(t))), depth) for row, t in zip(rows, proposals, strict=True)
        ]
        filtered = [SampledRow(q_params, s.row_key, s.output_index, [], 0) for s in sampled]
        for i, q in enumerate(sampler.distribution(torch.tensor(DRAFT_TABLE[last]), filtered)):
            qs[i].append(q)
            proposals[i].append(draw(q, sampled[i], noise.DRAFT))
    return [Proposal(tuple(t), probabilities=q) for t, q in zip(proposals, qs, strict=True)]


def pair_distribution(params: SamplingParams) -> np.ndarray:
    p = softmax_reference(TABLE, params)
    return p[0][:, None] * p


TARGET = SamplingParams(temperature=1.0, top_k=6)
DRAFTS = {
    "same_settings": TARGET,
    "other_temperature": SamplingParams(temperature=0.4),
    "other_filter": SamplingParams(temperature=1.0, top_k=3),
    "hot_unfiltered": SamplingParams(temperature=2.0),
    "prompt_lookup": None,
}


@pytest.mark.parametrize("name", DRAFTS)
def test_d14_rejection_gives_first_second_and_pair_the_target_distribution(name: str) -> None:
    counts = first_two_tokens(TARGET, DRAFTS[name])
    expected = counts.sum() * pair_distribution(TARGET)
    assert counts[expected == 0].sum() == 0
    assert abs(chi_square(counts, expected)) < 5
    assert abs(chi_square(counts.sum(axis=1), expected.sum(axis=1))) < 5
    assert abs(chi_square(counts.sum(axis=0), expected.sum(axis=0))) < 5


def without_residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p


def draft_of_first_position(row: StepRow, index: int, vocab_size: int) -> np.ndarray:
    return row.proposal.probabilities[0]


def unfiltered_draft(row: StepRow, index: int, vocab_size: int) -> np.ndarray:
    before = (*row.sequence.token_ids, *row.proposal.token_ids[:index])[-1]
    return softmax_reference(DRAFT_TABLE[before], SamplingParams(temperature=1.0))


def target_of_next_position(target: np.ndarray, row: StepRow, sampled: Sequence[SampledRow]) -> Any:
    return JUDGE(np.roll(target, -1, axis=0), row, sampled)


JUDGE = acceptance.judge
FAULTS: list[tuple[str, Callable[..., Any], str]] = [
    ("residual", without_residual, "other_temperature"),
    ("residual", without_residual, "prompt_lookup"),
    ("proposal_distribution", draft_of_first_position, "other_temperature"),
    ("proposal_distribution", unfiltered_draft, "other_filter"),
    ("judge", target_of_next_position, "same_settings"),
    ("judge", target_of_next_position, "prompt_lookup"),
]


@pytest.mark.parametrize(("piece", "fault", "name"), FAULTS)
def test_d14_the_distribution_test_sees_each_fault(
    piece: str, fault: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, piece, fault)
    counts = first_two_tokens(TARGET, DRAFTS[name])
    expected = counts.sum() * pair_distribution(TARGET)
    assert counts[expected == 0].sum() > 0 or chi_square(counts, expected) > 10


@pytest.mark.parametrize("draft_seed", [30, 31])
def test_rejection_in_the_engine_reproduces_itself_and_keeps_its_route(draft_seed: int) -> None:
    module = build_module("llama", seed=30)
    draft = build_module("llama", seed=draft_seed)
    runs = [
        run(
            draft_engine(module, draft, rule="rejection", max_batch=batch),
            requests(MIXED),
            FixedRoute(Method.DRAFT_MODEL, 3),
        )
        for batch in (1, 4)
    ]
    assert ids(runs[0]) == ids(runs[1])
    greedy = generate(module, byte_tokenizer()(PROMPTS[2])["input_ids"], 24)
    assert list(runs[0][2].token_ids) == greedy  # type: ignore[union-attr]


# --- processors -------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": 0.4},
    "logit_bias": {"logit_bias": ((65, 4.0), (66, -100.0))},
    "min_new_tokens": {"min_new_tokens": 20},
    "all": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((67, 1.0),),
        "min_new_tokens": 5,
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("option", OPTIONS)
def test_d16_an_option_acts_at_every_position_of_a_block(option: str, temperature: float) -> None:
    """The draft is the target, so that blocks are long, and the prompt makes every option bite."""
    module = build_module("llama", seed=35)
    module.generation_config.eos_token_id = [66, 67, 68]
    params = SamplingParams(max_new_tokens=24, temperature=temperature, **OPTIONS[option])
    rows = requests([params], ["ab ab ab ab", "the ok the ok"])
    plain = run(
        make_engine(module, max_batch=1), requests([SamplingParams(max_new_tokens=24, temperature=temperature)])
    )
    expected = run(make_engine(module, max_batch=1), rows)
    assert ids(expected) != {i: ids(plain)[i] for i in ids(expected)}
    for method in (Method.DRAFT_MODEL, Method.PROMPT_LOOKUP):
        for k in (1, 4, 8):
            outcomes = run(draft_engine(module, module), rows, FixedRoute(method, k, 1))
            assert ids(outcomes) == ids(expected), f"{method} k={k}"


def test_d16_the_repetition_penalty_is_that_of_transformers() -> None:
    module = build_module("llama", seed=35)
    prompt = byte_tokenizer()("ab ab ab ab")["input_ids"]
    with torch.inference_mode():
        expected = module.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=1.3, pad_token_id=258
        )[0, len(prompt) :].tolist()
    params = SamplingParams(max_new_tokens=24, repetition_penalty=1.3)
    outcomes = run(draft_engine(module, module), requests([params], ["ab ab ab ab"]), FixedRoute(Method.DRAFT_MODEL, 4))
    assert list(outcomes[0].token_ids) == expected  # type: ignore[union-attr]


def test_d18_all_end_tokens_are_held_back_until_the_minimum_and_stop_strings_too() -> None:
    module = build_module("llama", seed=36)
    prompt = "okok"
    whole = generate(module, byte_tokenizer()(prompt)["input_ids"], 40)
    module.generation_config.eos_token_id = [257, whole[2]]
    stop = byte_tokenizer().decode(whole[5:6])
    params = SamplingParams(max_new_tokens=40, min_new_tokens=20, stop=(stop,))
    expected = run(make_engine(module, max_batch=1), requests([params], [prompt]))
    outcomes = run(draft_engine(module, module), requests([params], [prompt]), FixedRoute(Method.DRAFT_MODEL, 4))
    assert ids(outcomes) == ids(expected)
    assert outcomes[0].output_tokens >= 20  # type: ignore[union-attr]


def test_a_logit_bias_outside_the_vocabulary_is_a_row_error() -> None:
    params = SamplingParams(max_new_tokens=4, logit_bias=((260, 1.0),))
    outcome = run(make_engine(build_module("llama")), requests([params], ["ab"]))[0]
    assert outcome.error_type == "bad_sampling"  # type: ignore[union-attr]
    assert "260" in outcome.error_message  # type: ignore[union-attr]
