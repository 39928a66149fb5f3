"""Plain modules on processors that multiply half-precision numbers slowly."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchspec.engine import plain
from tests.engine.tiny import SHAPE, build_module


class ProductDtypes(TorchDispatchMode):
    """The dtypes that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):
            self.seen.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("slice_elements", [1, 100, 2**20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_float32_answer_as_the_module_does(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slice_elements: int
) -> None:
    monkeypatch.setattr(plain, "_SLICE_ELEMENTS", slice_elements)
    module = build_module("llama", dtype=dtype, head_dim=16, attention_bias=True)
    ids = torch.randint(SHAPE["vocab_size"], (1, 40))
    with torch.inference_mode():
        exact = copy.deepcopy(module).double()(ids).logits[0]
        own = module(ids).logits[0]
        with ProductDtypes() as products, plain.Float32Products():
            got = module(ids).logits[0]
    assert got.dtype == dtype
    assert torch.float32 in products.seen
    assert dtype not in products.seen
    errors = [float((logits.double() - exact).norm()) for logits in (own, got)]
    assert errors[1] < 1.5 * errors[0]


def test_arguments_may_be_named() -> None:
    x, weight, bias = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((3, 4), (5, 4), (5,)))
    with plain.Float32Products():
        got = torch.nn.functional.linear(input=x, weight=weight, bias=bias)
        added = torch.addmm(bias, x, weight.T)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).bfloat16()
    assert torch.equal(got, expected)
    assert torch.equal(added, expected)


@pytest.mark.parametrize(
    ("dtype", "torch_multiplies", "widens"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
)
def test_only_what_torch_multiplies_slowly_is_widened(
    dtype: torch.dtype, torch_multiplies: bool, widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "torch_multiplies", lambda _: torch_multiplies)
    chosen = plain.plain_products(build_module("llama", dtype=dtype, head_dim=16))
    assert isinstance(chosen, plain.Float32Products if widens else nullcontext)


def test_a_torch_without_onednn_multiplies_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(plain.plain_products(build_module("llama", dtype=torch.bfloat16)), plain.Float32Products)
