"""The marginal rule as decision tables: hand-made acceptance and step costs, known answers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.errors import MismatchError, UsageError
from batchspec.ngrams import Support, grade_of
from batchspec.profile.acceptance import DecodedRow, replay_draft, replay_lookup
from batchspec.profile.curves import depth_curves, occupancy_curves
from batchspec.profile.marginal import Decision, decide
from batchspec.profile.measured import WINDOW_TOKENS, MeasuredPolicy
from batchspec.profile.options import ClassOptions, Option, class_options
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.predict import attribution_rule, predict_seconds, target_only_seconds, throughput
from batchspec.profile.records import AcceptanceCell, ClassSample, Curve, Profile, StepCost
from batchspec.profile.show import format_profile, verdict
from batchspec.profile.store import fingerprint_differences, load_profile, refuse_stale_profile, save_profile
from batchspec.stats import DecodeStats
from batchspec.types import Completion, FinishReason, Method, Route, StepReport, StepTimes

GRADE = grade_of(3, Support.ALONE)
LOOKUP = frozenset({Method.PROMPT_LOOKUP})
ALL = frozenset({Method.PROMPT_LOOKUP, Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT})

# 20 ms a step, and 1 ms for each position: one position more costs a twentieth of a lone row's step.
COST = StepCost(Curve((1, 256), (0.021, 0.276)), 0.0, 0.0, 0.0, 0.0, 0.001)


def lookup_class(reach: tuple[float, ...], share: float = 1.0) -> ClassOptions:
    return ClassOptions("c", 1.0, 100.0, {(Method.PROMPT_LOOKUP, 2): (Option(share, reach, GRADE),)})


def one(options: ClassOptions, occupancy: int, cost: StepCost = COST, methods: frozenset[Method] = LOOKUP) -> Any:
    return decide([options], cost, occupancy, methods)[0]


@pytest.mark.parametrize(
    ("reach", "occupancy", "k"),
    [
        ((0.9, 0.8, 0.7, 0.6), 1, 4),
        ((0.9, 0.5, 0.04, 0.03), 1, 2),
        ((0.9, 0.8, 0.75, 0.4), 16, 3),
        ((0.9, 0.8, 0.7, 0.6), 256, 0),
        ((0.03, 0.01), 1, 0),
        ((0.3, 0.2), 64, 0),
        ((), 1, 0),
    ],
)
def test_a_position_is_proposed_iff_it_pays_for_its_time(reach: tuple[float, ...], occupancy: int, k: int) -> None:
    route = one(lookup_class(reach), occupancy).route
    assert route.num_speculative_tokens == k
    assert (route.method is Method.TARGET_ONLY) == (k == 0)


def test_proposals_shorten_as_load_rises() -> None:
    depths = [one(lookup_class((0.95, 0.85, 0.6, 0.4, 0.2)), n).route.num_speculative_tokens for n in (1, 8, 32, 128)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


def test_the_break_even_is_the_price_of_a_position_in_tokens() -> None:
    decision = one(lookup_class((0.0,)), 1)
    assert decision.break_even == pytest.approx(1.05 * 0.001 / 0.021, rel=0.01)


def test_longer_contexts_raise_the_break_even() -> None:
    cost = replace(COST, per_position_kv_token=1e-6)
    short, long = lookup_class((0.2,)), replace(lookup_class((0.2,)), context_tokens=8000.0)
    assert one(short, 1, cost).route.method is Method.PROMPT_LOOKUP
    assert one(long, 1, cost).route.method is Method.TARGET_ONLY


def test_m08_a_slow_draft_is_not_used_however_often_it_is_right() -> None:
    options = ClassOptions("c", 1.0, 100.0, {(Method.DRAFT_MODEL, 0): (Option(1.0, (0.9, 0.81, 0.73), None),)})
    slow = replace(COST, draft=Curve((1, 64), (0.05, 0.05)))
    fast = replace(COST, draft=Curve((1, 64), (0.002, 0.002)))
    assert one(options, 1, slow, ALL).route.method is Method.TARGET_ONLY
    assert one(options, 1, fast, ALL).route == replace(
        one(options, 1, fast, ALL).route, method=Method.DRAFT_MODEL, num_speculative_tokens=3
    )


def test_lookup_then_draft_goes_as_deep_as_each_source_pays() -> None:
    options = ClassOptions(
        "c",
        1.0,
        100.0,
        {
            (Method.PROMPT_LOOKUP, 2): (Option(0.3, (0.9, 0.85, 0.8, 0.75), GRADE),),
            (Method.LOOKUP_THEN_DRAFT, 2): (
                Option(0.7, (0.8, 0.5, 0.1), None),
                Option(0.3, (0.9, 0.85, 0.8, 0.75), GRADE),
            ),
        },
    )
    route = one(options, 1, replace(COST, draft=Curve((1, 64), (0.003, 0.003))), ALL).route
    assert route.method is Method.LOOKUP_THEN_DRAFT
    assert route.num_draft_tokens == 2
    assert route.tokens_for_match(GRADE) == 4


# --- acceptance by replay ---------------------------------------------------------------------------------------


def test_replay_counts_steps_proposals_and_first_rejections() -> None:
    row = DecodedRow("c", (1, 2, 3, 4, 1, 2, 3, 9, 5), 4)
    # outputs 1 2 3 9 5: the first comes with the prefill; after (1) nothing matches two; after (1 2): 3 then 4, wrong
    assert replay_lookup([row], max_tokens=2, min_match_tokens=2) == [
        AcceptanceCell("c", "prompt_lookup", 2, 2, 1, 3, 1, (1, 0), (0, 1))
    ]


def test_a_draft_is_judged_up_to_its_first_wrong_token() -> None:
    row = DecodedRow("c", (7, 1, 2, 3, 4, 5, 6), 1)
    assert replay_draft([row], [[True, True, True, False, True, True]], max_tokens=3) == [
        AcceptanceCell("c", "draft_model", None, None, None, 2, 2, (2, 1, 0), (0, 0, 1))
    ]


# --- a whole profile --------------------------------------------------------------------------------------------


def profile_of(**changes: Any) -> Profile:
    made = Profile(
        created_at="2026-01-01T00:00:00+00:00",
        fingerprint={"torch": "2.13.0", "threads": "2"},
        sampling={"temperature": 0.0},
        max_batch=32,
        max_new_tokens=64,
        samples=(ClassSample("copy", (50,) * 9, (60,) * 9), ClassSample("write", (20,) * 9, (60,) * 9)),
        acceptance=(
            AcceptanceCell("copy", "prompt_lookup", 2, 3, 1, 500, 400, (380, 370, 360), (20, 10, 10)),
            AcceptanceCell("write", "prompt_lookup", 2, 3, 1, 500, 40, (2, 0), (38, 2)),
        ),
        step_cost=COST,
    )
    return replace(made, **changes)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    save_profile(profile_of(), tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile_of()


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"surprise": 1}', b"PAR1\xff\xfe"])
def test_what_is_no_profile_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(UsageError, match="not a profile"):
        load_profile(tmp_path / "p.json")


def test_a_profile_of_another_version_or_in_no_file_is_refused(tmp_path: Path) -> None:
    save_profile(profile_of(profile_version=1), tmp_path / "p.json")
    with pytest.raises(UsageError, match="version 1, this batchspec reads 2; make it again"):
        load_profile(tmp_path / "p.json")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot write the profile"):
        save_profile(profile_of(), tmp_path / "p.json" / "below")


def test_every_difference_of_a_stale_profile_is_named() -> None:
    now = {"torch": "2.14.0", "threads": "1"}
    assert len(fingerprint_differences(profile_of(), now)) == 2
    with pytest.raises(MismatchError, match=r"threads: profile 2, run 1; torch: profile 2\.13\.0, run 2\.14\.0"):
        refuse_stale_profile("p.json", profile_of(), now)


def test_a_gpu_that_only_another_machine_can_name_is_taken_for_the_profiles() -> None:
    on_gpu = replace(profile_of(), fingerprint={"device_type": "NVIDIA H100"})
    assert fingerprint_differences(on_gpu, {"device_type": "cuda"}) == []
    assert fingerprint_differences(on_gpu, {"device_type": "NVIDIA L4"}) != []
    assert fingerprint_differences(on_gpu, {"device_type": "cpu"}) != []
    on_cpu = replace(profile_of(), fingerprint={"device_type": "cpu"})
    assert fingerprint_differences(on_cpu, {"device_type": "cuda"}) != []


def test_classes_are_routed_apart_and_unknown_ones_by_all_together() -> None:
    policy = MeasuredPolicy(profile_of(), LOOKUP, 32)
    assert policy.route("copy/p16-64/o64-256", 1).method is Method.PROMPT_LOOKUP
    assert policy.route("copy", 8).method is Method.PROMPT_LOOKUP
    assert policy.route("write", 8).method is Method.TARGET_ONLY
    assert policy.route("never seen", 1) == policy.decisions(1)[ANY_CLASS].route
    assert policy.route("copy", 10_000) == policy.route("copy", 32)


def test_few_observations_count_against_speculation() -> None:
    few = replace(profile_of().acceptance[0], num_steps=4, accepted_per_pos=(3, 3, 3), rejections_per_pos=(1, 0, 0))
    many = class_options(profile_of())[0].by_setting[Method.PROMPT_LOOKUP, 2][0].reach
    doubted = class_options(profile_of(acceptance=(few, profile_of().acceptance[1])))[0]
    assert doubted.by_setting[Method.PROMPT_LOOKUP, 2][0].reach[0] < 0.75
    assert many[0] > 0.9


def test_a_class_that_stops_paying_falls_back_within_a_window_and_returns_by_replay() -> None:
    long_matches = tuple(replace(cell, match_tokens=8, match_support=2) for cell in profile_of().acceptance)
    policy = MeasuredPolicy(profile_of(acceptance=long_matches), LOOKUP, 32)
    for _ in range(WINDOW_TOKENS // 3 + 1):
        policy.observe(StepReport(8, 1, 0.01, drafts=[("copy", 3, 0)]))
    assert policy.route("copy", 1).method is Method.TARGET_ONLY
    assert policy.route("write", 1) == MeasuredPolicy(profile_of(acceptance=long_matches), LOOKUP, 32).route("write", 1)
    assert "0 of the last" in policy.events[0]
    repeating = tuple([1, 2, 3, 4, 5] * 40)
    for _ in range(20):
        policy.observe(StepReport(8, 8, 0.01, retired=[("copy", repeating, 10)]))
    assert policy.route("copy", 1).method is Method.PROMPT_LOOKUP
    assert len(policy.events) == 2


def test_a_class_that_falls_back_under_load_still_speculates_where_little_pays() -> None:
    policy = MeasuredPolicy(profile_of(), LOOKUP, 32)
    needed = policy.decisions(32)["copy"].break_even
    assert policy.decisions(1)["copy"].break_even < 0.25 < needed
    for _ in range(WINDOW_TOKENS):
        policy.observe(StepReport(32, 1, 0.01, drafts=[("copy", 4, 1)]))
    assert len(policy.events) == 1
    assert policy.route("copy", 32).method is Method.TARGET_ONLY
    assert policy.route("copy", 1).method is Method.PROMPT_LOOKUP


def test_chance_alone_makes_no_class_fall_back() -> None:
    """Proposals of eight that hold wholly or not at all, a tenth more often than pays: many a window is below the
    line."""
    policy = MeasuredPolicy(profile_of(), LOOKUP, 32)
    share = policy.decisions(32)["copy"].break_even + 0.1
    draws = random.Random(1)
    for _ in range(2000):
        policy.observe(StepReport(32, 1, 0.01, drafts=[("copy", 8, 8 if draws.random() < share else 0)]))
    assert policy.events == []


def test_replay_counts_what_would_be_proposed_as_a_live_step_does() -> None:
    """Half right at k=4: 0.23 of the proposed tokens hold, in a live step and in a replay alike."""
    long_matches = tuple(replace(cell, match_tokens=2, match_support=2) for cell in profile_of().acceptance)
    dear = replace(COST, target=Curve((1, 256), (0.021, 2.0)))
    policy = MeasuredPolicy(profile_of(acceptance=long_matches, step_cost=dear), LOOKUP, 32)
    k = policy.route("copy", 1).tokens_for_match(grade_of(2, Support.AGREED))
    assert k > 1
    for _ in range(WINDOW_TOKENS // k + 1):
        policy.observe(StepReport(1, 1, 0.01, drafts=[("copy", k, 0)]))
    assert policy.route("copy", 1).method is Method.TARGET_ONLY
    # every pair of tokens comes back, followed by one right token and then a wrong one
    never_two = [token for i in range(300) for token in (1, 2, 3, 10 + i)]
    for _ in range(5):
        policy.observe(StepReport(1, 1, 0.01, retired=[("copy", tuple(never_two), 8)]))
    assert policy.route("copy", 1).method is Method.TARGET_ONLY


def test_a_method_is_judged_by_its_own_proposals() -> None:
    drafted = AcceptanceCell("copy", "draft_model", None, None, None, 500, 500, (490, 480, 470), (10, 10, 10))
    looked_up = AcceptanceCell("copy", "prompt_lookup", 2, 8, 1, 500, 150, (145, 140, 135), (5, 5, 5))
    cost = replace(COST, draft=Curve((1, 64), (0.003, 0.6)))
    policy = MeasuredPolicy(profile_of(acceptance=(drafted, looked_up), step_cost=cost), ALL, 32)
    assert policy.route("copy", 1).method is Method.DRAFT_MODEL
    assert policy.route("copy", 32).method is Method.PROMPT_LOOKUP
    for _ in range(WINDOW_TOKENS // 4 - 1):
        policy.observe(StepReport(32, 1, 0.01, drafts=[("copy", 4, 0)]))
    policy.observe(StepReport(1, 1, 0.01, drafts=[("copy", 8, 8)]))
    assert policy.events == []
    policy.observe(StepReport(32, 1, 0.01, drafts=[("copy", 4, 0)]))
    assert "no more prompt_lookup" in policy.events[0]
    assert policy.route("copy", 1).method is Method.DRAFT_MODEL


def test_what_a_row_would_take_alone_follows_from_the_step_cost() -> None:
    row = Completion(
        row_index=0,
        token_ids=tuple(range(11)),
        text="",
        finish_reason=FinishReason.LENGTH,
        input_tokens=100,
        cached_input_tokens=60,
        method=Method.PROMPT_LOOKUP,
        num_speculative_tokens=4,
        num_route_changes=0,
        route_reason="",
        mean_live_sequences=5.0,
        stats=DecodeStats(),
        times=StepTimes(),
    )
    # 40 tokens of prompt at 1 ms, then 10 steps of 25 ms shared by five
    assert target_only_seconds(COST, row) == pytest.approx(0.040 + 10 * 0.025 / 5)
    rule = attribution_rule(replace(COST, per_kv_token=1e-6), 32)
    assert (rule.seconds_per_step, rule.seconds_per_position) == pytest.approx((0.020, 0.001))
    assert rule.seconds_per_kv_token == 1e-6


def test_a_draft_that_fails_is_lost_and_lookup_takes_over() -> None:
    drafted = AcceptanceCell("copy", "draft_model", None, None, None, 500, 500, (490, 480, 470), (10, 10, 10))
    looked_up = AcceptanceCell("copy", "prompt_lookup", 2, 8, 1, 500, 200, (150, 120, 100), (50, 30, 20))
    cost = replace(COST, draft=Curve((1, 64), (0.003, 0.003)))
    policy = MeasuredPolicy(profile_of(acceptance=(drafted, looked_up), step_cost=cost), ALL, 32)
    decision = policy.decisions(1)["copy"]
    assert decision.route.method is Method.DRAFT_MODEL
    # a position costs its draft step, too: 3 ms beside 1 ms
    assert decision.break_even > 3 * policy.decisions(1, frozenset({Method.DRAFT_MODEL}))["copy"].break_even
    for _ in range(WINDOW_TOKENS // 3 + 1):
        policy.observe(StepReport(1, 1, 0.01, drafts=[("copy", 3, 0)]))
    assert policy.route("copy", 1).method is Method.PROMPT_LOOKUP
    assert "no more draft_model" in policy.events[0]


def test_reading_long_prompts_for_short_answers_counts_against_a_draft_model() -> None:
    options = ClassOptions("c", 1.0, 1000.0, {(Method.DRAFT_MODEL, 0): (Option(1.0, (0.8, 0.6), None),)})
    cost = replace(COST, draft=Curve((1, 64), (0.002, 0.002)), draft_prefill_per_token=0.001)
    assert one(options, 1, cost, ALL).route.method is Method.DRAFT_MODEL
    assert one(replace(options, catch_up=25.0), 1, cost, ALL).route.method is Method.TARGET_ONLY


def drafting(reach: tuple[float, ...], catch_up: float) -> tuple[ClassOptions, StepCost]:
    """A class that only a draft model serves: 2 ms a forward, 0.1 ms a prompt token."""
    options = ClassOptions("c", 1.0, 100.0, {(Method.DRAFT_MODEL, 0): (Option(1.0, reach, None),)}, catch_up)
    return options, replace(COST, draft=Curve((1, 64), (0.002, 0.002)), draft_prefill_per_token=0.0001)


def drafting_rate(options: ClassOptions, cost: StepCost, k: int) -> float:
    route = Route(Method.DRAFT_MODEL, k) if k else Route(Method.TARGET_ONLY)
    return throughput(cost, [options], 1, lambda label, n: route)[1]


@pytest.mark.parametrize("catch_up", [0.0, 40.0, 120.0])
@pytest.mark.parametrize("ratio", [0.6, 0.75, 0.9])
def test_the_depth_of_a_draft_model_is_what_a_search_over_whole_steps_finds(ratio: float, catch_up: float) -> None:
    options, cost = drafting(tuple(ratio**depth for depth in range(1, 9)), catch_up)
    best = max(range(9), key=lambda k: drafting_rate(options, cost, k))
    decided = one(options, 1, cost, ALL).route.num_speculative_tokens
    assert drafting_rate(options, cost, decided) >= 0.99 * drafting_rate(options, cost, best)
    assert (decided > 0) == (best > 0)


def test_a_draft_model_is_limited_to_what_its_reading_pays_for() -> None:
    options, cost = drafting((0.9, 0.8, 0.7), catch_up=20.0)
    most_lag = one(options, 1, cost, ALL).route.most_lag_per_token
    assert most_lag > 20.0
    assert one(replace(options, catch_up=0.9 * most_lag), 1, cost, ALL).route.method is Method.DRAFT_MODEL
    assert one(replace(options, catch_up=1.1 * most_lag), 1, cost, ALL).route.method is Method.TARGET_ONLY
    free = replace(cost, draft_prefill_per_token=0.0)
    assert one(options, 1, free, ALL).route.most_lag_per_token is None


def test_the_break_even_of_a_draft_model_counts_all_that_it_takes() -> None:
    """Where a draft model is as fast as no draft model, what is accepted is the break-even."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        options, cost = drafting((middle,) * 4, catch_up=20.0)
        low, high = (
            (low, middle) if drafting_rate(options, cost, 4) > drafting_rate(options, cost, 0) else (middle, high)
        )
    options, cost = drafting((1.15 * high,) * 4, catch_up=20.0)
    decision = one(options, 1, cost, ALL)
    assert decision.route.num_speculative_tokens == 4
    assert decision.break_even == pytest.approx(high, rel=0.1)


