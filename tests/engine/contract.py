"""What every engine promises, as checks of one run: the same for the fake, the torch and the vLLM engine."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from batchspec.accounting.cost import ROW_LINES
from batchspec.profile.policy import StaticPolicy
from batchspec.types import (
    Completion,
    Engine,
    FinishReason,
    Method,
    Outcome,
    Request,
    Route,
    RowFailure,
    SamplingParams,
)

ROUTES = {
    "target_only": Route(Method.TARGET_ONLY, reason="plain"),
    "lookup": Route(Method.PROMPT_LOOKUP, 4, "lookup"),
}
MAX_NEW_TOKENS = 24


class WatchedSource:
    """Gives its requests one by one, and checks that the engine waits only when it has nothing left to do."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = list(requests)
        self.num_taken = 0
        self.outcomes: list[Outcome] = []
        self.ended = False

    def take(self, wait: bool) -> Request | None:
        assert not self.ended, "asked again after the end"
        if wait and not self._requests:
            assert self.num_taken == len(self.outcomes), "waited while it held rows"
            self.ended = True
        if not self._requests:
            return None
        self.num_taken += 1
        return self._requests.pop(0)


def contract_requests(sampling: SamplingParams | None = None) -> list[Request]:
    """Rows whose text repeats itself, so that prompt lookup proposes; one over any context, and one short."""
    sampling = sampling or SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    texts = [f"one two three {i} one two three {i} one two" for i in range(7)]
    requests = [Request(i, prompt=text, request_class="chat", sampling=sampling) for i, text in enumerate(texts)]
    requests.append(Request(7, prompt="long " * 8_000, sampling=sampling))
    requests.append(Request(8, prompt="short", sampling=replace(sampling, max_new_tokens=1)))
    return requests


def outcomes_of(engine: Engine, requests: Sequence[Request], route: Route) -> dict[int, Outcome]:
    """All outcomes by row; checks that each row came exactly once and that the engine waited as it should."""
    source = WatchedSource(requests)
    for outcome in engine.run(source, StaticPolicy(route)):
        source.outcomes.append(outcome)
    assert source.ended
    assert sorted(outcome.row_index for outcome in source.outcomes) == sorted(r.row_index for r in requests)
    return {outcome.row_index: outcome for outcome in source.outcomes}


def check_outcomes(outcomes: dict[int, Outcome], route: Route) -> None:
    """Bad rows fail by themselves; answers keep their budget, their identities and their clocks."""
    failure = outcomes[7]
    assert isinstance(failure, RowFailure)
    assert failure.error_type == "context_overflow"
    assert "long" not in failure.error_message
    answers = [outcome for outcome in outcomes.values() if isinstance(outcome, Completion)]
    assert len(answers) == len(outcomes) - 1
    for answer in answers:
        answer.stats.check(answer.output_tokens)
        assert 1 <= answer.output_tokens <= MAX_NEW_TOKENS
        assert answer.input_tokens > 0
        assert answer.mean_live_sequences >= 1
        times = answer.times
        assert 0 <= times.queue_seconds <= times.first_token_seconds <= times.e2e_seconds
        assert times.device_seconds > 0
        if answer.finish_reason is FinishReason.LENGTH and answer.row_index != 8:
            assert answer.output_tokens == MAX_NEW_TOKENS
        if route.method is Method.TARGET_ONLY:
            assert answer.method is Method.TARGET_ONLY
            assert answer.stats.num_draft_tokens == 0
            assert answer.stats.num_target_steps == answer.output_tokens
    short = outcomes[8]
    assert isinstance(short, Completion)
    assert (short.output_tokens, short.stats.num_accepted_tokens) == (1, 0)
    if route.method is not Method.TARGET_ONLY:
        drafting = [answer for answer in answers if answer.stats.num_drafts]
        assert drafting
        assert {(a.method, a.num_speculative_tokens) for a in drafting} == {
            (route.method, route.num_speculative_tokens)
        }


def check_seconds(engine: Engine, outcomes: Iterable[Outcome]) -> None:
    """What rows were charged is what the engine metered on the rows' lines."""
    charged = sum(outcome.times.device_seconds for outcome in outcomes)
    metered = engine.metered_seconds
    assert sum(metered.get(line, 0.0) for line in ROW_LINES) == pytest.approx(charged, rel=1e-6, abs=1e-9)
    assert all(seconds >= 0 for seconds in metered.values())


def texts(outcomes: dict[int, Outcome]) -> dict[int, object]:
    return {
        row: (outcome.token_ids, outcome.text, outcome.finish_reason, outcome.input_tokens)
        for row, outcome in outcomes.items()
        if isinstance(outcome, Completion)
    }
