import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.accounting.cost import ROW_LINES, StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine import load_engine
from batchspec.engine.fake import CONTEXT_TOKENS, FakeEngine
from batchspec.engine.fake_answers import EOS_TOKEN_ID, WORDS, answer, decode
from batchspec.errors import UsageError
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.scope import ListSource
from batchspec.types import Completion, FinishReason, Method, Outcome, Request, Route, RowFailure, SamplingParams

LOOKUP = Method.PROMPT_LOOKUP


class RecordingPolicy:
    """Asks `choose` for k, and notes the occupancies it was asked at."""

    def __init__(self, choose: dict[int, int] | int) -> None:
        self._choose = choose
        self.asked: list[tuple[str | None, int]] = []

    def route(self, request_class: str | None, occupancy: int) -> Route:
        self.asked.append((request_class, occupancy))
        k = self._choose if isinstance(self._choose, int) else self._choose.get(occupancy, 0)
        return Route(LOOKUP, k, f"k={k}") if k else Route(Method.TARGET_ONLY, reason="k=0")


def requests(count: int, **settings: object) -> list[Request]:
    sampling = SamplingParams(**settings)  # type: ignore[arg-type]
    return [Request(i, prompt=f"prompt number {i}", sampling=sampling) for i in range(count)]


def static(k: int, method: Method = LOOKUP) -> StaticPolicy:
    return StaticPolicy(Route(method, k) if k else Route(Method.TARGET_ONLY))


def engine(device_share: float = 1.0, **settings: object) -> FakeEngine:
    config = EngineConfig(engine="fake", **settings)  # type: ignore[arg-type]
    return FakeEngine.load(config, "cpu", 1, device_share, StepAttributionRule())


def run(rows: Sequence[Request], k: int = 0, method: Method = LOOKUP, **settings: object) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    for outcome in engine(**settings).run(ListSource(rows), static(k, method)):
        assert isinstance(outcome, Completion)
        assert outcome.row_index not in done
        outcome.stats.check(outcome.output_tokens)
        done[outcome.row_index] = outcome
    return done


def texts(done: dict[int, Completion]) -> dict[int, tuple[object, ...]]:
    return {row: (c.token_ids, c.text, c.finish_reason, c.input_tokens) for row, c in done.items()}


def test_the_vocabulary_and_decoding_agree() -> None:
    assert len(set(WORDS)) == EOS_TOKEN_ID == 256
    assert decode((0, 255, EOS_TOKEN_ID)) == "ba z🙂"
    assert decode(()) == ""


@pytest.mark.parametrize("max_batch", [1, 4, 32])
@pytest.mark.parametrize("k", [0, 1, 4, 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_text_does_not_depend_on_batch_route_or_acceptance(max_batch: int, k: int, acceptance: float) -> None:
    rows = requests(60)
    shuffled = random.Random(7).sample(rows, len(rows))
    expected = {row.row_index: answer(row) for row in rows}
    done = run(shuffled, k, max_batch=max_batch, fake_acceptance=acceptance)
    assert sorted(done) == list(range(60))
    for row, completion in done.items():
        assert (completion.token_ids, completion.text, completion.finish_reason) == (
            expected[row].token_ids,
            expected[row].text,
            expected[row].finish_reason,
        )
        assert decode(completion.token_ids) == completion.text


def test_greedy_text_follows_the_prompt_alone_and_sampled_text_its_row_and_seed() -> None:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=0.8)
    row = Request(0, prompt="the same", request_id="a", sampling=greedy)
    assert answer(row) == answer(replace(row, row_index=9, request_id="b", sampling=replace(greedy, seed=5)))
    assert answer(row) != answer(replace(row, prompt="another"))
    row = replace(row, sampling=sampled)
    assert answer(row) == answer(replace(row, row_index=9))  # the id is the key, not the place
    others = [
        answer(replace(row, request_id="b")),
        answer(replace(row, sampling=replace(sampled, seed=1))),
        answer(replace(row, sampling=replace(sampled, temperature=0.9))),
    ]
    assert all(other != answer(row) for other in others)


def test_messages_and_prompt_rows_are_answered_and_counted() -> None:
    messages = [{"role": "user", "content": "héllo there"}, {"role": "assistant", "content": None}]
    done = run([Request(0, messages=messages), Request(1, prompt="héllo there")])
    assert done[0].text != done[1].text
    assert (done[0].input_tokens, done[1].input_tokens) == (1 + 2 + 3 + 2 + 1, 1 + 3)


def test_a_smaller_budget_cuts_the_same_text() -> None:
    for row in requests(40):
        whole = answer(row)
        for budget in range(1, 12):
            cut = answer(replace(row, sampling=SamplingParams(max_new_tokens=budget)))
            assert cut.token_ids == whole.token_ids[:budget]
            ends = len(whole.token_ids) <= budget
            assert cut.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)


