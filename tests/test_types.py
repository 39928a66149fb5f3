from dataclasses import FrozenInstanceError

import pytest

from batchspec.stats import DecodeStats
from batchspec.types import Completion, FinishReason, Method, Request, SamplingParams, StepTimes


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens must be between 0 and max_new_tokens (4), got 5"),
        ({"min_new_tokens": -1}, "min_new_tokens must be between 0 and max_new_tokens (512), got -1"),
        ({"stop": ("###", "")}, "stop strings must not be empty"),
        ({"temperature": -0.1}, "temperature must be a finite number >= 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number >= 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be a finite number >= 0, got inf"),
        ({"top_k": -1}, "top_k must be >= 0, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"min_p": 1.0}, "min_p must be at least 0 and below 1, got 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be between -2 and 2, got -3.0"),
    ],
)
def test_an_illegal_setting_is_told_with_its_limits(settings: dict[str, object], problem: str) -> None:
    assert SamplingParams(**settings).problems() == [problem]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_new_tokens": 1, "min_new_tokens": 1},
        {"temperature": 0.8, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "stop": ("\n",), "seed": -1},
    ],
)
def test_legal_settings_have_no_problems(settings: dict[str, object]) -> None:
    assert SamplingParams(**settings).problems() == []


def test_all_problems_come_at_once() -> None:
    assert len(SamplingParams(max_new_tokens=0, temperature=-1, top_k=-5, stop=("",)).problems()) == 4


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 1e-5}, False),
        ({"temperature": 1.0, "top_k": 2}, False),
    ],
)
def test_greedy(settings: dict[str, object], greedy: bool) -> None:
    assert SamplingParams(**settings).greedy is greedy


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        (Request(5, prompt="x"), "row:5"),
        (Request(5, prompt="x", request_id="a"), "id:a"),
        (Request(1, prompt="x", request_id="row:5"), "id:row:5"),
        (Request(1, prompt="x", request_id=""), "id:"),
    ],
)
def test_the_row_key_is_the_id_else_the_place_and_the_two_never_meet(request_: Request, key: str) -> None:
    assert request_.row_key == key


def test_derived_values_and_frozen_records() -> None:
    times = StepTimes(
        e2e_seconds=9.0, prefill_seconds=0.5, draft_seconds=0.25, verify_seconds=1.0, overhead_seconds=0.125
    )
    completion = Completion(
        row_index=0,
        token_ids=(4, 5, 2),
        text="ab",
        finish_reason=FinishReason.STOP,
        input_tokens=1,
        cached_input_tokens=0,
        method=Method.TARGET_ONLY,
        num_speculative_tokens=0,
        num_route_changes=0,
        route_reason="",
        mean_live_sequences=1.0,
        stats=DecodeStats(num_target_steps=3),
        times=times,
    )
    assert completion.output_tokens == 3
    assert completion.times.device_seconds == 1.875
    with pytest.raises(FrozenInstanceError):
        completion.text = "other"  # type: ignore[misc]
