import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchspec.accounting.cost import MeteredTime
from batchspec.accounting.summary import AttemptTime, JobSummary, format_table, summarize
from batchspec.accounting.totals import RowTotals, Totals

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


def test_m05_one_hour_at_two_dollars_by_hand(write_part: WritePart) -> None:
    summary = summarize([write_part(one_hour())], [attempt(2.0)], "out", batch_invariant=True, max_batch=32)
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
    summary = summarize([write_part(one_hour())], [attempt(2.0)], "out")
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
    figures = summarize([write_part(one_hour())], [attempt(2.0)], "out").as_json()
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
    summary = summarize([write_part(one_hour())], [attempt(2.0), attempt(0.5)], "out")
    figures = summary.as_json()
    assert figures["cost_usd"] == 2.5
    assert figures["price_per_hour"] == [0.5, 2.0]
    assert (figures["wall_seconds"], figures["decode_wall_seconds"], figures["attempts"]) == (3800.0, 2500.0, 2)
    assert figures["line_device_seconds"]["repeated"] == 2400.0


@pytest.mark.parametrize("prices", [[None], [2.0, None]])
def test_a_price_that_is_not_known_makes_every_cost_null(write_part: WritePart, prices: list[float | None]) -> None:
    figures = summarize([write_part(one_hour(2.0))], [attempt(price) for price in prices], "out").as_json()
    assert {name: value for name, value in figures.items() if "usd" in name and value is not None} == {}


def test_p13_an_empty_job_has_no_division(write_part: WritePart) -> None:
    nothing = AttemptTime(1.0, 0.0, MeteredTime(0.0, {}), 2.0)
    summary = summarize([write_part([])], [nothing], "out")
    figures = json.loads(summary.to_line())
    assert (figures["rows"], figures["output_tokens"], figures["methods"], figures["classes"]) == (0, 0, {}, {})
    assert figures["output_tokens_per_second"] is None
    assert figures["usd_per_million_output_tokens"] is None
    table = format_table(summary)
    assert "0 rows, 0 of them errors" in table
    assert "nan" not in table.lower()


def test_p13_a_job_of_error_rows_alone(write_part: WritePart) -> None:
    summary = summarize([write_part(one_hour()[2:])], [attempt(2.0)], "out")
    assert json.loads(summary.to_line())["usd_per_million_output_tokens"] is None
    table = format_table(summary)
    assert "2 rows, 2 of them errors" in table
    assert "Error rows: context_overflow 1, worker_lost 1." in table


def test_the_line_is_one_line_of_strict_json(write_part: WritePart) -> None:
    line = summarize([write_part(one_hour(None))], [attempt(None)], "out/é").to_line()
    assert "\n" not in line
    assert "NaN" not in line
    figures = json.loads(line)
    wanted = (
        "rows error_rows input_tokens output_tokens wall_seconds decode_wall_seconds output_tokens_per_second "
        "device_seconds unattributed_seconds cost_usd usd_per_million_output_tokens methods classes "
        "batch_invariant output"
    )
    assert set(wanted.split()) <= set(figures)
    assert figures["output"] == "out/é"
    assert figures["batch_invariant"] is None


def test_the_table_by_class_and_method(write_part: WritePart) -> None:
    summary = summarize([write_part(one_hour())], [attempt(2.0)], "out", batch_invariant=True, max_batch=32)
    assert format_table(summary).splitlines() == [
        "class              method                  rows     out tokens tok/dev-s accepted tok/step USD/M out",
        "chat               target_only                1        125,000      83.3        -     1.00     6.667",
        "code               error                      2              0       0.0        -        -         -",
        "code               prompt_lookup              1        125,000     250.0    0.469     2.50     2.222",
        "all rows                                      4        250,000     104.2    0.469     1.43     5.333",
        "",
        "4 rows, 2 of them errors; 500,000 input and 250,000 output tokens in 1250.0 s of decoding (1900.0 s",
        "  in all): 200.0 tokens/s.",
        "Batch: at most 32, 20.0 live on average; results independent of it (batch_invariant): yes.",
        "Metered: 3600.0 device seconds = 2400.0 rows + 600.0 load + 64.0 warmup + 500.0 idle + 0.0 repeated",
        "  + 36.0 unattributed.",
        "Cost: 2.0000 USD; per million output tokens 8.000 over all metered time, 5.333 over the rows' time.",
        "Error rows: context_overflow 1, worker_lost 1.",
    ]


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


def test_the_table_fits_100_columns_whatever_the_classes_are_called() -> None:
    big = Totals(rows=90_000, input_tokens=10**9, output_tokens=900_000_000, device_seconds=1e4, cost_usd=1e5)
    names = ["x" * 300, "要約" * 40, "tab\there", "\x1b[31mred", "", "é", *(f"class {i}" for i in range(100))]
    groups = {(name, "lookup_then_draft"): big for name in names}
    summary = JobSummary(RowTotals(groups, {"a" * 150: 3}), [attempt(2.0)], "out", None, None)
    table = format_table(summary)
    assert max(columns(line) for line in table.splitlines()) <= 100
    assert "\x1b" not in table
    assert "\t" not in table
    assert "(66 smaller)" in table
    assert len(table.splitlines()) < 60
