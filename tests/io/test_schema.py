import io
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from input_tables import read, resolve, write

from batchspec.config import InputConfig
from batchspec.errors import BatchspecError, InputError
from batchspec.io.schema import RESULT_COLUMNS, ResultRow, ResultSchema
from batchspec.stats import DecodeStats
from batchspec.types import Completion, FinishReason, Method, RowFailure, StepTimes

PROMPT = pa.schema({"prompt": pa.string()})
RESULT_NAMES = [column.name for column in RESULT_COLUMNS]


def answer(row_index: int = 0, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "row_index": row_index,
        "token_ids": (5, 6, 7, 2),
        "text": "five six",
        "finish_reason": FinishReason.STOP,
        "input_tokens": 11,
        "cached_input_tokens": 3,
        "method": Method.PROMPT_LOOKUP,
        "num_speculative_tokens": 4,
        "num_route_changes": 1,
        "route_reason": "worth it",
        "mean_live_sequences": 2.5,
        "stats": DecodeStats(
            num_target_steps=3,
            num_drafts=2,
            num_draft_tokens=8,
            num_accepted_tokens=2,
            num_accepted_tokens_per_pos=(1, 1),
            num_rejections_per_pos=(1, 0),
            num_discarded_tokens=1,
            num_lookup_draft_tokens=8,
            num_lookup_accepted_tokens=2,
        ),
        "times": StepTimes(
            queue_seconds=0.5,
            first_token_seconds=1.0,
            e2e_seconds=4.0,
            prefill_seconds=0.25,
            draft_seconds=0.5,
            verify_seconds=1.0,
            overhead_seconds=0.25,
        ),
    }
    return Completion(**{**values, **changes})


def failure(row_index: int = 0, **changes: Any) -> RowFailure:
    return RowFailure(row_index, "context_overflow", "9000 tokens do not fit 2048", **changes)


def build(schema: ResultSchema, input_rows: pa.Table, rows: list[ResultRow], first_source_row: int = 0) -> pa.Table:
    table = schema.build_table(input_rows, "/data/in.parquet", first_source_row, rows)
    table.validate(full=True)
    assert table.schema.equals(schema.arrow, check_metadata=True)
    return table


def through_parquet(table: pa.Table) -> pa.Table:
    file = io.BytesIO()
    pq.write_table(table, file)
    return pq.read_table(file, use_threads=False)


def prompts(count: int) -> pa.Table:
    return pa.table({"prompt": ["p"] * count}, schema=PROMPT)


def test_an_answered_row_shows_everything() -> None:
    schema = ResultSchema(PROMPT, InputConfig())
    row = ResultRow(
        answer(7), worker=3, attempt=2, price_per_hour=1800.0, request_class="qa", est_target_only_device_seconds=3.0
    )
    [shown] = build(schema, prompts(1), [row], first_source_row=5).to_pylist()
    assert shown == {
        "prompt": "p",
        "row_index": 7,
        "source_file": "/data/in.parquet",
        "source_row": 5,
        "request_id": None,
        "request_class": "qa",
        "method": "prompt_lookup",
        "num_speculative_tokens": 4,
        "num_route_changes": 1,
        "route_reason": "worth it",
        "output_text": "five six",
        "output_token_ids": [5, 6, 7, 2],
        "finish_reason": "stop",
        "error_type": None,
        "error_message": None,
        "input_tokens": 11,
        "cached_input_tokens": 3,
        "output_tokens": 4,
        "num_target_steps": 3,
        "num_draft_steps": 0,
        "spec_decode_num_drafts": 2,
        "spec_decode_num_draft_tokens": 8,
        "spec_decode_num_accepted_tokens": 2,
        "spec_decode_num_accepted_tokens_per_pos": [1, 1],
        "num_rejections_per_pos": [1, 0],
        "num_lookup_draft_tokens": 8,
        "num_lookup_accepted_tokens": 2,
        "num_discarded_tokens": 1,
        "acceptance_rate": 0.25,
        "mean_acceptance_length": 2.0,
        "tokens_per_target_step": 4 / 3,
        "mean_live_sequences": 2.5,
        "queue_seconds": 0.5,
        "first_token_seconds": 1.0,
        "e2e_seconds": 4.0,
        "time_per_output_token_seconds": 1.0,
        "prefill_seconds": 0.25,
        "draft_seconds": 0.5,
        "verify_seconds": 1.0,
        "overhead_seconds": 0.25,
        "device_seconds": 2.0,
        "cost_usd": 1.0,
        "est_target_only_device_seconds": 3.0,
        "worker": 3,
        "attempt": 2,
    }


