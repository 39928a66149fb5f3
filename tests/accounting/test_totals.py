import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.accounting.cost import ROW_LINES, StepAttributionRule
from batchspec.accounting.totals import RowTotals, Totals, sum_rows
from batchspec.config import EngineConfig, InputConfig
from batchspec.engine.fake import FakeEngine
from batchspec.io.schema import ResultRow, ResultSchema
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.scope import ListSource
from batchspec.stats import DecodeStats
from batchspec.types import Completion, Method, Request, Route

WritePart = Callable[..., Path]


def answered(request_class: str | None = "a", method: str = "target_only", **columns: Any) -> dict[str, Any]:
    row = {
        "request_class": request_class,
        "method": method,
        "input_tokens": 10,
        "output_tokens": 4,
        "num_target_steps": 4,
        "num_draft_steps": 0,
        "spec_decode_num_drafts": 0,
        "spec_decode_num_draft_tokens": 0,
        "spec_decode_num_accepted_tokens": 0,
        "num_discarded_tokens": 0,
        "mean_live_sequences": 2.0,
        "device_seconds": 0.5,
        "cost_usd": 0.25,
    }
    return row | columns


def failed(request_class: str | None = "a", error_type: str = "empty_prompt", **columns: Any) -> dict[str, Any]:
    return {
        "request_class": request_class,
        "error_type": error_type,
        "device_seconds": 0.125,
        "cost_usd": 0.0625,
    } | columns


LOOKUP = {
    "method": "prompt_lookup",
    "num_target_steps": 2,
    "spec_decode_num_drafts": 1,
    "spec_decode_num_draft_tokens": 4,
    "spec_decode_num_accepted_tokens": 2,
    "mean_live_sequences": 8.0,
}


def test_rows_are_summed_by_class_and_method(write_part: WritePart) -> None:
    parts = [
        write_part([answered(), answered("b"), answered(**LOOKUP)]),
        write_part([answered(output_tokens=6, num_target_steps=6, mean_live_sequences=4.0), failed("b")]),
    ]
    totals = sum_rows(parts)
    assert list(totals.groups) == [("a", "prompt_lookup"), ("a", "target_only"), ("b", "error"), ("b", "target_only")]
    plain = totals.groups["a", "target_only"]
    assert (plain.rows, plain.input_tokens, plain.output_tokens, plain.device_seconds) == (2, 20, 10, 1.0)
    assert plain.mean_live_sequences == (2.0 * 4 + 4.0 * 6) / 10
    assert totals.by_class()["a"].stats.acceptance_rate == 0.5
    assert totals.by_method()["target_only"].rows == 3
    job = totals.job
    assert (job.rows, job.error_rows, job.output_tokens, job.device_seconds, job.cost_usd) == (5, 1, 18, 2.125, 1.0625)


def test_m01_aggregates_skip_rows_that_proposed_nothing(write_part: WritePart) -> None:
    totals = sum_rows([write_part([answered(**LOOKUP), *[answered("b")] * 50, failed()])])
    assert totals.job.stats.acceptance_rate == 0.5
    figures = totals.by_class()["b"].as_json()
    assert figures["acceptance_rate"] is None
    assert figures["mean_acceptance_length"] is None
    assert figures["tokens_per_target_step"] == 1.0


def test_error_rows_bring_their_time_but_no_tokens(write_part: WritePart) -> None:
    totals = sum_rows([write_part([failed(error_type="context_overflow", input_tokens=10**6), failed(), failed()])])
    assert totals.error_types == {"context_overflow": 1, "empty_prompt": 2}
    assert totals.job == Totals(rows=3, error_rows=3, device_seconds=0.375, cost_usd=0.1875)
    figures = totals.job.as_json()
    assert figures["output_tokens_per_device_second"] == 0.0
    assert figures["active_usd_per_million_output_tokens"] is None


def test_one_row_without_a_price_makes_the_cost_unknown(write_part: WritePart) -> None:
    totals = sum_rows([write_part([answered(), answered(cost_usd=None), answered("b")])])
    assert totals.by_class()["a"].cost_usd is None
    assert totals.by_class()["b"].cost_usd == 0.25
    assert totals.job.cost_usd is None


def test_p13_no_parts_and_empty_parts(write_part: WritePart) -> None:
    assert sum_rows([]) == sum_rows([write_part([])]) == RowTotals()
    assert sum_rows([write_part([]), write_part([answered()])]).job.rows == 1
    assert RowTotals().job.as_json()["tokens_per_target_step"] is None


