import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_tables import error_types, parse, unchecked_strings

from batchspec.config import InputConfig
from batchspec.io.columns import with_text_as_bytes
from batchspec.io.parser import RowParser
from batchspec.types import Request, RowFailure, SamplingParams

USER = {"role": "user", "content": "hello"}


def only(columns: dict[str, list[Any]], defaults: SamplingParams | None = None, **config: str) -> Request | RowFailure:
    [row] = parse(columns, defaults, **config)
    return row


def test_a_plain_prompt() -> None:
    assert parse({"prompt": ["a", "ü\n"], "other": [1, 2]}) == [Request(0, prompt="a"), Request(1, prompt="ü\n")]


def test_columns_are_found_by_their_configured_names() -> None:
    row = only(
        {"q": ["a"], "uid": [7], "topic": ["x"], "prompt": ["no"]},
        prompt_column="q",
        request_id_column="uid",
        request_class_column="topic",
    )
    assert row == Request(0, prompt="a", request_id="7", request_class="x")


def test_d25_null_empty_and_blank_prompts_are_row_errors() -> None:
    rows = parse({"prompt": ["a", None, "", " \t\n\u3000", "x"]})
    assert error_types(rows) == [None, "null_prompt", "empty_prompt", "empty_prompt", None]
    assert [row.row_index for row in rows] == [0, 1, 2, 3, 4]
    assert isinstance(rows[3], RowFailure)
    assert rows[3].error_message == "the prompt holds no text: 4 characters of white space"


def test_a_column_of_nulls_only() -> None:
    assert error_types(parse({"prompt": pa.nulls(2)})) == ["null_prompt", "null_prompt"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()])
def test_p08_invalid_utf8_is_a_row_error_and_leaves_its_neighbours_alone(kind: pa.DataType) -> None:
    column = unchecked_strings([b"fine", b"secret caf\xe9 text", None, "ünï".encode()]).cast(kind)
    rows = parse({"prompt": column})
    assert error_types(rows) == [None, "bad_encoding", "null_prompt", None]
    assert isinstance(rows[1], RowFailure)
    assert rows[1].error_message == "the prompt is not valid UTF-8: wrong at byte 10 of 16"
    assert rows[3] == Request(3, prompt="ünï")


def test_p08_invalid_utf8_in_a_dictionary_column() -> None:
    column = unchecked_strings([b"fine", b"caf\xe9"]).dictionary_encode()
    assert error_types(parse({"prompt": column})) == [None, "bad_encoding"]


def test_p08_invalid_utf8_inside_messages() -> None:
    content = unchecked_strings([b"fine", b"caf\xe9", b"x"])
    structs = pa.StructArray.from_arrays([pa.array(["user"] * 3), content], ["role", "content"])
    messages = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), structs)
    assert error_types(parse({"messages": messages})) == [None, "bad_encoding", None]


def test_p08_a_lone_surrogate_in_json_is_bad_encoding() -> None:
    text = [f'[{{"role": "user", "content": "{content}"}}]' for content in (r"\ud83d", r"\ud83d\ude00")]
    rows = parse({"messages": text})
    assert error_types(rows) == ["bad_encoding", None]
    assert isinstance(rows[1], Request)
    assert rows[1].messages == [{"role": "user", "content": "😀"}]


def test_messages_win_over_the_prompt_where_they_are_not_null() -> None:
    rows = parse({"messages": [[USER], None, None, []], "prompt": ["a", "b", None, "d"]})
    assert rows[:2] == [Request(0, messages=[USER]), Request(1, prompt="b")]
    assert error_types(rows) == [None, None, "null_prompt", "bad_messages"]


def test_null_fields_of_a_message_are_dropped() -> None:
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.string()}))
    row = only({"messages": pa.array([[USER, {**USER, "name": "Ann"}]], kind)})
    assert isinstance(row, Request)
    assert row.messages == [USER, {**USER, "name": "Ann"}]


@pytest.mark.parametrize("start", [0, 1])
def test_a_field_that_is_null_in_every_message_is_dropped(start: int) -> None:
    messages = [[{"role": "user", "content": text, "tool_calls": None}] * 2 for text in "abc"]
    column = pa.array(messages)
    assert column.type.value_type.field("tool_calls").type == pa.null()
    batch = pa.record_batch({"messages": column}).slice(start)
    rows = RowParser(InputConfig(()), SamplingParams()).parse(batch, start)
    assert [row.messages for row in rows if isinstance(row, Request)] == [
        [{"role": "user", "content": text}] * 2 for text in "abc"[start:]
    ]


