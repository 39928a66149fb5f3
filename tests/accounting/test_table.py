import unicodedata
from typing import Any

import pytest

from batchspec.accounting.cost import MeteredTime
from batchspec.accounting.summary import AttemptTime, JobSummary
from batchspec.accounting.table import format_table
from batchspec.accounting.totals import RowTotals, Totals
from batchspec.accounting.usage import Usage
from batchspec.stats import DecodeStats

LINES = {"load": 600.0, "warmup": 64.0, "idle": 500.0, "verify": 2400.0}
LOOKUP = DecodeStats(num_target_steps=50_000, num_drafts=40_000, num_draft_tokens=160_000, num_accepted_tokens=75_000)
GROUPS = {
    ("chat", "target_only"): Totals(
        rows=1000,
        input_tokens=300_000,
        output_tokens=125_000,
        device_seconds=1500.0,
        cost_usd=5 / 6,
        live_sequence_steps=125_000 * 16.0,
        stats=DecodeStats(num_target_steps=125_000),
    ),
    ("code", "error"): Totals(rows=2, error_rows=2, device_seconds=400.0, cost_usd=2 / 9),
    ("code", "prompt_lookup"): Totals(
        rows=900,
        input_tokens=200_000,
        output_tokens=125_000,
        device_seconds=500.0,
        cost_usd=5 / 18,
        live_sequence_steps=50_000 * 30.0,
        stats=LOOKUP,
    ),
}


def summary(groups: dict[tuple[str, str], Totals], price: float | None = 2.0, **error_types: int) -> dict[str, Any]:
    attempt = AttemptTime(1900.0, 1250.0, MeteredTime(3600.0, LINES), price)
    usage = Usage(30, 7, 3 * 2**29, ("chat: target-only from here",))
    return JobSummary(RowTotals(groups, error_types), [attempt], "out", True, 32, usage=usage).as_json()


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


def test_the_table_by_class_and_method() -> None:
    table = format_table(summary(GROUPS, context_overflow=1, worker_lost=1))
    assert table.splitlines() == [
        "class              method                  rows     out tokens tok/dev-s accepted tok/step USD/M out",
        "chat               target_only            1,000        125,000      83.3        -     1.00     6.667",
        "code               error                      2              0       0.0        -        -         -",
        "code               prompt_lookup            900        125,000     250.0    0.469     2.50     2.222",
        "all rows                                  1,902        250,000     104.2    0.469     1.43     5.333",
        "",
        "1,902 rows, 2 of them errors; 500,000 input and 250,000 output tokens in 1250.0 s of decoding",
        "  (1900.0 s in all): 200.0 tokens/s.",
        "Batch: at most 32, 20.0 live on average, 30 at the peak; results independent of it",
        "  (batch_invariant): yes.",
        "Metered: 3600.0 device seconds = 2400.0 rows + 600.0 load + 64.0 warmup + 500.0 idle + 0.0 repeated",
        "  + 36.0 unattributed.",
        "Cost: 2.0000 USD; per million output tokens 8.000 over all metered time, 5.333 over the rows' time.",
        "Error rows: context_overflow 1, worker_lost 1.",
        "Memory: a worker held up to 1.5 GiB; 7 times a row gave its KV cache back.",
        "Route: chat: target-only from here.",
    ]


def test_without_a_price_it_says_how_to_give_one() -> None:
    assert "Cost: not known; give --price-per-hour (USD per device-hour)." in format_table(summary(GROUPS, None))


@pytest.mark.parametrize("groups", [{}, {("code", "error"): GROUPS["code", "error"]}])
def test_p13_no_rows_and_error_rows_alone(groups: dict[tuple[str, str], Totals]) -> None:
    table = format_table(summary(groups))
    rows = sum(totals.rows for totals in groups.values())
    assert f"{rows} rows, {rows} of them errors" in table
    assert "nan" not in table.lower()


def test_it_fits_100_columns_whatever_the_classes_are_called() -> None:
    big = Totals(rows=90_000, input_tokens=10**9, output_tokens=900_000_000, device_seconds=1e4, cost_usd=1e5)
    names = ["x" * 300, "要約" * 40, "tab\there", "\x1b[31mred", "", "é", *(f"class {i}" for i in range(100))]
    table = format_table(summary({(name, "lookup_then_draft"): big for name in names}, **{"a" * 150: 3}))
    assert max(columns(line) for line in table.splitlines()) <= 100
    assert "\x1b" not in table
    assert "\t" not in table
    assert "(66 smaller)" in table
    assert len(table.splitlines()) < 60
