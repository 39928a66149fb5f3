"""Measuring: a whole profile of a tiny model, what does not disturb it, and the trace of a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from batchspec.engine import timing
from batchspec.engine.drafters import DraftModelDrafter, LookupThenDraftDrafter, PromptLookupDrafter
from batchspec.engine.engine import TorchEngine
from batchspec.engine.kv_cache import KVCache
from batchspec.engine.model import PackedModel, wrap_model
from batchspec.engine.packed import Segment
from batchspec.engine.sampling import Sampler
from batchspec.engine.trace import TracedEngine
from batchspec.profile import trials
from batchspec.profile.curves import OccupancyCurve, depth_curves, occupancy_curves
from batchspec.profile.measure import measure_profile
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.records import Profile
from batchspec.profile.sample import stratified
from batchspec.profile.scope import ListSource, Scope
from batchspec.profile.show import format_profile
from batchspec.types import Method, Request, Route, SamplingParams
from tests.engine.tiny import build_module, make_engine

LOOKUP = frozenset({Method.PROMPT_LOOKUP})
ALL = frozenset({Method.PROMPT_LOOKUP, Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT})
TEXTS = {"copy": "abc abc abc abc abc abc", "chat": "why is it that this happens now", "list": "1 2 3 4 5 6 7 8"}


def requests(classes: Sequence[str] = tuple(TEXTS), each: int = 3) -> list[Request]:
    names = [name for _ in range(each) for name in classes]
    sampling = SamplingParams(max_new_tokens=24)
    return [Request(i, prompt=TEXTS[n] + str(i), request_class=n, sampling=sampling) for i, n in enumerate(names)]


def with_draft(max_batch: int = 4) -> TorchEngine:
    module = build_module("llama")
    draft = wrap_model("draft", build_module("llama"))
    lookup = PromptLookupDrafter()
    drafter = DraftModelDrafter(
        draft, draft.new_cache(1 + max_batch * 16, max_batch), Sampler(frozenset()), frozenset(), 260, "coupled"
    )
    drafters = {Method.DRAFT_MODEL: drafter, Method.LOOKUP_THEN_DRAFT: LookupThenDraftDrafter(lookup, drafter)}
    return make_engine(module, max_batch=max_batch, drafters=drafters)


def measured(engine: TorchEngine, rows: Sequence[Request], scope: Scope) -> Profile:
    return measure_profile(engine, rows, {"torch": "x"}, scope, lambda line: None)


def test_a_profile_holds_acceptance_cost_and_trials_of_every_method() -> None:
    profile = measured(with_draft(), requests(), Scope(ALL, max_depth=4, budget_seconds=300))
    assert {cell.method for cell in profile.acceptance} == {method.value for method in ALL}
    assert max(len(cell.accepted_per_pos) for cell in profile.acceptance) <= 4
    drafted = [cell for cell in profile.acceptance if cell.method == "draft_model"]
    assert {cell.request_class for cell in drafted} == set(TEXTS)
    assert sum(sum(cell.rejections_per_pos) for cell in drafted) == 0  # the draft is the target itself
    assert [trial.setting for trial in profile.trials] == ["target_only", "routed", "routed", "target_only"]
    assert all(trial.output_tokens == 4 * 24 for trial in profile.trials)
    assert profile.step_cost.draft is not None
    assert {s.request_class: s.num_rows for s in profile.samples} == dict.fromkeys(TEXTS, 3)
    shown = format_profile(profile, ALL)
    assert max(map(len, shown.splitlines())) <= 100
    assert "trial: routed at batch 4" in shown


def test_only_the_methods_asked_for_are_measured() -> None:
    profile = measured(with_draft(), requests(), Scope(frozenset({Method.DRAFT_MODEL}), budget_seconds=300))
    assert {cell.method for cell in profile.acceptance} == {"draft_model"}


def test_what_the_budget_does_not_allow_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "predict_seconds", lambda *_: 10.0)
    profile = measured(make_engine(build_module("llama"), max_batch=4), requests(), Scope(LOOKUP, budget_seconds=12))
    assert profile.trials == ()
    assert profile.skipped == ("trial of target_only: 10 s do not fit into what is left",)


@dataclass
class Clock:
    """A step takes 20 ms and 1 ms a position by the timer's clock, a second more where its shape is new, and all of it
    `slowness` times over."""

    now: float = 0.0
    slowness: float = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, seen = Clock(), set()
    forward = PackedModel.forward

    def timed(self: PackedModel, segments: Sequence[Segment], kv: KVCache) -> torch.Tensor:
        shape = (len(segments), sum(len(s.token_ids) for s in segments))
        clock.now += (0.02 + 0.001 * shape[1]) * clock.slowness + (0.0 if shape in seen else 1.0)
        seen.add(shape)
        return forward(self, segments, kv)

    monkeypatch.setattr(PackedModel, "forward", timed)
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now)
    return clock


@pytest.mark.usefixtures("clock")
def test_m07_neither_the_order_of_classes_nor_a_slow_first_call_moves_a_choice() -> None:
    routes = []
    for rows in (requests(), requests()[::-1]):
        profile = measured(make_engine(build_module("llama"), max_batch=4), rows, Scope(LOOKUP, budget_seconds=300))
        for positions in (1, 2, 4, 8, 64):
            assert profile.step_cost.target.at(positions) == pytest.approx(0.02 + 0.001 * positions, rel=0.02)
        assert profile.step_cost.prefill_per_token == pytest.approx((0.02 + 0.256) / 256)
        fixed = replace(profile.step_cost, per_sequence=0.0, per_lookup=0.0)  # these two are timed by the real clock
        policy = MeasuredPolicy(replace(profile, step_cost=fixed), LOOKUP, 4)
        routes.append({(name, n): policy.route(name, n) for name in TEXTS for n in (1, 4)})
    assert routes[0] == routes[1]


@pytest.mark.parametrize("slow_part", [1, 2, 3, 4])
def test_no_moment_of_a_machine_decides_which_steps_are_cheap(slow_part: int, clock: Clock) -> None:
    parts = [0]

    def say(line: str) -> None:
        parts[0] += line.startswith("timing steps")
        clock.slowness = 3.0 if parts[0] == slow_part else 1.0

    engine = make_engine(build_module("llama"), max_batch=4)
    profile = measure_profile(engine, requests(), {"torch": "x"}, Scope(LOOKUP, budget_seconds=300), say)
    assert parts[0] == 4
    curve = profile.step_cost.target
    assert curve.at(8) / curve.at(1) == pytest.approx(28 / 21, rel=0.02)
    assert curve.at(64) / curve.at(8) == pytest.approx(84 / 28, rel=0.02)


@pytest.mark.parametrize(
    ("rows_of_class", "num_rows", "expected"),
    [
        pytest.param({"a": 95}, 48, {"a": 48}, id="not the first half"),
        pytest.param({"a": 4, "b": 100, "c": 100}, 60, {"a": 4, "b": 28, "c": 28}, id="a small class leaves room"),
        pytest.param({"a": 2, "b": 2, "c": 2}, 2, {"a": 1, "b": 1, "c": 1}, id="one of each at least"),
        pytest.param({"a": 3}, 10, {"a": 3}, id="all there is"),
    ],
)
def test_a_sample_is_as_large_as_asked_for_and_reaches_the_end_of_the_input(
    rows_of_class: dict[str, int], num_rows: int, expected: dict[str, int]
) -> None:
    rows = [Request(i, prompt="x", request_class=name) for name, count in rows_of_class.items() for i in range(count)]
    picked = stratified(rows, num_rows)
    assert Counter(row.request_class for row in picked) == expected
    for name, count in expected.items():
        places = [row.row_index for row in picked if row.request_class == name]
        assert len(set(places)) == count
        assert max(places) >= rows_of_class[name] * (count - 1) // count


def test_a_sample_takes_every_class_alike_spread_over_the_input() -> None:
    rows = [replace(r, row_index=i) for i, r in enumerate(requests(each=30) + requests(("copy",), each=300))]
    picked = stratified(rows, 12)
    assert [row.request_class for row in picked] == list(TEXTS) * 4
    copies = [row.row_index for row in picked if row.request_class == "copy"]
    assert max(copies) > 200


@pytest.mark.parametrize("route", [Route(Method.TARGET_ONLY), Route(Method.PROMPT_LOOKUP, 4)])
def test_a_trace_names_the_parts_of_a_step(route: Route, tmp_path: Path) -> None:
    engine = make_engine(build_module("llama"), max_batch=4)
    path = tmp_path / "trace.json"
    assert TracedEngine(engine.parts).trace_step(ListSource(requests()[:4]), StaticPolicy(route), 4, path)
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {f"batchspec: {part}" for part in ("admit", "propose", "forward", "accept", "commit", "retire")} <= names
    assert not engine.parts.scheduler.live
    engine.parts.kv.check_integrity(engine.parts.scheduler.prefixes.kept_blocks)


def test_the_crossover_is_where_the_ratio_passes_one() -> None:
    assert OccupancyCurve("s", (1, 2, 4), (1.5, 1.2, 0.8)).crossover == pytest.approx(3.0)
    assert OccupancyCurve("s", (1, 2, 4), (1.5, 1.2, 1.1)).crossover is None
    assert OccupancyCurve("s", (1, 2, 4), (0.9, 0.8, 0.7)).crossover is None


def test_curves_start_with_the_routed_setting_and_cover_every_method() -> None:
    profile = measured(with_draft(), requests(), Scope(ALL, budget_seconds=300))
    by_occupancy = occupancy_curves(profile, ALL)
    assert [curve.setting for curve in by_occupancy] == [
        "routed",
        "draft_model k=4",
        "lookup_then_draft k=4",
        "prompt_lookup k=4",
    ]
    assert by_occupancy[0].live_rows == (1, 2, 4)
    for curve in depth_curves(profile, ALL, (1, 4)):
        assert list(curve.tokens_per_step) == sorted(curve.tokens_per_step)
        assert set(curve.speed_ups) == {1, 4}