# pa.array would import them itself
READ_WITHOUT_COMPUTE = """
import sys
import pyarrow as pa
from batchspec.io.columns import with_text_as_bytes
offsets, text = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0])), pa.py_buffer(b"a")
column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, text])
assert with_text_as_bytes(column).to_pylist() == [b"a"]
assert "pyarrow.compute" not in sys.modules
"""


@pytest.mark.parametrize("text", [pa.array(["a", None, "\u00e9"]), pa.array(["-", "a", None, "\u00e9"])[1:]])
def test_text_is_read_without_arrows_compute_functions(text: pa.Array) -> None:
    """A worker reads its first row sooner without them."""
    assert with_text_as_bytes(text).to_pylist() == [b"a", None, b"\xc3\xa9"]
    subprocess.run([sys.executable, "-c", READ_WITHOUT_COMPUTE], check=True)


def test_tool_calls_may_stand_for_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    row = only({"messages": [json.dumps([USER, call])]})
    assert isinstance(row, Request)
    assert row.messages == [USER, {"role": "assistant", "tool_calls": call["tool_calls"]}]


@pytest.mark.parametrize(
    ("text", "error_type", "message"),
    [
        ("not JSON", "bad_messages", "messages is not JSON: wrong at line 1 column 1"),
        ("", "bad_messages", "messages is not JSON: wrong at line 1 column 1"),
        ("[" * 100_000, "bad_messages", "messages is not JSON that can be read: nested too deep, or a number too long"),
        ("[" + "9" * 5000 + "]", "bad_messages", "nested too deep, or a number too long"),
        ("null", "bad_messages", "messages is not a list"),
        ('{"role": "user", "content": "x"}', "bad_messages", "messages is not a list"),
        ("[]", "bad_messages", "there are no messages"),
        ('["hello"]', "bad_messages", "message 1 is text, not an object with role and content"),
        ("[null]", "bad_messages", "message 1 is null, not an object"),
        ('[{"content": "x"}]', "bad_messages", "message 1 has no role"),
        ('[{"role": "", "content": "x"}]', "bad_messages", "message 1 has no role"),
        ('[{"role": 7, "content": "x"}]', "bad_messages", "the role of message 1 is a number"),
        ('[{"role": "user", "content": "x"}, {"role": "user"}]', "bad_messages", "message 2 has no content"),
        ('[{"role": "user", "content": null}]', "bad_messages", "message 1 has no content"),
        ('[{"role": "user", "content": ["x"]}]', "bad_messages", "the content of message 1 is a list; only text"),
        ('[{"role": "user", "content": {"a": 1}}]', "bad_messages", "the content of message 1 is an object; only text"),
        ('[{"role": "user", "content": true}]', "bad_messages", "the content of message 1 is a boolean; only text"),
        ('[{"role": "user", "content": " \\n"}]', "empty_prompt", "none of the 1 messages holds any text"),
    ],
)
def test_r01_bad_messages_say_what_is_wrong(text: str, error_type: str, message: str) -> None:
    good = json.dumps([USER])
    rows = parse({"messages": [good, text, good]})
    assert error_types(rows) == [None, error_type, None]
    assert isinstance(rows[1], RowFailure)
    assert message in rows[1].error_message


def test_error_messages_never_hold_the_text() -> None:
    secret = "s3cr3t"
    chats = [
        f"{secret}",
        f'["{secret}"]',
        f'[{{"role": "user", "{secret}": "{secret}"}}]',
        f'[{{"role": ["{secret}"], "content": "{secret}"}}]',
        f'[{{"role": "user", "content": ["{secret}"]}}]',
        rf'[{{"role": "user", "content": "{secret}\ud800"}}]',
        rf'[{{"role": "user", "content": "{secret}\x"}}]',
    ]
    rows = [
        *parse({"messages": chats}),
        *parse({"prompt": unchecked_strings([secret.encode() + b"\xff"])}),
        *parse({"prompt": ["a"] * 3, "stop": [[secret, None], [secret, ""], ["", secret]]}),
        *parse({"prompt": ["a"] * 2, "logit_bias": [secret, f'{{"{secret}": 1}}']}),
    ]
    assert all(isinstance(row, RowFailure) and secret not in row.error_message for row in rows)


