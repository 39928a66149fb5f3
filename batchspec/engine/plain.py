"""The model as `transformers` runs it: on processors whose torch has no fast products of half-precision numbers, and
where nothing but shapes is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HALF_DTYPES = (torch.bfloat16, torch.float16)

# Elements of a weight that are widened at a time: about what a core's cache holds.
_SLICE_ELEMENTS = 2**20

_PRODUCTS = {
    torch.nn.functional.linear,
    *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")),
    *(getattr(torch.Tensor, name) for name in ("matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm")),
}


def plain_products(module: Any) -> AbstractContextManager[Any]:
    """What to call a plain module under: products in float32, each result rounded once to the module's dtype, where
    torch would otherwise multiply one number at a time (on an AVX2 processor 1 GFLOP/s a core in place of 90)."""
    if module.device.type != "cpu" or module.dtype not in _HALF_DTYPES or torch_multiplies(module.dtype):
        return nullcontext()
    return Float32Products()


def torch_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has fast products of bfloat16 or float16 on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    bf16, fp16 = torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.ops.mkldnn._is_mkldnn_fp16_supported
    return bool(bf16() if dtype == torch.bfloat16 else fp16())


class _ProductMode(TorchFunctionMode):
    """Matrix products are done by `product`, everything else as ever."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = partial(self.product, func) if func in _PRODUCTS else func
        return call(*args, **(kwargs or {}))

    def product(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Float32Products(_ProductMode):
    """Matrix products of half-precision tensors in float32.

    Weights of `linear` are widened a slice at a time: a whole copy would take twice a weight's memory, and longer to
    come by than the product takes. Other products hold copies of what they multiply while they run.
    """

    def product(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        dtype = next(x.dtype for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if dtype not in _HALF_DTYPES:
            return func(*args, **kwargs)
        if func is torch.nn.functional.linear:
            return _linear(*args, **kwargs)
        result = func(*map(_widened, args), **{name: _widened(x) for name, x in kwargs.items()})
        return result.to(dtype)


class ZeroLinears(_ProductMode):
    """Linear layers that answer zeros: what to call a plain module under for the sake of shapes and settings alone."""

    def product(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _zeros(*args, **kwargs) if func is torch.nn.functional.linear else func(*args, **kwargs)


def _zeros(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return input.new_zeros(*input.shape[:-1], len(weight))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = input.new_empty(*input.shape[:-1], len(weight))
    widened = input.float()
    num_rows = max(1, _SLICE_ELEMENTS // weight.shape[1])
    for rows in (slice(start, start + num_rows) for start in range(0, len(weight), num_rows)):
        part = None if bias is None else bias[rows].float()
        out[..., rows] = torch.nn.functional.linear(widened, weight[rows].float(), part)
    return out


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) else x
