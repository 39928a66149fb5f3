"""The kernels' C interface as Python functions on torch tensors (bf16 or fp32, on CPU).

Every result row depends on that row's inputs alone, bit for bit, whatever the number of rows or threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from batchspec.engine import memory
from batchspec.engine.cpu import build
from batchspec.engine.packed import PackedStep, once_per_step

PANEL_COLUMNS = 32
DTYPES = (torch.bfloat16, torch.float32)


class CLinear(ctypes.Structure):
    """`panels` are the weights of `pack_weights`; `bias` is fp32 and rounded up to whole panels, or null."""

    _fields_ = (("in_features", c_int64), ("num_columns", c_int64), ("panels", c_void_p), ("bias", c_void_p))


class CAttention(ctypes.Structure):
    """Shape and settings of a layer's attention; window 0 and softcap 0 mean none."""

    _fields_ = (
        ("is_bf16", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        ("num_seqs", c_int64),
        ("num_rows", c_int64),
        ("max_blocks", c_int64),
        ("block_tokens", c_int64),
        ("query_starts", c_void_p),
        ("first_positions", c_void_p),
        ("block_tables", c_void_p),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        ("attention", CAttention),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("input_norm_eps", c_float),
        ("post_attention_norm_eps", c_float),
        ("query_norm_eps", c_float),
        ("key_norm_eps", c_float),
    )


def pack_weights(weights: Sequence[torch.Tensor], interleaved: bool = False) -> torch.Tensor:
    """Weights [out, in] of one input -> int32 [panels, words of a row, 32]: 32 outputs side by side, a word is 2 bf16
    or 1 fp32 inputs. Outputs of one weight follow those of another or, `interleaved`, a panel has as many of each: then
    weights are equal in size, their number divides 32, and a panel's share divides theirs."""
    parts = [weight.contiguous().view(torch.int32) for weight in weights]
    if not interleaved and any(len(part) % PANEL_COLUMNS for part in parts[:-1]):
        parts = [torch.cat(parts)]
    num_words = parts[0].shape[1]
    panels = memory.zeros((-(-sum(map(len, parts)) // PANEL_COLUMNS), num_words, PANEL_COLUMNS), torch.int32)
    if interleaved:
        for columns, part in zip(panels.chunk(len(parts), dim=2), parts, strict=True):
            columns.copy_(part.view(len(panels), -1, num_words).transpose(1, 2))
        return panels
    first = 0
    for part in parts:
        num_whole = len(part) // PANEL_COLUMNS
        whole, rest = part[: num_whole * PANEL_COLUMNS], part[num_whole * PANEL_COLUMNS :]
        panels[first : first + num_whole].copy_(whole.view(num_whole, PANEL_COLUMNS, num_words).transpose(1, 2))
        first += num_whole
        if len(rest):  # the last panel, whose other outputs stay zero
            panels[first, :, : len(rest)].copy_(rest.T)
    return panels


def pack_biases(biases: Sequence[torch.Tensor], interleaved: bool = False) -> torch.Tensor:
    """Biases [out] -> float32, in the order of `pack_weights`."""
    if interleaved:
        turns = [bias.view(-1, PANEL_COLUMNS // len(biases)) for bias in biases]
        biases = [torch.stack(turns, dim=1).flatten()]
    joined = torch.cat(list(biases)).float()
    return torch.nn.functional.pad(joined, (0, -len(joined) % PANEL_COLUMNS))


def c_linear(in_features: int, num_columns: int, panels: torch.Tensor, bias: torch.Tensor | None) -> CLinear:
    return CLinear(in_features, num_columns, panels.data_ptr(), None if bias is None else bias.data_ptr())


@once_per_step
def c_step(step: PackedStep) -> CStep:
    """The step as the kernels read it. It holds addresses: valid while `step` lives."""
    num_seqs, max_blocks = step.block_tables.shape
    return CStep(
        num_seqs,
        step.input_ids.shape[1],
        max_blocks,
        step.kv.keys[0].shape[1],
        step.query_starts.data_ptr(),
        step.first_positions.data_ptr(),
        step.block_tables.data_ptr(),
    )


def linear(weight: CLinear, x: torch.Tensor) -> torch.Tensor:
    """x [..., in] -> [..., out]."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.num_columns)
    _library().batchspec_linear(
        torch.get_num_threads(),
        _is_bf16(x),
        ctypes.byref(weight),
        x.numel() // x.shape[-1],
        x.data_ptr(),
        out.data_ptr(),
    )
    return out


def attention_settings(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> CAttention | None:
    """Settings for query [1, heads, T, dim], key and value [1, kv_heads, T, dim]; None where torch must serve them.

    The answer depends on nothing that changes from step to step: a layer's cache is always read as it was written.
    """
    num_heads, dim = query.shape[1], query.shape[3]
    served = query.device.type == "cpu" and query.dtype in DTYPES and dim % 16 == 0 and value.shape[3] == dim
    if not served or unavailable_reason() is not None:
        return None
    scale = scaling if scaling is not None else dim**-0.5
    return CAttention(_is_bf16(query), num_heads, key.shape[1], dim, sliding_window or 0, scale, softcap or 0.0)


@cache
def unavailable_reason() -> str | None:
    """None where the kernels are there; compiles them where they are not yet in the cache."""
    try:
        _library()
    except build.KernelsUnavailableError as error:
        return str(error)
    return None


def attention(
    settings: CAttention,
    step: PackedStep,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """query [T, heads, dim], key and value [T, kv_heads, dim] -> [T, heads, dim]; writes K and V into the cache."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(query)
    _library().batchspec_attention(
        torch.get_num_threads(),
        ctypes.byref(settings),
        ctypes.byref(c_step(step)),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        step.kv.keys[layer].data_ptr(),
        step.kv.values[layer].data_ptr(),
        out.data_ptr(),
    )
    return out


def decoder_layers(
    layers: ctypes.Array[CLayer],
    step: PackedStep,
    first_index: int,
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Whole decoder layers, one after the other, from the model's layer `first_index` on; hidden [1, T, size], cos and
    sin [1, T, head_dim]. Writes K and V into the cache."""
    hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(hidden)
    pools = slice(first_index, first_index + len(layers))
    _library().batchspec_layers(
        torch.get_num_threads(),
        len(layers),
        layers,
        ctypes.byref(c_step(step)),
        hidden.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        _addresses(step.kv.keys[pools]),
        _addresses(step.kv.values[pools]),
        out.data_ptr(),
    )
    return out


def c_layers(layers: Sequence[CLayer]) -> ctypes.Array[CLayer]:
    """A C array of layers. It holds the addresses that they hold."""
    return (CLayer * len(layers))(*layers)


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] -> int64 [rows]: the largest, the lowest id of equals. Serves every device and dtype."""
    if logits.device.type != "cpu" or logits.dtype not in DTYPES or unavailable_reason() is not None:
        return logits.argmax(dim=-1)
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _library().batchspec_argmax(
        torch.get_num_threads(), _is_bf16(logits), *logits.shape, logits.data_ptr(), out.data_ptr()
    )
    return out


def _is_bf16(x: torch.Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


@cache
def _library() -> ctypes.PyDLL:
    library = build.load()
    pointer = c_void_p
    library.batchspec_linear.argtypes = (c_int, c_int64, pointer, c_int64, pointer, pointer)
    library.batchspec_attention.argtypes = (c_int, *[pointer] * 8)
    library.batchspec_layers.argtypes = (c_int, c_int64, *[pointer] * 8)
    library.batchspec_argmax.argtypes = (c_int, c_int64, c_int64, c_int64, pointer, pointer)
    for name in ("linear", "attention", "layers", "argmax"):
        getattr(library, f"batchspec_{name}").restype = None
    return library