def test_a_map_that_holds_a_key_twice_is_a_row_error() -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    good = [("role", "user"), ("content", "x")]
    rows = parse(
        {"messages": pa.array([[good], [[*good, ("role", "system")]], None, [good]], kind), "prompt": ["p"] * 4}
    )
    assert error_types(rows) == [None, "bad_messages", None, None]
    assert isinstance(rows[1], RowFailure)
    assert rows[1].error_message == "a map in messages holds a key twice"
    assert rows[2] == Request(2, prompt="p")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([2**60 + 1, None]), [str(2**60 + 1), None]),
        (pa.array(["a", None]), ["a", None]),
        (pa.array(["", None]), ["", None]),
        (pa.array(["a", None]).dictionary_encode(), ["a", None]),
        (pa.array([b"\x01" * 16, None], pa.binary(16)), ["01" * 16, None]),
        (pa.array([b"\x01" * 16, None], pa.uuid()), ["01" * 16, None]),
        (pa.array([b"abc", b"\xff"]), ["abc", r"\xff"]),
        (unchecked_strings([b"caf\xe9", b"b"]), [r"caf\xe9", "b"]),
        (pa.array([1.5, None]), ["1.5", None]),
        (pa.array([True, None]), ["true", None]),
        (pa.array(["1.50", None]).cast(pa.decimal128(10, 2)), ["1.50", None]),
        (pa.array([0, None], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000000", None]),
        (pa.array([{"a": 1}, None]), ["{'a': 1}", None]),
        (pa.array([[1, 2], None]), ["[1, 2]", None]),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_p10_ids_and_classes_of_any_type_have_a_text_form(ids: pa.Array, expected: list[str | None]) -> None:
    rows = parse({"prompt": ["a", "b"], "request_id": ids, "request_class": ids})
    assert [row.request_id for row in rows if isinstance(row, Request)] == expected
    assert [row.request_class for row in rows if isinstance(row, Request)] == expected


def test_p17_rows_of_one_id_stay_two_rows() -> None:
    rows = parse({"prompt": ["a", "b"], "request_id": ["same", "same"]})
    assert rows == [Request(0, prompt="a", request_id="same"), Request(1, prompt="b", request_id="same")]


DEFAULTS = SamplingParams(max_new_tokens=64, temperature=0.5, stop=("END",), seed=3)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"max_new_tokens": pa.array([5], pa.int8())}, {"max_new_tokens": 5}),
        ({"max_new_tokens": pa.array([5.0], pa.float64())}, {"max_new_tokens": 5}),
        ({"max_new_tokens": pa.array(["5"]).cast(pa.decimal128(5, 0))}, {"max_new_tokens": 5}),
        ({"max_new_tokens": pa.nulls(1, pa.int64())}, {}),
        ({"max_new_tokens": pa.nulls(1)}, {}),
        ({"temperature": pa.array([1], pa.int64())}, {"temperature": 1.0}),
        (
            {"temperature": pa.array([0.25], pa.float32()), "seed": pa.array([2**60 + 1])},
            {"temperature": 0.25, "seed": 2**60 + 1},
        ),
        ({"seed": pa.array([2**64 - 1], pa.uint64())}, {"seed": 2**64 - 1}),
        ({"stop": ["###"]}, {"stop": ("###",)}),
        ({"stop": [["a", "ü"]]}, {"stop": ("a", "ü")}),
        ({"stop": pa.array([["a"]], pa.large_list(pa.large_string()))}, {"stop": ("a",)}),
        ({"stop": pa.array([[]], pa.list_(pa.string()))}, {"stop": ()}),
        ({"stop": pa.nulls(1, pa.list_(pa.string()))}, {}),
        ({"logit_bias": ['{"7": -1, "5": 2.5}']}, {"logit_bias": ((5, 2.5), (7, -1.0))}),
        ({"logit_bias": pa.array([[(7, 1.5)]], pa.map_(pa.int32(), pa.float32()))}, {"logit_bias": ((7, 1.5),)}),
        ({"logit_bias": pa.array([[("7", 1)]], pa.map_(pa.string(), pa.int8()))}, {"logit_bias": ((7, 1.0),)}),
        ({"top_k": [3], "top_p": [0.5], "min_p": [0.1]}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}),
        (
            {"repetition_penalty": [1.1], "presence_penalty": [1], "frequency_penalty": [-1], "min_new_tokens": [2]},
            {"repetition_penalty": 1.1, "presence_penalty": 1.0, "frequency_penalty": -1.0, "min_new_tokens": 2},
        ),
    ],
)
def test_sampling_columns_override_and_nulls_inherit(columns: dict[str, Any], expected: dict[str, Any]) -> None:
    row = only({"prompt": ["a"], **columns}, DEFAULTS)
    settings = {"max_new_tokens": 64, "temperature": 0.5, "stop": ("END",), "seed": 3, **expected}
    assert row == Request(0, prompt="a", sampling=SamplingParams(**settings))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"max_new_tokens": [0]}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": [1.5]}, "max_new_tokens must be a whole number, got 1.5"),
        ({"max_new_tokens": pa.array([np.nan])}, "max_new_tokens must be a whole number"),
        ({"top_k": [np.inf]}, "top_k must be a whole number"),
        ({"temperature": [-1]}, "temperature must be a finite number >= 0, got -1.0"),
        ({"temperature": pa.array([np.nan])}, "temperature must be a finite number >= 0, got nan"),
        ({"top_p": [0.0]}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"stop": [""]}, "stop strings must not be empty"),
        ({"stop": [["a", None]]}, "stop holds a null"),
        ({"logit_bias": ["[1]"]}, "logit_bias must be an object of token ids and finite numbers"),
        ({"logit_bias": ['{"a": 1}']}, "logit_bias must be an object of token ids and finite numbers"),
        ({"logit_bias": ['{"1": NaN}']}, "logit_bias must be an object of token ids and finite numbers"),
        ({"logit_bias": ['{"1": 1' + "0" * 400 + "}"]}, "logit_bias must be an object of token ids and finite numbers"),
        ({"logit_bias": ["{"]}, "logit_bias is not JSON"),
        ({"logit_bias": pa.array([[(7, None)]], pa.map_(pa.int32(), pa.int8()))}, "logit_bias must be an object"),
        ({"logit_bias": pa.array([[(7, 1), (7, 2)]], pa.map_(pa.int32(), pa.int8()))}, "holds a key twice"),
        ({"min_new_tokens": [65]}, r"min_new_tokens must be between 0 and max_new_tokens \(64\), got 65"),
        (
            {"max_new_tokens": [0], "top_k": [-1]},
            "max_new_tokens must be at least 1, got 0; top_k must be >= 0, got -1",
        ),
    ],
)
def test_illegal_sampling_values_are_row_errors(columns: dict[str, Any], message: str) -> None:
    row = only({"prompt": ["a"], **columns}, DEFAULTS)
    assert isinstance(row, RowFailure)
    assert row.error_type == "bad_sampling"
    assert re.search(message, row.error_message)