reaches = st.lists(st.floats(0.05, 1.0), min_size=8, max_size=8).map(lambda ps: tuple(accumulate(ps, mul)))


@given(
    lookup=st.tuples(reaches, reaches),
    draft=st.tuples(reaches, reaches),
    catch_up=st.tuples(st.floats(0, 20), st.floats(0, 20)),
    draft_seconds=st.floats(0.0005, 0.01),
    occupancy=st.sampled_from([1, 2, 4, 8, 32]),
)
def test_methods_together_are_never_slower_than_one_of_them_alone(
    lookup: tuple[Any, Any], draft: tuple[Any, Any], catch_up: tuple[float, float], draft_seconds: float, occupancy: int
) -> None:
    """A draft model's forward is paid for by all rows that draft: nobody may gain by being the first to."""
    cost = replace(COST, draft=Curve((1, 64), (draft_seconds, 1.2 * draft_seconds)), draft_prefill_per_token=0.0001)
    options = [
        ClassOptions(
            f"class {i}",
            0.5,
            100.0,
            {
                (Method.PROMPT_LOOKUP, 2): (Option(0.3, lookup[i], GRADE),),
                (Method.DRAFT_MODEL, 0): (Option(1.0, draft[i], None),),
            },
            catch_up[i],
        )
        for i in range(2)
    ]

    def rate(methods: frozenset[Method]) -> float:
        routes = {d.request_class: d.route for d in decide(options, cost, occupancy, methods)}
        return throughput(cost, options, occupancy, lambda label, n: routes[label])[1]

    together = rate(ALL)
    assert all(together >= rate(frozenset({method})) * 0.999 for method in (Method.PROMPT_LOOKUP, Method.DRAFT_MODEL))
    assert together >= rate(frozenset()) * 0.999