def test_rows_end_by_themselves_and_some_are_long() -> None:
    done = run(requests(400))
    lengths = [completion.output_tokens for completion in done.values()]
    assert all(c.finish_reason is FinishReason.STOP and c.token_ids[-1] == EOS_TOKEN_ID for c in done.values())
    assert min(lengths) == 3
    assert max(lengths) > 40
    assert sorted(lengths)[200] < 10


def test_the_end_is_held_back_until_min_new_tokens() -> None:
    for row in requests(30, min_new_tokens=150, max_new_tokens=200):
        token_ids = answer(row).token_ids
        assert len(token_ids) == 151
        assert token_ids.index(EOS_TOKEN_ID) == 150


def test_a_stop_string_ends_the_row_at_its_earliest_match() -> None:
    row = next(row for row in requests(100) if len(answer(row).token_ids) > 6)
    words = answer(row).text.split(" ")
    stops = (words[4], f"{words[1]} {words[2]}")
    stopped = answer(replace(row, sampling=SamplingParams(stop=stops)))
    assert stopped.text == words[0] + " "
    assert stopped.token_ids == answer(row).token_ids[:3]  # with the token that completes the match
    assert stopped.finish_reason is FinishReason.STOP
    later = answer(replace(row, sampling=SamplingParams(stop=(words[1],), min_new_tokens=4)))
    assert len(later.token_ids) == 4
    assert answer(replace(row, sampling=SamplingParams(stop=("###",)))) == answer(row)


def test_a_row_over_the_context_is_an_error_row_and_the_others_go_on() -> None:
    rows = [*requests(3), Request(3, prompt="x" * 4 * CONTEXT_TOKENS), Request(4, prompt="secret " * 4500)]
    rows += [replace(row, row_index=row.row_index + 5) for row in requests(3)]
    outcomes = {o.row_index: o for o in engine(max_batch=2).run(ListSource(rows), static(0))}
    assert sorted(outcomes) == list(range(8))
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, RowFailure)]
    assert [f.row_index for f in failures] == [3, 4]
    assert failures[0].error_type == "context_overflow"
    assert failures[0].input_tokens == 8193
    assert failures[0].error_message == (
        "8193 prompt tokens + max_new_tokens 512 exceed the model's context of 8192 tokens; "
        "shorten the prompt or lower max_new_tokens"
    )
    assert "secret" not in failures[1].error_message


def test_m01_rows_that_proposed_nothing() -> None:
    target_only = run(requests(20))
    one_token = run(requests(20, max_new_tokens=1), k=4)
    for completion in [*target_only.values(), *one_token.values()]:
        assert completion.method is Method.TARGET_ONLY
        assert completion.num_speculative_tokens == 0
        assert completion.stats.num_draft_tokens == 0
        assert completion.stats.acceptance_rate is None
        assert completion.stats.num_target_steps == completion.output_tokens


def test_m02_everything_accepted_is_a_rate_of_one_and_no_more() -> None:
    done = run(requests(20, min_new_tokens=30, max_new_tokens=31), k=4, fake_acceptance=1.0)
    for completion in done.values():
        stats = completion.stats
        assert completion.output_tokens == 31
        # 1 token from the prefill, then six steps of 4 + 1
        assert (stats.num_target_steps, stats.num_drafts, stats.num_draft_tokens) == (7, 6, 24)
        assert (stats.num_accepted_tokens, stats.acceptance_rate, stats.num_discarded_tokens) == (24, 1.0, 0)