def test_an_error_row_has_null_for_what_an_answer_has_and_keeps_what_it_cost() -> None:
    schema = ResultSchema(PROMPT, InputConfig())
    times = StepTimes(e2e_seconds=9.0, prefill_seconds=1.0)
    row = ResultRow(failure(input_tokens=9000, times=times), worker=0, attempt=1, price_per_hour=3600.0)
    [shown] = build(schema, prompts(1), [row]).to_pylist()
    assert {name: value for name, value in shown.items() if value is not None} == {
        "prompt": "p",
        "row_index": 0,
        "source_file": "/data/in.parquet",
        "source_row": 0,
        "error_type": "context_overflow",
        "error_message": "9000 tokens do not fit 2048",
        "input_tokens": 9000,
        "prefill_seconds": 1.0,
        "draft_seconds": 0.0,
        "verify_seconds": 0.0,
        "overhead_seconds": 0.0,
        "device_seconds": 1.0,
        "cost_usd": 1.0,
        "worker": 0,
        "attempt": 1,
    }


def test_m01_what_is_unknown_is_null_and_never_0() -> None:
    schema = ResultSchema(PROMPT, InputConfig())
    one_token = answer(token_ids=(2,), stats=DecodeStats(num_target_steps=1), method=Method.TARGET_ONLY)
    [shown] = build(schema, prompts(1), [ResultRow(one_token, 0, 1)]).to_pylist()
    unknown = ["acceptance_rate", "mean_acceptance_length", "time_per_output_token_seconds", "cost_usd"]
    assert [shown[name] for name in unknown] == [None] * 4
    assert shown["est_target_only_device_seconds"] is None
    assert shown["spec_decode_num_draft_tokens"] == 0
    assert shown["spec_decode_num_accepted_tokens_per_pos"] == []


@pytest.mark.parametrize(
    "stats",
    [
        DecodeStats(num_target_steps=3),
        DecodeStats(num_target_steps=4, num_drafts=1, num_draft_tokens=1, num_accepted_tokens=2),
    ],
)
def test_m03_a_broken_identity_is_raised_with_its_row(stats: DecodeStats) -> None:
    schema = ResultSchema(PROMPT, InputConfig())
    rows = [ResultRow(answer(10), 0, 1), ResultRow(answer(11, stats=stats), 0, 1)]
    with pytest.raises(BatchspecError, match=r"in.parquet, row 21 \(row_index 11\): counter identity broken"):
        schema.build_table(prompts(2), "in.parquet", 20, rows)


def test_r10_outcomes_that_do_not_fit_their_rows_are_refused() -> None:
    schema = ResultSchema(PROMPT, InputConfig())
    rows = [ResultRow(answer(0), 0, 1), ResultRow(answer(2), 0, 1)]
    with pytest.raises(BatchspecError, match="row 1: outcome of row_index 2 is out of order"):
        schema.build_table(prompts(2), "in.parquet", 0, rows)
    with pytest.raises(BatchspecError, match="2 outcomes for 3 rows"):
        schema.build_table(prompts(3), "in.parquet", 0, rows)
    with pytest.raises(BatchspecError, match="rows of another schema: other"):
        schema.build_table(pa.table({"other": [1]}), "in.parquet", 0, rows[:1])


def test_every_result_column_says_unit_and_meaning() -> None:
    schema = ResultSchema(PROMPT, InputConfig()).arrow
    assert schema.names == ["prompt", *RESULT_NAMES]
    for name in RESULT_NAMES:
        metadata = schema.field(name).metadata
        assert set(metadata) == {b"unit", b"description"}
        assert metadata[b"description"]
        if name.endswith("_seconds"):
            assert metadata[b"unit"].startswith(b"seconds")
        if name.endswith("_usd"):
            assert metadata[b"unit"] == b"USD"
    read_back = through_parquet(schema.empty_table()).schema
    assert read_back.field("cost_usd").metadata[b"unit"] == b"USD"


