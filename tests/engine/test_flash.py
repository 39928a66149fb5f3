"""torch's flash kernels run on CUDA alone; what they are asked is tested against a plain reading of their manual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from batchspec.engine import attention, flash
from batchspec.engine.kv_cache import BLOCK_TOKENS, KVCache, LayerShape
from batchspec.engine.packed import PackedStep, Segment, pack

CPU = torch.device("cpu")


def documented_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Causal from the end of each sequence, `window_size[0]` keys to the left (-1: all)."""
    assert window_size[1] == 0
    assert cu_seq_q.dtype == torch.int32
    assert query.shape[0] == cu_seq_q[-1]
    out = torch.empty_like(query)
    for index in range(len(cu_seq_q) - 1):
        rows = slice(int(cu_seq_q[index]), int(cu_seq_q[index + 1]))
        if block_table is None:
            assert cu_seq_k is not None
            assert cu_seq_k.dtype == torch.int32
            span = slice(int(cu_seq_k[index]), int(cu_seq_k[index + 1]))
            keys, values = key[span], value[span]
        else:
            assert seqused_k is not None
            assert block_table.dtype == seqused_k.dtype == torch.int32
            used = int(seqused_k[index])
            keys, values = (pool[block_table[index].long()].flatten(0, 1)[:used] for pool in (key, value))
        num_rows, num_keys = rows.stop - rows.start, len(keys)
        assert num_rows <= max_q
        assert num_keys <= max_k
        assert enable_gqa == (query.shape[1] != keys.shape[1])
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum("mhd,lhd->hml", query[rows], keys.repeat_interleave(group, 1)) * scale
        behind = torch.arange(num_keys - num_rows, num_keys)[:, None] - torch.arange(num_keys)
        hidden = behind < 0
        if window_size[0] >= 0:
            hidden |= behind > window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hml,lhd->mhd", weights, values.repeat_interleave(group, 1))
    return out


@pytest.fixture
def kernels_used(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The kernels in force, one after the other: FA3 can be had, FA4 cannot; None: torch's own."""
    used: list[str | None] = [None]

    def activate(name: str) -> None:
        if name == "FA4":
            raise ModuleNotFoundError("no module named flash_attn.cute")
        used.append(name)

    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activate)
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: used[-1])
    monkeypatch.setattr("torch.nn.attention.restore_flash_attention_impl", lambda: used.append(None))
    return used


@pytest.fixture
def varlen_attn(monkeypatch: pytest.MonkeyPatch, kernels_used: list[str | None]) -> Iterator[None]:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented_varlen_attn)
    monkeypatch.setattr(flash, "_DTYPES", (torch.float32,))
    flash._tried.cache_clear()
    yield
    flash._tried.cache_clear()


def step_of(sizes: list[tuple[int, int, bool]], kv_heads: int, dim: int) -> PackedStep:
    """A step of (context, rows, prefill) over a cache of noise, prompts in chunks of 16; at least 8 rows."""
    num_blocks = 1 + sum(-(-(context + count) // BLOCK_TOKENS) for context, count, _ in sizes)
    kv = KVCache([LayerShape(kv_heads, dim, dim)], num_blocks, len(sizes), 512, torch.float32, CPU)
    kv.keys[0].copy_(torch.randn(kv.keys[0].shape))
    kv.values[0].copy_(torch.randn(kv.values[0].shape))
    segments = []
    for context, count, prefill in sizes:
        slot = kv.acquire_slot()
        assert kv.reserve(slot, context + count)
        cuts = range(0, count, 16) if prefill else [0]
        for start in cuts:
            size = min(16, count - start) if prefill else count
            segments.append(Segment(slot, [1] * size, context + start, prefill, ()))
    return pack(segments, kv, 8, CPU)


def padded(step: PackedStep, rows: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    keys, values = step.kv.keys[0], step.kv.values[0]
    out = torch.zeros_like(rows)
    for group in attention._groups(step, 4):
        attention._attend(rows, keys, values, out, group, scale, window, None)
    return out


SIZES = [
    [(70, 1, False)],
    [(5, 1, False), (31, 3, False), (64, 9, False)],
    [(40, 1, False), (0, 33, True), (64, 20, True)],
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)])
@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize("variant", flash._VARIANTS[1:])
@pytest.mark.parametrize("most_gathered_keys", [1, 100, 2**18])
@pytest.mark.usefixtures("varlen_attn")
def test_flash_kernels_are_asked_for_what_padded_products_compute(
    sizes: list[tuple[int, int, bool]],
    heads: tuple[int, int],
    window: int | None,
    variant: flash.Variant,
    most_gathered_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash, "_MOST_GATHERED_KEYS", most_gathered_keys)
    torch.manual_seed(0)
    step = step_of(sizes, heads[1], 16)
    rows = torch.randn(step.input_ids.shape[1], heads[0], 16)
    got = flash.attend(variant, rows, step.kv.keys[0], step.kv.values[0], step, 0.3, window)
    torch.testing.assert_close(got, padded(step, rows, 0.3, window))


def first_found(dtype: torch.dtype = torch.float32, head_dim: int = 16) -> flash.Variant | None:
    return flash._tried(CPU, dtype, 6, 2, head_dim)


@pytest.mark.usefixtures("varlen_attn")
def test_the_first_way_that_runs_is_taken(monkeypatch: pytest.MonkeyPatch, kernels_used: list[str | None]) -> None:
    def without(*missing: str) -> Any:
        def kernel(*arguments: Any, **keywords: Any) -> torch.Tensor:
            if not keywords.keys().isdisjoint(missing):
                raise RuntimeError("not supported by this kernel")
            return documented_varlen_attn(*arguments, **keywords)

        return kernel

    assert first_found() == flash.Variant("FA3", True)
    for missing, expected in (
        (("block_table",), flash.Variant(None, False)),
        (("block_table", "num_splits"), flash.Variant(None, False, ())),
        (("scale",), None),
    ):
        flash._tried.cache_clear()
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", without(*missing))
        assert first_found() == expected
        assert kernels_used[-1] is None


@pytest.mark.usefixtures("varlen_attn")
def test_each_model_gets_the_kernels_that_were_tried_for_it(kernels_used: list[str | None]) -> None:
    torch.manual_seed(0)
    step = step_of(SIZES[0], 2, 16)
    rows = torch.randn(step.input_ids.shape[1], 6, 16)
    for variant in (flash.Variant("FA3", True), flash.Variant(None, False), flash.Variant("FA3", True)):
        flash.attend(variant, rows, step.kv.keys[0], step.kv.values[0], step, 0.3, None)
        assert kernels_used[-1] == variant.kernels


@pytest.mark.usefixtures("varlen_attn")
def test_a_kernel_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return documented_varlen_attn(*arguments, **keywords | {"window_size": (0, 0)})

    def no_window(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return documented_varlen_attn(*arguments, **keywords | {"window_size": (-1, 0)})

    def nan(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full_like(query, torch.nan)

    for wrong in (short, no_window, nan):
        flash._tried.cache_clear()
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
        assert first_found() is None


@pytest.mark.usefixtures("varlen_attn")
def test_what_flash_kernels_cannot_do_is_not_tried() -> None:
    assert first_found(dtype=torch.float64) is None
    assert first_found(head_dim=12) is None
    assert first_found(head_dim=264) is None
    query = torch.zeros(1, 6, 4, 16)
    assert flash.variant_for(query, query, query, None) is None, "on CPU"


def test_real_kernels_that_do_not_run_here_are_passed_over() -> None:
    assert first_found(dtype=torch.bfloat16) is None