def always(method: Method, k: int = 0) -> Any:
    return lambda request_class, occupancy: Route(method, k)


def test_predictions_follow_acceptance_and_load() -> None:
    rows = profile_of().samples
    plain = predict_seconds(profile_of(), rows, always(Method.TARGET_ONLY), 1)
    assert plain == pytest.approx(18 * (59 * 0.021) + 18 * 35 * 0.001, rel=0.02)
    assert predict_seconds(profile_of(), rows[:1], always(Method.PROMPT_LOOKUP, 3), 1) < plain / 4
    assert predict_seconds(profile_of(), rows, always(Method.TARGET_ONLY), 18) < plain / 5


def decided(speculates: bool) -> Decision:
    route = Route(Method.PROMPT_LOOKUP, 4) if speculates else Route(Method.TARGET_ONLY)
    return Decision("c", route, 0.5, 0.6)


def test_the_verdict_comes_first() -> None:
    shown = format_profile(profile_of(), LOOKUP)
    assert shown.startswith("2 of 2 classes speculate up to 2 live rows; at 32 still 1.")
    assert max(map(len, shown.splitlines())) <= 100
    table = [{"a": decided(k > n), "b": decided(False)} for n in (1, 2, 4) for k in (3,)]
    assert (
        verdict(table, [1, 2, 4], ["a", "b"])
        == "1 of 2 classes speculate up to 2 live rows; above 2 none does; never: b."
    )
    hopeless = profile_of(acceptance=(profile_of().acceptance[1],))
    assert format_profile(hopeless, LOOKUP).startswith("Do not speculate here")