def test_p01_answers_errors_and_empty_parts_have_one_schema(tmp_path: Path) -> None:
    schema = ResultSchema(PROMPT, InputConfig())
    plain = answer(0, stats=DecodeStats(num_target_steps=4), method=Method.TARGET_ONLY)
    parts = [[ResultRow(plain, 0, 1)], [ResultRow(plain, 0, 1)], [], [ResultRow(failure(), 0, 1)]]
    for number, rows in enumerate(parts):
        pq.write_table(build(schema, prompts(len(rows)), rows), tmp_path / f"part-{number}.parquet")
    assert len({pq.read_schema(path).to_string() for path in tmp_path.iterdir()}) == 1
    whole = pyarrow.dataset.dataset(tmp_path).to_table()
    assert whole["error_type"].to_pylist() == [None, None, "context_overflow"]
    assert whole["acceptance_rate"].null_count == 3
    assert whole["acceptance_rate"].type == pa.float64()
    pa.concat_tables(pq.read_table(path) for path in tmp_path.iterdir())


def test_p13_a_part_without_rows_has_the_full_schema() -> None:
    schema = ResultSchema(PROMPT, InputConfig())
    table = through_parquet(build(schema, prompts(0), []))
    assert table.schema == schema.arrow
    assert table.num_rows == 0


@pytest.mark.parametrize("names", [["method"], ["Output_Text", "worker"], ["row_index"], ["cost_usd"]])
def test_a_clash_of_names_is_refused_and_a_prefix_is_the_way_out(names: list[str]) -> None:
    schema = pa.schema([*PROMPT, *(pa.field(name, pa.int8()) for name in names)])
    with pytest.raises(InputError, match=rf"names too: {', '.join(names)}\. Add --output-prefix"):
        _ = ResultSchema(schema, InputConfig()).arrow
    prefixed = ResultSchema(schema, InputConfig(), prefix="gen_").arrow
    assert prefixed.names == ["prompt", *names, *(f"gen_{name}" for name in RESULT_NAMES)]


IDS = {
    "int64": pa.array([2**60 + 1, None]),
    "string": pa.array(["x", None]),
    "uuid": pa.array([uuid.UUID(int=1).bytes, None], pa.uuid()),
    "binary(16)": pa.array([b"\xff" * 16, None], pa.binary(16)),
    "dictionary": pa.array(["x", None]).dictionary_encode(),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize(
    ("column", "config", "prefix", "expected_names"),
    [
        ("request_id", InputConfig(), "", ["prompt", "request_id", "row_index"]),
        ("uid", InputConfig(request_id_column="uid"), "", ["prompt", "uid", "row_index"]),
        ("request_id", InputConfig(), "gen_", ["prompt", "request_id", "gen_row_index"]),
    ],
)
def test_p10_ids_keep_digits_and_type(
    ids: pa.Array, column: str, config: InputConfig, prefix: str, expected_names: list[str]
) -> None:
    input_rows = pa.table({"prompt": ["a", "b"], column: ids})
    schema = ResultSchema(input_rows.schema, config, prefix)
    table = through_parquet(build(schema, input_rows, [ResultRow(answer(i), 0, 1) for i in range(2)]))
    assert table.schema.names[:3] == expected_names
    for name in {column, f"{prefix}request_id"}:
        assert table.schema.field(name).type == ids.type
        assert table[name].combine_chunks().equals(ids)
    assert table.schema.names.count(f"{prefix}request_id") == 1


def test_an_id_column_of_another_name_must_not_hide_one_that_is_there() -> None:
    schema = pa.schema({"prompt": pa.string(), "uid": pa.int64(), "request_id": pa.string()})
    with pytest.raises(InputError, match="names too: request_id"):
        _ = ResultSchema(schema, InputConfig(request_id_column="uid")).arrow


def test_the_inputs_class_passes_through_and_a_derived_one_fills_in_where_there_is_none() -> None:
    rows = [ResultRow(answer(0), 0, 1, request_class="qa"), ResultRow(failure(1), 0, 1, request_class="default")]
    own = pa.table({"prompt": ["a", "b"], "request_class": pa.array([7, None], pa.int32())})
    assert build(ResultSchema(own.schema, InputConfig()), own, rows)["request_class"].to_pylist() == [7, None]
    derived = build(ResultSchema(PROMPT, InputConfig()), prompts(2), rows)
    assert derived["request_class"].to_pylist() == ["qa", "default"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None], pa.timestamp("ns", "Europe/Berlin")),
        pa.array(["1.50", None]).cast(pa.decimal128(10, 2)),
        pa.array([[1.5, None], None], pa.large_list(pa.float32())),
        pa.array([{"x": [{"y": 1}]}, None]),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        pa.array(["a", None], pa.string_view()),
        pa.array([1, None], pa.duration("us")),
        pa.array([1.5, None], pa.float16()),
        pa.nulls(2),
    ],
    ids=lambda column: str(column.type),
)
def test_p14_exotic_columns_come_out_as_they_went_in(tmp_path: Path, column: pa.Array) -> None:
    inputs = resolve(write(tmp_path / "in.parquet", {"prompt": ["a", "b"], "x": column}))
    schema = ResultSchema(inputs.schema, InputConfig())
    table = through_parquet(build(schema, read(inputs), [ResultRow(answer(i), 0, 1) for i in range(2)]))
    assert table.schema.field("x").type == column.type
    assert table["x"].combine_chunks().equals(column)


