"""Plain modules on processors that multiply half-precision numbers slowly."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from batchspec.engine.plain import _Float32Products, plain_products
from tests.engine.tiny import SHAPE, build_module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_float32_answer_as_the_module_does(dtype: torch.dtype) -> None:
    module = build_module("llama", dtype=dtype, head_dim=16)
    ids = torch.randint(SHAPE["vocab_size"], (1, 40))
    with torch.inference_mode():
        exact = copy.deepcopy(module).double()(ids).logits[0]
        own = module(ids).logits[0]
        with _Float32Products():
            got = module(ids).logits[0]
    assert got.dtype == dtype
    errors = [float((logits.double() - exact).norm()) for logits in (own, got)]
    assert errors[1] < 1.5 * errors[0]


def test_what_torch_multiplies_well_is_left_to_it() -> None:
    assert isinstance(plain_products(build_module("llama", dtype=torch.float32, head_dim=16)), nullcontext)
