"""Whole jobs with a tiny model in the test's own process, so that a test can put a fault into the engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec.config import EngineConfig, InputConfig, OutputConfig, RouteConfig, RunConfig, RunOptions
from batchspec.pipeline import runner
from batchspec.pipeline.executors import local
from batchspec.types import Method, SamplingParams
from tests.engine.tiny import build_module, byte_tokenizer
from tests.pipeline.threads import ThreadExecutor

PROMPTS = [
    ("copy", "the cat sat on the mat and the cat sat on the mat and the cat sat on the"),
    ("copy", "one two three one two three one two three one two"),
    ("copy", "abcabcabcabcabcabcabcabcabc"),
    ("chat", "tell me what the weather is like in the town of your birth"),
    ("chat", "why?"),
    ("chat", "a long story about a fox, a crow, and a piece of cheese that neither of them got"),
]


def save_tiny_model(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A three-layer llama with random weights, its byte tokenizer and an end token, as a model directory."""
    module = build_module("llama", dtype=dtype, eos_token_id=257, **changes)
    module.generation_config.eos_token_id = 257
    module.generation_config.pad_token_id = 258
    module.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def write_input(path: Path, **columns: Any) -> Path:
    table = {"prompt": [p for _, p in PROMPTS], "request_class": [c for c, _ in PROMPTS], **columns}
    pq.write_table(pa.table(table), path)
    return path


RunTinyJob = Callable[..., Path]


def run_tiny_job(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    input_path: Path,
    output: Path,
    *,
    method: Method = Method.PROMPT_LOOKUP,
    sampling: SamplingParams | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Path:
    """Answer the input with the model in this process; the output directory."""
    monkeypatch.setattr(local, "LocalExecutor", ThreadExecutor)
    config = RunConfig(
        input=InputConfig(inputs=(str(input_path),)),
        output=OutputConfig(output=str(output)),
        engine=replace(EngineConfig(model=str(model), max_batch=4, kv_memory_bytes=2**22), **(engine or {})),
        sampling=sampling or SamplingParams(max_new_tokens=40),
        routes=RouteConfig(method=method, num_speculative_tokens=4),
        run=RunOptions(devices=("cpu",), threads=1),
    )
    runner.generate(config)
    return output
