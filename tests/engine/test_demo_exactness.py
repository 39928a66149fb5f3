"""The demo model itself: bf16 the same on every route and batch, fp32 the same as `transformers`."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine.load import load_torch_engine
from batchspec.types import Completion, Method, Request, SamplingParams
from tests.engine.tiny import FixedRoute, ListSource

SAMPLE = Path(__file__).parents[2] / "data" / "sample_prompts.parquet"
MAX_NEW_TOKENS = 24


def requests(count: int) -> list[Request]:
    """Short rows with messages, spread over the sample."""
    rows = [r for r in pq.read_table(SAMPLE).to_pylist() if r["messages"] and len(str(r["messages"])) < 1500]
    rows = [r for r in rows if all(m.get("content") and m["role"] == "user" for m in r["messages"])]
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    return [
        Request(i, messages=row["messages"], request_class=row["request_class"], sampling=params)
        for i, row in enumerate(rows[:: len(rows) // count][:count])
    ]


def answers(model: Path, dtype: str, batch: int, route: FixedRoute, count: int) -> dict[int, Completion]:
    config = EngineConfig(model=str(model), dtype=dtype, max_batch=batch)
    engine = load_torch_engine(config, "cpu", 2, 1.0, StepAttributionRule())
    outcomes = list(engine.run(ListSource(requests(count)), route))
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    if dtype == "bfloat16" and not engine.info.batch_invariant:
        pytest.skip(f"this processor's bf16 kernels depend on the batch: {engine.info.notes}")
    return {outcome.row_index: outcome for outcome in outcomes if isinstance(outcome, Completion)}


def test_bf16_ids_are_the_same_on_every_route_and_batch(demo_model_path: Path) -> None:
    expected = answers(demo_model_path, "bfloat16", 12, FixedRoute(), 12)
    for batch, k in ((12, 4), (5, 8)):
        found = answers(demo_model_path, "bfloat16", batch, FixedRoute(Method.PROMPT_LOOKUP, k), 12)
        assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in expected.items()}
        assert sum(o.stats.num_accepted_tokens for o in found.values()) > 0


def test_fp32_ids_are_those_of_transformers(demo_model_path: Path) -> None:
    found = answers(demo_model_path, "float32", 6, FixedRoute(Method.PROMPT_LOOKUP, 4), 6)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path, dtype=torch.float32).eval()
    for request in requests(6):
        ids = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        assert list(found[request.row_index].token_ids) == output[0, ids["input_ids"].shape[1] :].tolist()
