from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.stats import DecodeCounter, DecodeStats, add_per_pos, ratio

FOUR_STEPS = DecodeStats(
    num_target_steps=4,
    num_drafts=3,
    num_draft_tokens=12,
    num_accepted_tokens=6,
    num_accepted_tokens_per_pos=(3, 2, 1),
    num_rejections_per_pos=(0, 1, 1, 1),
    num_lookup_draft_tokens=12,
    num_lookup_accepted_tokens=6,
)


def decode(answer_length: int, proposals: list[tuple[int, list[bool]]]) -> tuple[int, DecodeStats]:
    """A decode loop in small: the first step prefills, each later one proposes and is judged until the row ends."""
    counter = DecodeCounter(num_target_steps=1)
    num_output_tokens = 1
    for num_proposed, mask in proposals:
        if num_output_tokens == answer_length:
            break
        counter.num_target_steps += 1
        left = answer_length - num_output_tokens
        judged = mask[:num_proposed][:left]
        num_accepted = judged.index(False) if False in judged else len(judged)
        ended = num_accepted == left
        if num_proposed:
            counter.record_draft(num_proposed, num_accepted, num_accepted < num_proposed and not ended, False)
        counter.num_discarded_tokens += ended
        num_output_tokens += num_accepted + (not ended)
    return num_output_tokens, counter.freeze()


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected"), [(1, 2, 0.5), (0, 3, 0.0), (0, 0, None), (5, 0, None), (1.5, 0.5, 3.0)]
)
def test_ratio(numerator: float, denominator: float, expected: float | None) -> None:
    assert ratio(numerator, denominator) == expected


@pytest.mark.parametrize(
    ("stats", "output_tokens"),
    [
        (DecodeStats(num_target_steps=7), 7),  # target-only
        (DecodeStats(num_target_steps=1), 1),  # one token: nothing to propose
        (DecodeStats(), 0),  # an error row
    ],
)
def test_m01_nothing_proposed_has_no_acceptance(stats: DecodeStats, output_tokens: int) -> None:
    stats.check(output_tokens)
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None
    assert stats.conditional_acceptance() == ()


def test_m01_a_row_without_proposals_does_not_move_an_aggregate() -> None:
    assert (FOUR_STEPS + DecodeStats(num_target_steps=100)).acceptance_rate == FOUR_STEPS.acceptance_rate == 0.5


def test_m02_the_bonus_token_is_not_accepted() -> None:
    output_tokens, stats = decode(11, [(4, [True] * 4), (4, [True] * 4)])
    stats.check(output_tokens)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_target_steps) == (8, 8, 3)
    assert stats.acceptance_rate == 1.0
    assert stats.mean_acceptance_length == 5.0
    assert stats.tokens_per_target_step(output_tokens) == 11 / 3


def test_m03_the_end_inside_an_accepted_block_counts_only_what_is_out() -> None:
    output_tokens, stats = decode(4, [(8, [True] * 8)])
    stats.check(output_tokens)
    assert output_tokens == 4
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_discarded_tokens) == (8, 3, 1)
    assert stats.num_accepted_tokens_per_pos == (1, 1, 1)
    assert sum(stats.num_rejections_per_pos) == 0


def test_m04_ratios_of_sums_not_means_of_ratios() -> None:
    short, long = DecodeStats(num_target_steps=3), DecodeStats(num_target_steps=15)
    assert (short + long).tokens_per_target_step(3 + 60) == 63 / 18


def test_conditional_acceptance_by_position() -> None:
    FOUR_STEPS.check(10)
    assert FOUR_STEPS.conditional_acceptance() == (1.0, 2 / 3, 1 / 2, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_draft_tokens": 5, "num_lookup_draft_tokens": 0}, "accepted <= draft tokens"),
        ({"num_accepted_tokens_per_pos": (3, 2)}, r"sum\(accepted per position\) == accepted"),
        ({"num_accepted_tokens_per_pos": (2, 3, 1)}, "never rises"),
        ({"num_target_steps": 5}, r"output \+ discarded == accepted \+ target steps"),
        ({"num_discarded_tokens": 1}, r"output \+ discarded == accepted \+ target steps"),
        ({"num_lookup_accepted_tokens": 7}, "lookup counters are a part"),
        ({"num_drafts": 0}, "never proposed means all zero"),
    ],
)
def test_a_broken_identity_is_named_with_the_numbers(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*output_tokens=10.*num_draft_tokens="):
        replace(FOUR_STEPS, **change).check(10)


def test_counters_tell_lookup_from_draft_model() -> None:
    counter = DecodeCounter(num_target_steps=3)
    counter.record_draft(4, 2, True, from_lookup=True)
    counter.record_draft(3, 0, True, from_lookup=False)
    stats = counter.freeze()
    stats.check(5)
    assert (stats.num_draft_tokens, stats.num_lookup_draft_tokens, stats.num_lookup_accepted_tokens) == (7, 4, 2)
    assert stats.num_accepted_tokens_per_pos == (1, 1, 0)
    assert stats.num_rejections_per_pos == (1, 0, 1)


steps = st.lists(st.tuples(st.integers(0, 8), st.lists(st.booleans(), min_size=8, max_size=8)), max_size=20)


@given(st.integers(1, 60), steps, st.integers(1, 60), steps)
def test_identities_hold_for_any_acceptance_and_survive_addition(
    length: int, proposals: list[tuple[int, list[bool]]], other_length: int, others: list[tuple[int, list[bool]]]
) -> None:
    output_tokens, stats = decode(length, proposals)
    other_output_tokens, other_stats = decode(other_length, others)
    stats.check(output_tokens)
    total = stats + other_stats
    total.check(output_tokens + other_output_tokens)
    assert total == other_stats + stats
    assert stats + DecodeStats() == stats
    assert all(rate is None or 0 <= rate <= 1 for rate in total.conditional_acceptance())
    assert total.acceptance_rate is None or 0 <= total.acceptance_rate <= 1
    judged = total.num_accepted_tokens + sum(total.num_rejections_per_pos)
    assert judged <= total.num_draft_tokens


counters = st.lists(st.integers(0, 1000), max_size=8).map(tuple)


@given(counters, counters, counters)
def test_adding_positions_is_associative_and_keeps_the_sum(
    a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]
) -> None:
    assert add_per_pos(a, b) == add_per_pos(b, a)
    assert add_per_pos(add_per_pos(a, b), c) == add_per_pos(a, add_per_pos(b, c))
    assert sum(add_per_pos(a, b)) == sum(a) + sum(b)