def test_m03_tokens_after_the_end_are_not_counted_as_accepted() -> None:
    done = run(requests(50), k=16, fake_acceptance=1.0)
    for completion in done.values():
        if completion.output_tokens <= 17:
            stats = completion.stats
            assert (stats.num_target_steps, stats.num_draft_tokens) == (2, 16)
            assert stats.num_accepted_tokens == completion.output_tokens - 1
            assert stats.num_discarded_tokens == 1


def test_m04_tokens_are_the_committed_ids() -> None:
    rows = [
        Request(0, prompt="short", sampling=SamplingParams(max_new_tokens=3, min_new_tokens=3)),
        Request(1, prompt="long", sampling=SamplingParams(max_new_tokens=60, min_new_tokens=60)),
    ]
    for acceptance in (0.0, 0.9):
        done = run(rows, k=4, fake_acceptance=acceptance)
        assert [done[row].output_tokens for row in (0, 1)] == [3, 60]
        total = done[0].stats + done[1].stats
        assert total.num_accepted_tokens + total.num_target_steps - total.num_discarded_tokens == 63


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_acceptance_is_what_was_asked_for(acceptance: float) -> None:
    done = run(requests(300, min_new_tokens=50, max_new_tokens=50), k=4, fake_acceptance=acceptance)
    total = sum((c.stats for c in done.values()), start=next(iter(done.values())).stats)
    for rate in total.conditional_acceptance():
        assert rate == pytest.approx(acceptance, abs=0.04)


@pytest.mark.parametrize(("method", "from_lookup"), [(LOOKUP, True), (Method.DRAFT_MODEL, False)])
def test_draft_counters_say_where_proposals_came_from(method: Method, from_lookup: bool) -> None:
    for completion in run(requests(10), k=3, method=method).values():
        stats = completion.stats
        assert completion.method is method
        assert completion.num_speculative_tokens == 3
        assert stats.num_draft_tokens > 0
        assert stats.num_lookup_draft_tokens == (stats.num_draft_tokens if from_lookup else 0)
        assert stats.num_draft_steps == (0 if from_lookup else stats.num_draft_tokens)


@given(
    st.integers(1, 40), st.integers(0, 40), st.integers(0, 16), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(1, 9)
)
def test_identities_and_budget_hold_for_any_settings(
    max_new_tokens: int, min_new_tokens: int, k: int, acceptance: float, max_batch: int
) -> None:
    settings = {"max_new_tokens": max_new_tokens, "min_new_tokens": min(min_new_tokens, max_new_tokens)}
    rows = requests(12, **settings)
    done = run(rows, k, max_batch=max_batch, fake_acceptance=acceptance)
    assert texts(done) == texts(run(rows))
    assert all(c.output_tokens <= max_new_tokens and 1 <= c.mean_live_sequences <= max_batch for c in done.values())


def test_slots_are_refilled_at_once_and_never_overfilled() -> None:
    policy = RecordingPolicy(0)
    list(engine(max_batch=4).run(ListSource(requests(50)), policy))
    occupancies = [occupancy for _, occupancy in policy.asked]
    assert max(occupancies) == 4
    drained = next(i for i, occupancy in enumerate(occupancies) if occupancy < 4)
    assert set(occupancies[:drained]) == {4}
    assert occupancies[drained:] == sorted(occupancies[drained:], reverse=True)


def test_the_policy_is_asked_by_cell() -> None:
    policy = RecordingPolicy(0)
    row = Request(0, prompt="x" * 100, request_class="code", sampling=SamplingParams(max_new_tokens=100))
    list(engine().run(ListSource([row, replace(row, row_index=1, request_class=None)]), policy))
    assert {request_class for request_class, _ in policy.asked} == {"code/p16-64/o64-256", "default/p16-64/o64-256"}


