"""The same promises on CUDA: a row's tokens depend neither on its method nor on its batch."""

from __future__ import annotations

import random

import pytest
import torch

from batchspec.engine import flash
from batchspec.engine.probe import probe_batch_invariance
from batchspec.types import Method
from tests.engine.tiny import FixedRoute, build_module, make_engine, requests_for, run

pytestmark = pytest.mark.gpu

WORDS = ["abc", "xyz", "12", "the ", "ok", " ", "é", "ab"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_sliding"])
def test_ids_depend_neither_on_method_nor_on_batch(name: str) -> None:
    module = build_module(name, dtype=torch.bfloat16).cuda()
    chooser = random.Random(0)
    prompts = ["".join(chooser.choices(WORDS, k=chooser.randint(1, 40))) for _ in range(24)]
    requests = requests_for(prompts, max_new_tokens=64)
    alone = run(make_engine(module, max_batch=1), requests)
    for batch in (1, 8, 24):
        for route in (FixedRoute(), FixedRoute(Method.PROMPT_LOOKUP, 2), FixedRoute(Method.PROMPT_LOOKUP, 8)):
            found = run(make_engine(module, max_batch=batch), requests, route)
            assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in alone.items()}


def test_flash_kernels_serve_a_usual_model() -> None:
    assert flash._tried(torch.device("cuda"), torch.bfloat16, 32, 8, 128) is not None


def test_nothing_that_is_tried_changes_the_bits_of_a_row() -> None:
    model = make_engine(build_module("llama", dtype=torch.bfloat16).cuda()).parts.model
    assert probe_batch_invariance(model) is None
