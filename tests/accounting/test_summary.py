import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchspec.accounting.cost import MeteredTime
from batchspec.accounting.summary import AttemptTime, JobSummary
from batchspec.accounting.totals import sum_rows

WritePart = Callable[..., Path]


def row(request_class: str, device_seconds: float, price: float | None, **columns: Any) -> dict[str, Any]:
    cost = None if price is None else device_seconds / 3600 * price
    return {"request_class": request_class, "device_seconds": device_seconds, "cost_usd": cost} | columns


def one_hour(price: float | None = 2.0) -> list[dict[str, Any]]:
    """Rows of a job that took one device hour: 2,000 s on answers, 400 s on error rows, 1,200 s on lines."""
    answer = {"method": "target_only", "num_target_steps": 125_000, "mean_live_sequences": 16.0}
    lookup = {
        "method": "prompt_lookup",
        "num_target_steps": 50_000,
        "num_draft_steps": 0,
        "spec_decode_num_drafts": 40_000,
        "spec_decode_num_draft_tokens": 160_000,
        "spec_decode_num_accepted_tokens": 75_000,
        "mean_live_sequences": 30.0,
    }
    return [
        row("chat", 1500.0, price, input_tokens=300_000, output_tokens=125_000, **answer),
        row("code", 500.0, price, input_tokens=200_000, output_tokens=125_000, **lookup),
        row("code", 100.0, price, input_tokens=9_000_000, error_type="context_overflow"),
        row("code", 300.0, price, error_type="worker_lost"),
    ]


LINES = {"load": 600.0, "warmup": 64.0, "idle": 500.0, "prefill": 400.0, "draft": 50.0, "verify": 1900.0}
LINES["overhead"] = 50.0
ONE_HOUR = AttemptTime(wall_seconds=1900.0, decode_wall_seconds=1250.0, metered=MeteredTime(3600.0, LINES))


def attempt(price: float | None) -> AttemptTime:
    return AttemptTime(ONE_HOUR.wall_seconds, ONE_HOUR.decode_wall_seconds, ONE_HOUR.metered, price)


def summarize(part: Path, *prices: float | None) -> JobSummary:
    return JobSummary(sum_rows([part]), [attempt(price) for price in prices], "out/é", True, 32)


def test_m05_one_hour_at_two_dollars_by_hand(write_part: WritePart) -> None:
    summary = summarize(write_part(one_hour()), 2.0)
    figures = summary.as_json()
    assert (figures["rows"], figures["error_rows"]) == (4, 2)
    assert (figures["input_tokens"], figures["output_tokens"]) == (500_000, 250_000)
    assert figures["device_seconds"] == 3600.0
    assert figures["cost_usd"] == 2.0
    # 2 USD over 0.25, 0.5 and 0.75 million tokens
    assert figures["usd_per_million_output_tokens"] == 8.0
    assert figures["usd_per_million_input_tokens"] == 4.0
    assert figures["usd_per_million_total_tokens"] == pytest.approx(8 / 3)
    # 2,400 s on rows, those of error rows once among them: 4/3 USD
    assert figures["row_device_seconds"] == 2400.0
    assert figures["active_usd_per_million_output_tokens"] == pytest.approx(16 / 3)
    assert figures["active_usd_per_million_input_tokens"] == pytest.approx(8 / 3)
    assert figures["active_usd_per_million_total_tokens"] == pytest.approx(16 / 9)
    assert figures["output_tokens_per_second"] == 200.0
    assert figures["price_per_hour"] == [2.0]


def test_m05_row_costs_and_line_costs_are_the_cost_of_the_job(write_part: WritePart) -> None:
    summary = summarize(write_part(one_hour()), 2.0)
    figures = summary.as_json()
    lines = {"load": 600.0, "warmup": 64.0, "idle": 500.0, "repeated": 0.0}
    assert figures["line_device_seconds"] == lines
    assert figures["unattributed_seconds"] == 36.0
    assert figures["unattributed_share"] == 0.01
    summary.ledger.check()
    of_rows = sum(group["cost_usd"] for group in figures["classes"].values())
    assert of_rows == pytest.approx(sum(group["cost_usd"] for group in figures["methods"].values()))
    assert of_rows + (sum(lines.values()) + 36.0) / 3600 * 2.0 == pytest.approx(figures["cost_usd"])