def test_a_route_that_follows_occupancy_is_counted_and_leaves_the_text() -> None:
    rows = requests(40, min_new_tokens=5)
    policy = RecordingPolicy({1: 4, 2: 2})
    done = {c.row_index: c for c in engine(max_batch=4).run(ListSource(rows), policy) if isinstance(c, Completion)}
    assert texts(done) == texts(run(rows))
    changed = [c for c in done.values() if c.num_route_changes]
    assert changed
    assert all(c.method is LOOKUP and c.route_reason in ("k=2", "k=4") for c in changed)
    assert done[0].num_route_changes == 0
    assert (done[0].method, done[0].route_reason) == (Method.TARGET_ONLY, "k=0")


class TricklingSource:
    """Gives one row at a time, and checks that the engine waits only when it has nothing left to do."""

    def __init__(self, rows: Sequence[Request]) -> None:
        self._rows = list(rows)
        self._offered = False
        self.num_taken = 0
        self.outcomes: list[Outcome] = []

    def take(self, wait: bool) -> Request | None:
        if not wait:
            self._offered = not self._offered
            if not self._offered or not self._rows:
                return None
        else:
            assert self.num_taken == len(self.outcomes)
            if not self._rows:
                return None
        self.num_taken += 1
        return self._rows.pop(0)


def test_it_waits_only_when_no_row_is_left_and_every_outcome_was_handed_over() -> None:
    rows = [Request(0, prompt="x" * 40000), *[replace(row, row_index=row.row_index + 1) for row in requests(9)]]
    source = TricklingSource(rows)
    for outcome in engine(max_batch=3).run(source, static(2)):
        source.outcomes.append(outcome)
    assert sorted(outcome.row_index for outcome in source.outcomes) == list(range(10))


@pytest.mark.parametrize("k", [0, 4])
def test_row_shares_add_up_to_the_metered_lines(k: int) -> None:
    rows = [*requests(200), Request(200, prompt="x" * 40000)]
    fake = engine(max_batch=8, device_share=0.5)
    outcomes = list(fake.run(ListSource(rows), static(k)))
    for name in ROW_LINES:
        on_rows = sum(getattr(outcome.times, f"{name}_seconds") for outcome in outcomes)
        assert on_rows == pytest.approx(fake.metered_seconds.get(name, 0.0), rel=1e-9, abs=1e-12)
    assert ("draft" in fake.metered_seconds) == (k > 0)
    assert all(outcome.times.device_seconds > 0 for outcome in outcomes)
    for outcome in outcomes:
        if isinstance(outcome, Completion):
            times = outcome.times
            assert 0 <= times.queue_seconds <= times.first_token_seconds <= times.e2e_seconds


def test_the_lines_cover_the_wall_clock_times_the_share_of_the_device() -> None:
    started = time.perf_counter()
    fake = engine(max_batch=4, device_share=0.25, fake_tokens_per_second=2000)
    for _ in fake.run(ListSource(requests(60)), static(0)):
        time.sleep(0.001)
    fake.close()
    wall = time.perf_counter() - started
    metered = fake.metered_seconds
    assert sum(metered.values()) == pytest.approx(0.25 * wall, abs=0.01)
    assert metered["idle"] >= 0.25 * 60 * 0.001
    assert metered["prefill"] + metered["verify"] > metered["overhead"]


def test_its_pace_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    done = run(requests(30), k=4, fake_tokens_per_second=100)
    assert sum(slept) == pytest.approx(sum(c.output_tokens for c in done.values()) / 100)
    slept.clear()
    run(requests(30), fake_tokens_per_second=0)
    assert slept == []


def test_it_says_what_it_is_and_loads_by_name() -> None:
    loaded = load_engine(EngineConfig(engine="fake", max_batch=7), "cpu", 1, 1.0, StepAttributionRule())
    assert isinstance(loaded, FakeEngine)
    info = loaded.info
    assert (info.engine, info.model, info.device, info.max_batch, info.batch_invariant) == (
        "fake",
        "fake",
        "cpu",
        7,
        True,
    )


def test_an_unknown_engine_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--engine 'tpu' is not one of torch, vllm, fake"):
        load_engine(EngineConfig(engine="tpu"), "cpu", 1, 1.0, StepAttributionRule())