def test_p08_invalid_utf8_in_stop() -> None:
    rows = parse({"prompt": ["a", "b"], "stop": unchecked_strings([b"\xff", b"x"])})
    assert error_types(rows) == ["bad_encoding", None]


def test_row_indices_go_on_from_the_first() -> None:
    from batchspec.config import InputConfig
    from batchspec.io.parser import RowParser

    batch = pa.RecordBatch.from_pydict({"prompt": ["a", None]})
    rows = RowParser(InputConfig(), SamplingParams()).parse(batch, 10**12)
    assert [row.row_index for row in rows] == [10**12, 10**12 + 1]


TEXTS = st.one_of(
    st.none(), st.binary(max_size=12), st.text(max_size=12).map(lambda text: text.encode(errors="replace"))
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
NUMBERS = st.none() | st.floats() | st.integers(-5, 5).map(float)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), count=st.integers(0, 5))
def test_any_table_of_checked_types_gives_one_outcome_per_row(data: st.DataObject, count: int) -> None:
    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(values, min_size=count, max_size=count))

    columns: dict[str, Any] = {
        "prompt": unchecked_strings(column(TEXTS)),
        "messages": column(st.none() | JSON.map(json.dumps) | st.text(max_size=5)),
        "request_id": unchecked_strings(column(TEXTS)),
        "temperature": pa.array(column(NUMBERS), pa.float64()),
        "max_new_tokens": pa.array(column(NUMBERS), pa.float64()),
        "stop": pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), unchecked_strings(column(TEXTS))),
    }
    kept = data.draw(st.lists(st.sampled_from(sorted(columns)), unique=True, min_size=1))
    encoded = {
        name: array.dictionary_encode() if isinstance(array, pa.StringArray) and data.draw(st.booleans()) else array
        for name, array in ((name, columns[name]) for name in kept)
    }
    rows = parse(encoded)
    assert [row.row_index for row in rows] == list(range(count))
    for row in rows:
        if isinstance(row, Request):
            assert (row.prompt is None) != (row.messages is None)
            assert row.sampling.problems() == []
            json.dumps([row.prompt, row.messages, row.request_id]).encode()
        else:
            assert row.error_type in {"null_prompt", "empty_prompt", "bad_encoding", "bad_messages", "bad_sampling"}
            assert row.error_message
    assert rows == parse({name: columns[name] for name in kept})
