"""The model as `transformers` runs it, on processors whose torch has no fast products of half-precision numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.bmm,
}


def plain_products(module: Any) -> AbstractContextManager[Any]:
    """What to call a plain module under: products in float32, each result rounded once to the module's dtype, where
    torch would otherwise multiply one number at a time (on an AVX2 processor 1 GFLOP/s a core in place of 90)."""
    is_slow = {
        torch.bfloat16: not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return _Float32Products() if module.device.type == "cpu" and is_slow.get(module.dtype) else nullcontext()


class _Float32Products(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _PRODUCTS or args[0].dtype not in _HALF_DTYPES:
            return func(*args, **(kwargs or {}))
        wide = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
        return func(*wide, **(kwargs or {})).to(args[0].dtype)
