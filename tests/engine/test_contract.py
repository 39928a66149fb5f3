"""One contract for all engines: the fake, our own on a tiny model, and vLLM on the demo model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine import SelectiveEngine, load_engine
from batchspec.engine.vllm import VllmEngine
from batchspec.profile.policy import StaticPolicy
from batchspec.types import Completion, Engine, FinishReason, Method, Request, Route, SamplingParams
from tests.engine.contract import ROUTES, check_outcomes, check_seconds, contract_requests, outcomes_of, texts

# Imports of vLLM warn of much that is not ours.
VLLM = (pytest.mark.vllm, pytest.mark.filterwarnings("ignore"))
VLLM_ARGS = ("enforce_eager=true", "max_model_len=2048")
MakeEngine = Callable[[Route], Engine]


@pytest.fixture(
    scope="module",
    params=["fake", "torch", pytest.param("vllm", marks=VLLM)],
)
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Builds the engine that serves a route; vLLM's are kept, since each takes a minute to load."""
    made: dict[Route, Engine] = {}
    kind = request.param

    def make(route: Route) -> Engine:
        if kind == "torch":
            from tests.engine import tiny

            return tiny.make_engine(tiny.build_module("llama"), max_batch=4)
        if kind == "fake":
            return load(EngineConfig(engine="fake", max_batch=4), route)
        if route not in made:
            model = str(request.getfixturevalue("demo_model_path"))
            config = EngineConfig(
                engine="vllm", model=model, dtype="float32", max_batch=4, kv_memory_bytes=2**28, vllm_arg=VLLM_ARGS
            )
            made[route] = load(config, route)
        return made[route]

    yield make
    for engine in made.values():
        engine.close()


def load(config: EngineConfig, route: Route) -> Engine:
    return load_engine(config, "cpu", 2, 1.0, StepAttributionRule(), route)


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_rows_answers_counters_and_seconds(make_engine: MakeEngine, route: Route) -> None:
    engine = make_engine(route)
    before = sum(engine.metered_seconds.values())
    outcomes = outcomes_of(engine, contract_requests(), route)
    check_outcomes(outcomes, route)
    check_seconds(engine, outcomes.values())
    assert sum(engine.metered_seconds.values()) > before
    assert engine.info.max_batch == 4


def test_the_text_is_the_same_again(make_engine: MakeEngine) -> None:
    route = ROUTES["lookup"]
    requests = contract_requests()[:3]
    first, again = (texts(outcomes_of(make_engine(route), requests, route)) for _ in range(2))
    assert first == again


def test_a_stop_string_ends_the_row(make_engine: MakeEngine) -> None:
    route = ROUTES["target_only"]
    request = contract_requests()[0]
    plain = outcomes_of(make_engine(route), [request], route)[0]
    assert isinstance(plain, Completion)
    stop = plain.text[len(plain.text) // 3 :][:3]
    stopping = Request(0, prompt=request.prompt, sampling=SamplingParams(max_new_tokens=24, stop=(stop,)))
    stopped = outcomes_of(make_engine(route), [stopping], route)[0]
    assert isinstance(stopped, Completion)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.token_ids == plain.token_ids[: stopped.output_tokens]


@pytest.mark.parametrize("make_engine", [pytest.param("vllm", marks=VLLM)], indirect=True)
def test_counters_are_those_that_vllm_tells_and_ids_those_of_target_only(make_engine: MakeEngine) -> None:
    # float32: in bfloat16 vLLM's own ids depend on how many positions share a forward
    told: dict[str, Any] = {}
    engine = make_engine(ROUTES["lookup"])
    assert isinstance(engine, VllmEngine)
    step = engine._engine.step

    def watched_step() -> Any:
        outputs = step()
        told.update({o.request_id: o.outputs[0].spec_decode_metrics for o in outputs if o.finished})
        return outputs

    engine._engine.step = watched_step
    try:
        drafted = outcomes_of(engine, contract_requests(), ROUTES["lookup"])
    finally:
        engine._engine.step = step
    plain = outcomes_of(make_engine(ROUTES["target_only"]), contract_requests(), ROUTES["target_only"])
    assert texts(drafted) == texts(plain)
    assert len(told) == len(texts(drafted))
    for row, metrics in told.items():
        outcome = drafted[int(row)]
        assert isinstance(outcome, Completion)
        stats = outcome.stats
        histogram = dict(enumerate(metrics.histogram))
        assert stats.num_drafts == sum(histogram.values())
        assert stats.num_draft_tokens == metrics.num_draft_tokens
        assert stats.num_accepted_tokens == sum(accepted * count for accepted, count in histogram.items())
        at_least = tuple(sum(count for accepted, count in histogram.items() if accepted > i) for i in range(4))
        assert stats.num_accepted_tokens_per_pos == at_least[: len(stats.num_accepted_tokens_per_pos)]


@pytest.mark.parametrize("make_engine", [pytest.param("vllm", marks=VLLM)], indirect=True)
def test_an_engine_of_one_route_says_which_rows_are_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine(ROUTES["lookup"])
    assert isinstance(engine, SelectiveEngine)
    policy = StaticPolicy(ROUTES["lookup"], {"chat": Route(Method.TARGET_ONLY)})
    row = Request(0, prompt="one two three")
    assert engine.serves(row, policy)
    assert not engine.serves(Request(1, prompt="one two", request_class="chat"), policy)
    assert not engine.serves(Request(2, prompt="one two", sampling=SamplingParams(stop=("x",))), policy)
    assert engine.serves(Request(3, prompt="long " * 8_000, request_class="chat"), policy)