def test_prefix_and_the_inputs_own_class_column(write_part: WritePart) -> None:
    part = write_part([answered("x")], prefix="gen_", class_column="my.class")
    assert list(sum_rows([part], prefix="gen_", class_column="my.class").groups) == [("x", "target_only")]


def test_rows_without_a_class_are_the_class_default(write_part: WritePart) -> None:
    part = write_part([answered(None), answered("default"), answered("")])
    assert {name: totals.rows for name, totals in sum_rows([part]).by_class().items()} == {"default": 3}


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (pa.array(["é", None], pa.dictionary(pa.int8(), pa.string())), {"é", "default"}),
        (pa.array(["é", None], pa.large_string()), {"é", "default"}),
        (pa.array([b"\xe9", b"plain"], pa.binary()), {"\\xe9", "plain"}),
        (pa.array([b"\xe9", b"plain"], pa.binary()).view(pa.string()), {"\\xe9", "plain"}),
        (pa.array([2**60 + 1, None], pa.int64()), {"1152921504606846977", "default"}),
        (pa.array([[1, 2], None], pa.list_(pa.int8())), {"[1, 2]", "default"}),
    ],
)
def test_classes_of_every_type_are_the_labels_that_routing_sees(
    write_part: WritePart, tmp_path: Path, classes: pa.Array, labels: set[str]
) -> None:
    table = pq.read_table(write_part([answered(), answered()]))
    path = tmp_path / "typed.parquet"
    pq.write_table(table.set_column(0, "request_class", classes), path)
    assert set(sum_rows([path]).by_class()) == labels


def test_open_files_are_read_one_at_a_time(write_part: WritePart) -> None:
    paths = [write_part([answered()]) for _ in range(3)]
    opened = []

    def files() -> Any:
        for path in paths:
            with path.open("rb") as file:
                opened.append(file)
                yield file

    assert sum_rows(files()).job.rows == 3
    assert all(file.closed for file in opened)


def test_many_parts_sum_to_the_same_as_one(write_part: WritePart) -> None:
    draw = random.Random(3)
    rows = [answered(draw.choice("abc"), draw.choice(["target_only", "prompt_lookup"])) for _ in range(900)]
    rows += [failed(draw.choice("abc"), draw.choice(["empty_prompt", "bad_encoding"])) for _ in range(100)]
    draw.shuffle(rows)
    parts = [write_part(rows[start : start + 7]) for start in range(0, 1000, 7)]
    many, one = sum_rows(parts), sum_rows([write_part(rows)])
    assert len(parts) > 2 * 64
    assert many == one
    assert many.job.rows == 1000


def test_parts_of_a_real_run_sum_to_its_counters(tmp_path: Path) -> None:
    rows = [Request(i, prompt=f"row {i}", request_class="ab"[i % 2]) for i in range(80)]
    rows.append(Request(80, prompt="x" * 40_000, request_class="a"))
    engine = FakeEngine.load(EngineConfig(engine="fake"), "cpu", 1, 1.0, StepAttributionRule())
    policy = StaticPolicy(Route(Method.TARGET_ONLY), {"b": Route(Method.PROMPT_LOOKUP, 4)})
    outcomes = sorted(engine.run(ListSource(rows), policy), key=lambda outcome: outcome.row_index)
    results = [ResultRow(outcome, 0, 1, 2.0, row.request_class) for outcome, row in zip(outcomes, rows, strict=True)]
    prompts = pa.table({"prompt": [row.prompt for row in rows]})
    schema = ResultSchema(prompts.schema, InputConfig(), prefix="gen_")
    pq.write_table(schema.build_table(prompts, "in.parquet", 0, results), tmp_path / "part-00000.parquet")

    totals = sum_rows([tmp_path / "part-00000.parquet"], prefix="gen_", class_column="gen_request_class")
    answers = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    assert list(totals.groups) == [("a", "error"), ("a", "target_only"), ("b", "prompt_lookup")]
    assert totals.error_types == {"context_overflow": 1}
    assert totals.job.output_tokens == sum(answer.output_tokens for answer in answers)
    assert totals.job.input_tokens == sum(answer.input_tokens for answer in answers)
    counted = sum((answer.stats for answer in answers), start=DecodeStats())
    assert totals.job.stats.num_target_steps == counted.num_target_steps
    assert totals.job.stats.acceptance_rate == counted.acceptance_rate
    on_rows = sum(engine.metered_seconds[name] for name in ROW_LINES)
    assert totals.job.device_seconds == pytest.approx(on_rows)
    assert totals.job.cost_usd == pytest.approx(on_rows / 3600 * 2.0)