def test_a_method_that_pays_from_some_load_on_is_not_said_to_pay_below() -> None:
    table = [{"a": decided(n > 1)} for n in (1, 2, 4)]
    assert verdict(table, [1, 2, 4], ["a"]) == "1 of 1 classes speculate at 2 to 4 live rows; at 4 still 1."


def test_curves_go_no_deeper_than_was_measured() -> None:
    (curve,) = depth_curves(profile_of(), LOOKUP, [1, 32])
    assert curve.depths == (1, 2, 3)
    assert curve.tokens_per_step[0] < curve.tokens_per_step[2]
    routed, static = occupancy_curves(profile_of(), LOOKUP)
    assert (routed.setting, static.setting) == ("routed", "prompt_lookup k=3")


def test_beyond_the_rows_that_were_measured_nobody_speculates() -> None:
    policy = MeasuredPolicy(profile_of(max_batch=2), LOOKUP, 32)
    assert policy.route("copy", 2).method is Method.PROMPT_LOOKUP
    beyond = policy.route("copy", 3)
    assert (beyond.method, beyond.reason) == (Method.TARGET_ONLY, "profile: measured up to 2 live rows")


def test_a_class_weighs_what_it_is_of_the_input_and_not_of_the_sample() -> None:
    """Positions are dear where few of the live rows gain by them: their step yields fewer tokens to weigh them by."""
    copy, write = profile_of().samples
    rare = profile_of(samples=(replace(copy, input_share=0.05), replace(write, input_share=0.95)))
    assert rare.row_shares == {"copy": 0.05, "write": 0.95}
    assert [c.weight for c in class_options(rare)] == pytest.approx([0.05, 0.95])
    even, uneven = (MeasuredPolicy(p, LOOKUP, 32).decisions(2)["copy"].break_even for p in (profile_of(), rare))
    assert uneven < even