def test_p14_a_type_that_parquet_cannot_write_is_refused_up_front() -> None:
    schema = pa.schema({"prompt": pa.string(), "nothing": pa.struct([])})
    with pytest.raises(InputError, match=r"Parquet cannot hold.*nothing.*Drop it or convert it"):
        _ = ResultSchema(schema, InputConfig()).arrow


def test_a_column_that_may_not_be_null_is_no_obstacle() -> None:
    schema = pa.schema([pa.field("prompt", pa.string(), nullable=False)])
    assert not ResultSchema(schema, InputConfig()).arrow.field("prompt").nullable


def test_text_that_is_not_valid_unicode_is_written_readably() -> None:
    rows = [ResultRow(answer(0, text="a\ud800"), 0, 1), ResultRow(RowFailure(1, "x", "b\udfff"), 0, 1)]
    table = build(ResultSchema(PROMPT, InputConfig()), prompts(2), rows)
    assert table["output_text"].to_pylist() == [r"a\ud800", None]
    assert table["error_message"].to_pylist() == [None, r"b\udfff"]


VALUES = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "text": (pa.string(), st.text(max_size=5)),
    "large text": (pa.large_string(), st.text(max_size=5)),
    "category": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "y"])),
    "bytes": (pa.binary(), st.binary(max_size=5)),
    "list": (pa.list_(pa.float64()), st.lists(st.floats(allow_nan=False), max_size=3)),
    "struct": (
        pa.struct({"a": pa.int8(), "b": pa.string()}),
        st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.text()}),
    ),
    "time": (pa.timestamp("ns", "UTC"), st.integers(-(2**60), 2**60)),
}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), count=st.integers(0, 6))
def test_any_input_passes_through_to_the_part_and_back(tmp_path: Path, data: st.DataObject, count: int) -> None:
    columns = {"prompt": pa.array(["p"] * count, pa.string())}
    for name in data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True)):
        kind, values = VALUES[name]
        drawn = data.draw(st.lists(st.none() | values, min_size=count, max_size=count))
        columns[name] = pa.array(drawn, pa.int64()).cast(kind) if name == "time" else pa.array(drawn, kind)
    fails = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    inputs = resolve(write(tmp_path / "in.parquet", columns, row_group_size=data.draw(st.integers(1, 4))))
    rows = [ResultRow(failure(i) if fail else answer(i), 0, 1) for i, fail in enumerate(fails)]
    table = through_parquet(build(ResultSchema(inputs.schema, InputConfig()), read(inputs), rows))
    for name, column in columns.items():
        assert table.schema.field(name).type == column.type
        assert table[name].to_pylist() == column.to_pylist()
    assert [name is not None for name in table["error_type"].to_pylist()] == fails