def test_classes_and_methods_are_sums_over_sums(write_part: WritePart) -> None:
    figures = summarize(write_part(one_hour()), 2.0).as_json()
    assert list(figures["methods"]) == ["target_only", "error", "prompt_lookup"]
    assert list(figures["classes"]) == ["chat", "code"]
    lookup = figures["classes"]["code"]["methods"]["prompt_lookup"]
    assert lookup["acceptance_rate"] == 75_000 / 160_000
    assert lookup["mean_acceptance_length"] == 1 + 75_000 / 40_000
    assert lookup["tokens_per_target_step"] == 2.5
    assert lookup["output_tokens_per_device_second"] == 250.0
    assert lookup["active_usd_per_million_output_tokens"] == pytest.approx(500 / 3600 * 2 / 0.125)
    code = figures["classes"]["code"]
    assert (code["rows"], code["error_rows"], code["device_seconds"]) == (3, 2, 900.0)
    assert figures["mean_live_sequences"] == (125_000 * 16 + 50_000 * 30) / 175_000
    assert figures["tokens_per_target_step"] == 250_000 / 175_000
    assert figures["error_types"] == {"context_overflow": 1, "worker_lost": 1}


def test_attempts_add_up_and_each_has_its_own_price(write_part: WritePart) -> None:
    summary = summarize(write_part(one_hour()), 2.0, 0.5)
    figures = summary.as_json()
    assert figures["cost_usd"] == 2.5
    assert figures["price_per_hour"] == [0.5, 2.0]
    assert (figures["wall_seconds"], figures["decode_wall_seconds"], figures["attempts"]) == (3800.0, 2500.0, 2)
    assert figures["line_device_seconds"]["repeated"] == 2400.0


@pytest.mark.parametrize("prices", [[None], [2.0, None]])
def test_a_price_that_is_not_known_makes_every_cost_null(write_part: WritePart, prices: list[float | None]) -> None:
    figures = summarize(write_part(one_hour(2.0)), *prices).as_json()
    assert {name: value for name, value in figures.items() if "usd" in name and value is not None} == {}


def test_p13_an_empty_job_has_no_division(write_part: WritePart) -> None:
    nothing = AttemptTime(1.0, 0.0, MeteredTime(0.0, {}), 2.0)
    figures = JobSummary(sum_rows([write_part([])]), [nothing], "out", True, 32).as_json()
    assert (figures["rows"], figures["output_tokens"], figures["methods"], figures["classes"]) == (0, 0, {}, {})
    assert figures["output_tokens_per_second"] is None
    assert figures["usd_per_million_output_tokens"] is None
    assert figures["unattributed_share"] is None
    json.dumps(figures, allow_nan=False)


def test_p13_a_job_of_error_rows_alone(write_part: WritePart) -> None:
    figures = summarize(write_part(one_hour()[2:]), 2.0).as_json()
    assert (figures["rows"], figures["error_rows"], figures["cost_usd"]) == (2, 2, 2.0)
    assert figures["usd_per_million_output_tokens"] is None
    json.dumps(figures, allow_nan=False)


def test_it_is_strict_json_with_the_names_that_scripts_rely_on(write_part: WritePart) -> None:
    figures = summarize(write_part(one_hour(None)), None).as_json()
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    wanted = (
        "rows error_rows input_tokens output_tokens wall_seconds decode_wall_seconds output_tokens_per_second "
        "device_seconds unattributed_seconds cost_usd usd_per_million_output_tokens methods classes "
        "batch_invariant output"
    )
    assert set(wanted.split()) <= set(figures)
    assert (figures["output"], figures["batch_invariant"], figures["max_batch"]) == ("out/é", True, 32)
