"""Text to ids and back: templates, start tokens, special tokens in content, stop strings, cut characters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.engine.prompts import OutputDecoder, PromptEncoder
from batchspec.errors import RowError, UsageError
from batchspec.types import Completion, FinishReason, Method, Request, RowFailure, SamplingParams
from tests.engine.tiny import (
    FixedRoute,
    OracleDrafter,
    build_module,
    byte_tokenizer,
    generate,
    make_engine,
    requests_for,
    run,
)

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<s>' + m['role'] + ':' + m['content'] + '<end>' }}{% endfor %}{{ '<s>assistant:' }}"
)
BOS, EOS, PAD, END = 256, 257, 258, 259


def tokenizer(template: str | None = TEMPLATE, add_bos: bool = False) -> Any:
    from tokenizers.processors import TemplateProcessing

    made = copy.deepcopy(byte_tokenizer())
    made.chat_template = template
    if add_bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    return made


def encode(request: Request, made: Any = None, **options: Any) -> list[int]:
    return PromptEncoder(made or tokenizer(), context_tokens=128, **options).encode(request)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_messages_give_the_ids_of_the_tokenizer_own_template() -> None:
    made = tokenizer(add_bos=True)
    expected = made.apply_chat_template(user("hi"), add_generation_prompt=True, tokenize=True, return_dict=True)
    assert encode(Request(0, messages=user("hi"), sampling=SamplingParams(max_new_tokens=4)), made) == list(
        expected["input_ids"]
    )


def test_d27_messages_and_raw_prompts_start_once() -> None:
    made = tokenizer(add_bos=True)
    params = SamplingParams(max_new_tokens=4)
    assert encode(Request(0, messages=user("hi"), sampling=params), made)[:2] != [BOS, BOS]
    for prompt in ("hi", "<s>hi"):
        ids = encode(Request(0, prompt=prompt, sampling=params), made)
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
    assert BOS not in encode(Request(0, prompt="hi", sampling=params), tokenizer())


def test_d28_control_tokens_in_content_are_real_by_default_and_plain_text_on_request() -> None:
    request = Request(0, messages=user("say <end> now"), sampling=SamplingParams(max_new_tokens=4))
    assert encode(request).count(END) == 2
    neutral = encode(request, neutralize_special_tokens=True)
    assert neutral.count(END) == 1
    assert byte_tokenizer().decode(neutral).count("<end>") == 2
    raw = Request(0, prompt="<end>", sampling=SamplingParams(max_new_tokens=4))
    assert encode(raw) == [END]
    assert END not in encode(raw, neutralize_special_tokens=True)


def test_d28_neutralising_changes_nothing_where_no_control_token_is_spelled() -> None:
    request = Request(0, messages=user("plain text"), sampling=SamplingParams(max_new_tokens=4))
    assert encode(request, neutralize_special_tokens=True) == encode(request)


def test_d28_an_end_token_in_the_prompt_does_not_end_the_answer() -> None:
    module = build_module("llama", seed=20)
    module.generation_config.eos_token_id = END
    outcome = run(make_engine(module), requests_for(["ab<end>ab<end>"], max_new_tokens=9))[0]
    assert isinstance(outcome, Completion)
    assert outcome.output_tokens == 9 or outcome.token_ids[-1] == END


@pytest.mark.parametrize(
    ("prompt", "budget", "error_type"),
    [
        ("", 4, "empty_prompt"),
        ("a" * 125, 4, "context_overflow"),
        ("a", 128, "context_overflow"),
        ("a", 999, "context_overflow"),
    ],
)
def test_d25_a_prompt_that_does_not_fit_is_a_row_error_with_numbers(prompt: str, budget: int, error_type: str) -> None:
    with pytest.raises(RowError) as caught:
        encode(Request(0, prompt=prompt, sampling=SamplingParams(max_new_tokens=budget)))
    assert caught.value.error_type == error_type
    if error_type == "context_overflow":
        assert f"{len(prompt)} prompt tokens + max_new_tokens {budget}" in caught.value.message
        assert "128" in caught.value.message


@pytest.mark.parametrize("prompt", [" ", "a", "a" * 124])
def test_d25_what_fits_is_never_shortened(prompt: str) -> None:
    ids = encode(Request(0, prompt=prompt, sampling=SamplingParams(max_new_tokens=4)))
    assert byte_tokenizer().decode(ids) == prompt


def test_d25_one_token_prompts_meet_a_longer_ngram_window() -> None:
    module = build_module("llama", seed=21)
    outcome = run(make_engine(module), requests_for(["a"], max_new_tokens=12), FixedRoute(Method.PROMPT_LOOKUP, 4, 6))[
        0
    ]
    assert isinstance(outcome, Completion)
    assert list(outcome.token_ids) == generate(module, byte_tokenizer()("a")["input_ids"], 12)


def test_bad_rows_are_failures_and_their_neighbours_are_answered() -> None:
    module = build_module("llama", seed=21)
    prompts = ["ok", "", "x" * 600, "ok"]
    outcomes = run(make_engine(module), requests_for(prompts, max_new_tokens=4))
    assert [type(outcomes[i]) for i in range(4)] == [Completion, RowFailure, RowFailure, Completion]


def test_p12_what_the_template_refuses_is_a_row_error_with_its_message() -> None:
    with pytest.raises(RowError, match="no system role") as caught:
        encode(Request(0, messages=[{"role": "system", "content": "x"}]))
    assert caught.value.error_type == "template_error"


def test_p12_a_tokenizer_without_template_is_one_error_for_the_job() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        encode(Request(0, messages=user("hi")), tokenizer(template=None))


# --- output ---------------------------------------------------------------------------------------------------


def ids_of(text: str) -> list[int]:
    return byte_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize(
    ("output", "num_checked", "stop", "min_new", "expected"),
    [
        ("abc###def", 0, ("###",), 0, (6, "abc")),
        ("abc###def", 6, ("###",), 0, (7, "abc")),
        ("abc", 0, ("###",), 0, None),
        ("one two", 0, ("two", "one"), 0, (3, "")),
        ("ab#", 0, ("#", "b#"), 0, (3, "a")),
        ("x\ny", 0, ("\n",), 0, (2, "x")),
        ("#ab#c", 0, ("#",), 3, (4, "#ab")),
        ("#ab#c", 0, ("#",), 1, (1, "")),
        ("né#", 0, ("#",), 0, (4, "né")),
    ],
)
def test_d06_the_earliest_stop_string_wins(
    output: str, num_checked: int, stop: tuple[str, ...], min_new: int, expected: tuple[int, str] | None
) -> None:
    assert OutputDecoder(byte_tokenizer()).find_stop(ids_of(output), num_checked, stop, min_new) == expected


@pytest.mark.parametrize("k", [0, 2, 8])
def test_d06_a_stop_string_inside_an_accepted_block_cuts_text_ids_and_counts(k: int) -> None:
    module = build_module("llama", seed=22)
    prompt = "the 12 ok"
    whole = generate(module, ids_of(prompt), 30)
    text = OutputDecoder(byte_tokenizer()).text(whole)
    stop = (text[12:14], text[6:8])
    route = FixedRoute(Method.DRAFT_MODEL, k) if k else FixedRoute()
    engine = make_engine(module, drafters={Method.DRAFT_MODEL: OracleDrafter({0: whole}, [True])})
    outcome = run(engine, requests_for([prompt], max_new_tokens=30, stop=stop), route)[0]
    expected = next(n for n in range(1, 31) if any(s in OutputDecoder(byte_tokenizer()).text(whole[:n]) for s in stop))
    assert isinstance(outcome, Completion)
    assert outcome.token_ids == tuple(whole[:expected])
    assert outcome.finish_reason is FinishReason.STOP
    assert (
        outcome.text
        == text[: min(text.find(s) for s in stop if s in OutputDecoder(byte_tokenizer()).text(whole[:expected]))]
    )


def test_d29_text_is_one_decode_of_all_ids() -> None:
    decoder = OutputDecoder(byte_tokenizer())
    assert decoder.text(ids_of("a😀漢")) == "a😀漢"
    cut = ids_of("a😀")[:-1]
    assert decoder.text(cut) == "a�"
    assert byte_tokenizer().decode([*cut, ids_of("😀")[-1]]) == "a😀"
    assert decoder.find_stop(ids_of("😀#x"), 0, ("#",), 0) == (5, "😀")


def test_the_ending_eos_is_in_the_ids_and_not_in_the_text() -> None:
    module = build_module("llama", seed=23)
    whole = generate(module, ids_of("abc"), 8)
    module.generation_config.eos_token_id = whole[3]
    cut = whole[: whole.index(whole[3]) + 1]
    outcome = run(make_engine(module), requests_for(["abc"], max_new_tokens=8))[0]
    assert isinstance(outcome, Completion)
    assert list(outcome.token_ids) == cut
    assert outcome.text == OutputDecoder(byte_tokenizer()).text(cut[:-1])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*b"ab#\n", 0xF0, 0x9F, 0x98, 0x80, 256, 257]), min_size=1, max_size=120),
    st.sampled_from([("#",), ("ab#",), ("#\n", "ba"), ("😀",)]),
    st.data(),
)
def test_d02_a_stop_string_is_found_without_decoding_the_whole_output(
    ids: list[int], stop: tuple[str, ...], data: st.DataObject
) -> None:
    """Checked step by step, as the engine does, and all at once: the same token ends the row."""
    decoder = OutputDecoder(byte_tokenizer())
    whole = decoder.find_stop(ids, 0, stop, 0)
    found, checked = None, 0
    while found is None and checked < len(ids):
        count = min(len(ids), checked + data.draw(st.integers(1, 5)))
        found = decoder.find_stop(ids[:count], checked, stop, 0)
        checked = count
    assert found == whole


def test_long_outputs_are_not_decoded_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, decoded = OutputDecoder(byte_tokenizer()), []
    monkeypatch.setattr(decoder, "text", lambda ids: decoded.append(len(ids)) or "x" * len(ids))
    assert decoder.find_stop([1] * 2000, 1999, ("stop",), 0) is None
    assert max(decoded) < 100
