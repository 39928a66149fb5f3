import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.accounting.cost import (
    Ledger,
    MeteredTime,
    StepAttributionRule,
    cost_usd,
    usd_per_million,
)

RULE = StepAttributionRule()
rows = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100_000)), min_size=1, max_size=64)


@given(rows)
def test_shares_are_not_negative_and_sum_to_one(step: list[tuple[int, int]]) -> None:
    shares = RULE.shares([positions for positions, _ in step], [context for _, context in step])
    assert len(shares) == len(step)
    assert all(0 < share <= 1 for share in shares)
    assert math.isclose(sum(shares), 1, rel_tol=1e-12)


@given(rows, st.integers(0, 63), st.integers(1, 100), st.integers(1, 10_000))
def test_more_positions_or_a_longer_context_never_make_a_share_smaller(
    step: list[tuple[int, int]], row: int, more_positions: int, more_context: int
) -> None:
    row %= len(step)
    positions, context = [p for p, _ in step], [c for _, c in step]
    before = RULE.shares(positions, context)
    positions[row] += more_positions
    after_positions = RULE.shares(positions, context)
    context[row] += more_context
    after_both = RULE.shares(positions, context)
    alone = len(step) == 1
    assert alone or before[row] < after_positions[row] < after_both[row]
    others = [i for i in range(len(step)) if i != row]
    assert all(after_both[i] < before[i] for i in others)


@given(rows, st.randoms())
def test_a_share_does_not_depend_on_the_order_of_rows(step: list[tuple[int, int]], random: object) -> None:
    order = list(range(len(step)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shares = RULE.shares([p for p, _ in step], [c for _, c in step])
    shuffled = RULE.shares([step[i][0] for i in order], [step[i][1] for i in order])
    assert shuffled == pytest.approx([shares[i] for i in order], rel=1e-12)


def test_shares_by_hand() -> None:
    rule = StepAttributionRule(
        seconds_per_step=4.0, seconds_per_sequence=1.0, seconds_per_position=2.0, seconds_per_kv_token=0.5
    )
    # 4 / 2 + 1 + 2 * 1 + 0.5 * 2 = 6 and 4 / 2 + 1 + 2 * 3 + 0.5 * 6 = 12
    assert rule.shares([1, 3], [2, 6]) == [6 / 18, 12 / 18]
    assert rule.shares([1], [100]) == [1.0]
    assert rule.shares([], []) == []


def test_the_defaults_give_the_measured_step_time() -> None:
    at_128 = RULE.seconds_per_sequence + 128 * RULE.seconds_per_kv_token
    assert at_128 == pytest.approx(0.35e-3, rel=0.01)
    # 32 sequences at 1,024 tokens of context: 4 and 9 positions per sequence cost 1.65 and 2.70 times as much as 1
    one, four, nine = (
        RULE.seconds_per_step
        + 32 * (RULE.seconds_per_sequence + m * RULE.seconds_per_position + 1024 * RULE.seconds_per_kv_token)
        for m in (1, 4, 9)
    )
    assert four / one == pytest.approx(1.65, rel=0.02)
    assert nine / one == pytest.approx(2.70, rel=0.02)


def test_the_rule_names_its_coefficients() -> None:
    assert RULE.rule == (
        "step_cost(per_step=0.027s, per_sequence=8e-05s, per_position=0.00085s, per_kv_token=2.1e-06s)"
    )


@pytest.mark.parametrize(
    "coefficients",
    [
        {"seconds_per_position": -1e-3},
        {"seconds_per_kv_token": math.nan},
        {"seconds_per_step": math.inf},
        {"seconds_per_step": 0.0, "seconds_per_sequence": 0.0},
    ],
)
def test_a_rule_that_cannot_split_is_refused(coefficients: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="step costs must be finite and not negative"):
        StepAttributionRule(**coefficients)


@pytest.mark.parametrize(
    ("seconds", "price", "expected"),
    [(3600.0, 2.0, 2.0), (1800.0, 2.0, 1.0), (0.0, 2.0, 0.0), (3600.0, 0.0, 0.0), (3600.0, None, None)],
)
def test_m05_cost_is_device_hours_times_the_hourly_price(
    seconds: float, price: float | None, expected: float | None
) -> None:
    assert cost_usd(seconds, price) == expected


@pytest.mark.parametrize(
    ("cost", "tokens", "expected"),
    [(2.0, 1_000_000, 2.0), (2.0, 1_000, 2000.0), (2.0, 4_000_000, 0.5), (2.0, 0, None), (None, 10, None), (0.0, 5, 0)],
)
def test_m05_prices_are_per_million_tokens(cost: float | None, tokens: int, expected: float | None) -> None:
    assert usd_per_million(cost, tokens) == expected


def test_metered_time_adds_line_by_line() -> None:
    total = MeteredTime(10.0, {"load": 1.0, "idle": 2.0}) + MeteredTime(5.0, {"idle": 1.0, "audit": 0.5})
    assert total == MeteredTime(15.0, {"load": 1.0, "idle": 3.0, "audit": 0.5})
    assert sum([total], start=MeteredTime()) == total


def test_rows_lines_and_the_rest_are_the_metered_time() -> None:
    lines = {"load": 5.0, "prefill": 20.0, "draft": 3.0, "verify": 60.0, "overhead": 7.0, "idle": 4.5}
    ledger = Ledger.balance(MeteredTime(100.0, lines), row_seconds=90.0)
    assert ledger.line_seconds == {"load": 5.0, "idle": 4.5, "repeated": 0.0}
    assert ledger.unattributed_seconds == pytest.approx(0.5)
    assert ledger.unattributed_share == pytest.approx(0.005)
    ledger.check()


def test_work_on_rows_that_the_output_does_not_hold_is_a_line_of_its_own() -> None:
    ledger = Ledger.balance(MeteredTime(100.0, {"load": 10.0, "verify": 90.0}), row_seconds=70.0)
    assert ledger.line_seconds == {"load": 10.0, "repeated": 20.0}
    assert ledger.unattributed_seconds == 0.0


@pytest.mark.parametrize("row_seconds", [0.0, 92.0])
def test_time_that_nothing_explains_is_refused_with_the_numbers(row_seconds: float) -> None:
    lines = {"load": 8.0, "verify": row_seconds}
    Ledger.balance(MeteredTime(8.0 + row_seconds, lines), row_seconds).check()
    with pytest.raises(ValueError, match=r"-?\d+\.\d{3} of \d+\.\d{3} metered device seconds are neither on rows"):
        Ledger.balance(MeteredTime((8.0 + row_seconds) * 1.05, lines), row_seconds).check()
    with pytest.raises(ValueError, match="neither on rows"):
        Ledger.balance(MeteredTime((8.0 + row_seconds) * 0.95, lines), row_seconds).check()


def test_no_time_at_all_is_in_balance() -> None:
    ledger = Ledger.balance(MeteredTime(), 0.0)
    ledger.check()
    assert ledger.unattributed_share is None
