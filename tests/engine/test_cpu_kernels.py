"""The CPU kernels: right against plain torch in fp64, and the same bits whatever shares the call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, GraniteConfig, SmolLM3Config

from batchspec.engine import cpu, probe
from batchspec.engine.cpu import build, kernels
from batchspec.engine.cpu.modules import FusedLayer, FusedLayers, PackedLinear
from batchspec.engine.kv_cache import KVCache, LayerShape, blocks_for
from batchspec.engine.model import wrap_model
from batchspec.engine.packed import PackedStep, Segment, pack
from tests.engine.tiny import SHAPE, build_module

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.fixture(params=[1, 2], ids=["1_thread", "2_threads"])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


# linears


def packed_linear(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[PackedLinear, torch.nn.Linear]:
    torch.manual_seed(0)
    plain = torch.nn.Linear(in_features, out_features, dtype=dtype).requires_grad_(False)
    return PackedLinear(plain), plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 2), (31, 16), (33, 34), (576, 1536), (960, 576)])
def test_a_packed_linear_is_the_linear(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    packed, plain = packed_linear(out_features, in_features, dtype)
    x = torch.randn(2, 29, in_features, dtype=dtype)
    assert relative_error(packed(x), copy.deepcopy(plain).double()(x.double())) < TOLERANCE[dtype]


def linears(sizes: Sequence[int], dtype: torch.dtype) -> list[torch.nn.Linear]:
    """Of 34 inputs, every other one with a bias."""
    torch.manual_seed(0)
    made = [torch.nn.Linear(34, size, bias=index % 2 == 1, dtype=dtype) for index, size in enumerate(sizes)]
    return [linear.requires_grad_(False) for linear in made]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 32, 32), (32, 7), (48, 16, 16), (1, 2, 3)])
def test_linears_that_are_joined_answer_one_after_the_other(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = linears(sizes, dtype)
    x = torch.randn(5, 34, dtype=dtype)
    assert torch.equal(PackedLinear(*parts)(x), torch.cat([PackedLinear(part)(x) for part in parts], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linears_that_are_interleaved_take_turns_of_half_a_panel(dtype: torch.dtype) -> None:
    parts = linears((48, 48), dtype)
    x = torch.randn(5, 34, dtype=dtype)
    apart = [PackedLinear(part)(x).view(5, 3, 16) for part in parts]
    assert torch.equal(PackedLinear(*parts, interleaved=True)(x), torch.stack(apart, dim=2).flatten(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_row_has_the_same_bits_at_every_number_of_rows(dtype: torch.dtype, threads: int) -> None:
    packed, _ = packed_linear(1000, 1536, dtype)
    x = torch.randn(1024, 1536, dtype=dtype)
    expected = torch.cat([packed(row[None]) for row in x[:40]])
    for num_rows in [*range(1, 40), 64, 127, 256, 1024]:
        got = packed(x[:num_rows])
        assert torch.equal(got[:40], expected[:num_rows]), num_rows
        shifted = packed(x[40 - min(num_rows, 40) :][:num_rows])
        assert torch.equal(shifted[: min(num_rows, 40)], expected[40 - min(num_rows, 40) :]), num_rows


# attention


def attend(
    settings: dict[str, Any],
    lengths: list[int],
    chunks: list[list[int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Outputs [length, heads, dim] of sequences that arrive in `chunks`: one list of new tokens per sequence and step.

    The cache is shared by all of them and starts full of NaN, as if a broken row had used it before.
    """
    _, num_kv_heads, dim = shape
    num_blocks = 1 + sum(map(blocks_for, lengths))
    kv = KVCache([LayerShape(num_kv_heads, dim, dim)], num_blocks, len(lengths), 4096, dtype, CPU)
    for pool in (*kv.keys, *kv.values):
        pool.fill_(float("nan"))
    slots = [kv.acquire_slot() for _ in lengths]
    inputs = [sequence_inputs(index, length, shape, dtype) for index, length in enumerate(lengths)]
    done = [0] * len(lengths)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    for step in chunks:
        segments, parts = [], []
        for index, count in enumerate(step):
            if count:
                kv.reserve(slots[index], done[index] + count)
                segments.append(Segment(slots[index], [0] * count, done[index], False, ()))
                parts.append([tensor[done[index] : done[index] + count] for tensor in inputs[index]])
        packed = pack(segments, kv, 1, CPU)
        query, key, value = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        out = run_attention(settings, packed, query, key, value)
        for index, part in enumerate(out.split(step)):
            outputs[index].append(part)
            done[index] += len(part)
    assert done == lengths
    return [torch.cat(parts) for parts in outputs]


def run_attention(
    settings: dict[str, Any], step: PackedStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    chosen = {"scaling": None, "sliding_window": None, "softcap": None, **settings}
    found = cpu.attention_settings(*(tensor.transpose(0, 1)[None] for tensor in (query, key, value)), **chosen)
    assert found is not None
    return cpu.paged_attention(found, step, 0, query, key, value)


def sequence_inputs(index: int, length: int, shape: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    num_heads, num_kv_heads, dim = shape
    return [
        torch.randn(length, heads, dim, generator=generator).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def plain_attention(settings: dict[str, Any], inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = (tensor.double().transpose(0, 1) for tensor in inputs)
    group = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * settings.get("scaling", query.shape[-1] ** -0.5)
    if "softcap" in settings:
        scores = settings["softcap"] * torch.tanh(scores / settings["softcap"])
    positions = torch.arange(query.shape[1])
    distance = positions[:, None] - positions[None, :]
    hidden = (distance < 0) | (distance >= settings.get("sliding_window", 1 << 30))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling": 0.3},
    "window": {"sliding_window": 37},
    "wide_window": {"sliding_window": 300},
    "softcap": {"softcap": 3.0},
    "all": {"scaling": 0.2, "sliding_window": 100, "softcap": 5.0},
}
SHAPES = [(9, 3, 64), (4, 4, 16), (14, 2, 48), (3, 1, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_attention(settings: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [611, 5]
    outputs = attend(settings, lengths, [[256, 4], [256, 0], [99, 1]], shape, dtype)
    for index, (length, got) in enumerate(zip(lengths, outputs, strict=True)):
        expected = plain_attention(settings, sequence_inputs(index, length, shape, dtype))
        assert relative_error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [SETTINGS["plain"], SETTINGS["all"]], ids=["plain", "all"])
def test_attention_rows_have_the_same_bits_in_every_mix(
    settings: dict[str, Any], dtype: torch.dtype, threads: int
) -> None:
    shape, length = (9, 3, 64), 540
    [expected] = attend(settings, [length], [[1]] * length, shape, dtype)
    for chunks in ([[540]], [[7]] * 77 + [[1]], [[255], [2], [16], [17], [250]], [[33]] * 16 + [[12]]):
        assert torch.equal(attend(settings, [length], chunks, shape, dtype)[0], expected)
    mates = [length, 70, 1, 300, 16, 33]
    steps = [[256, 70, 1, 0, 0, 33], [256, 0, 0, 256, 16, 0], [28, 0, 0, 44, 0, 0]]
    beside = attend(settings, mates, steps, shape, dtype)
    assert torch.equal(beside[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    packed, _ = packed_linear(1000, 1536, dtype)
    x = torch.randn(37, 1536, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        rows = attend(SETTINGS["all"], [900, 20], [[256, 20], [256, 0], [256, 0], [132, 0]], (9, 3, 64), dtype)
        results.append(torch.cat([packed(x).flatten(), *(tensor.flatten() for tensor in rows)]))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_that_round_a_step_up_belong_to_nobody() -> None:
    shape = (9, 3, 64)
    kv = KVCache([LayerShape(3, 64, 64)], 3, 1, 64, torch.float32, CPU)
    slot = kv.acquire_slot()
    kv.reserve(slot, 1)
    query, key, value = sequence_inputs(0, 4, shape, torch.float32)
    out = run_attention({}, pack([Segment(slot, [0], 0, False, ())], kv, 4, CPU), query, key, value)
    assert torch.equal(out[0], value[0].repeat_interleave(3, 0))
    assert not out[1:].any()


# whole models


def biased(module: Any) -> Any:
    for name, parameter in module.named_parameters():
        if name.endswith(("bias", "norm.weight", "layernorm.weight")):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return module


FUSED = {
    "llama": ("llama", {"head_dim": 16}),
    "llama_with_biases": ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "mistral_sliding": ("mistral_sliding", {"head_dim": 32}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FUSED)
def test_known_layers_are_fused_and_answer_as_before(case: str, dtype: torch.dtype) -> None:
    name, changes = FUSED[case]
    plain = biased(build_module(name, dtype=dtype, **changes))
    ids = torch.randint(SHAPE["vocab_size"], (1, 40))
    with torch.inference_mode():
        expected = plain(ids).logits[0]
    model = wrap_model(case, copy.deepcopy(plain))
    [stack] = [stack for stack in model.module.modules() if isinstance(stack, FusedLayers)]
    assert [layer.layer_idx for layer in stack.layers] == list(range(SHAPE["num_hidden_layers"]))
    kv = model.new_cache(4, 1)
    slot = kv.acquire_slot()
    kv.reserve(slot, 40)
    got = model.forward([Segment(slot, ids[0].tolist(), 0, True, range(40))], kv)
    assert relative_error(got, expected) < 2 * TOLERANCE[dtype]
    assert probe.probe_batch_invariance(model, max_rows=64) is None


@pytest.mark.parametrize("name", ["gemma2_sliding", "gemma3_sliding"])
def test_layers_of_another_structure_keep_their_code(name: str) -> None:
    model = wrap_model(name, build_module(name, dtype=torch.bfloat16))
    kinds = {type(module) for module in model.module.modules()}
    assert FusedLayer not in kinds
    assert PackedLinear in kinds
    assert probe.probe_batch_invariance(model, max_rows=64) is None


LOOKALIKES = {
    "some layers without rotation": SmolLM3Config(**SHAPE, head_dim=16, no_rope_layer_interval=2),
    "scaled residuals": GraniteConfig(**SHAPE, head_dim=16, residual_multiplier=0.3),
    "norms of 1 + w, GELU": GemmaConfig(**SHAPE, head_dim=16),
}


@pytest.mark.parametrize("case", LOOKALIKES)
def test_layers_with_the_same_children_and_other_code_keep_it(case: str) -> None:
    config = copy.deepcopy(LOOKALIKES[case])
    config.initializer_range = 0.02
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model = wrap_model(case, copy.deepcopy(plain))
    assert not any(isinstance(layer, FusedLayer) for layer in model.module.modules())
    ids = torch.randint(SHAPE["vocab_size"], (1, 300))
    with torch.inference_mode():
        expected = plain(ids).logits[0]
    kv = model.new_cache(12, 1)
    slot = kv.acquire_slot()
    kv.reserve(slot, 300)
    got = model.forward([Segment(slot, ids[0].tolist(), 0, True, range(300))], kv)
    assert relative_error(got, expected) < 2 * TOLERANCE[torch.float32]


def test_a_layer_that_only_looks_like_the_known_one_is_left_alone() -> None:
    module = build_module("llama", dtype=torch.bfloat16, head_dim=16)
    for layer in module.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    model = wrap_model("gelu", module)
    assert not any(isinstance(layer, FusedLayer) for layer in model.module.modules())


def test_preparing_twice_changes_nothing() -> None:
    model = wrap_model("tiny", build_module("qwen3", dtype=torch.bfloat16))
    before = list(model.module.modules())
    assert cpu.prepare_model(model.module, model.layers) == ()
    assert list(model.module.modules()) == before


# argmax and building


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("columns", [1, 15, 16, 49152, 50257])
def test_argmax_takes_the_lowest_of_equals(columns: int, dtype: torch.dtype, threads: int) -> None:
    logits = torch.randn(9, columns).clamp(max=1.5).to(dtype)
    expected = [row.tolist().index(max(row.tolist())) for row in logits]
    assert cpu.argmax(logits).tolist() == expected


@pytest.fixture
def fresh_build() -> Any:
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, fresh_build: None) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.KernelsUnavailableError, match="no C compiler"):
        build.load()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_build: None
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path))
    with pytest.raises(build.KernelsUnavailableError, match="compiler failed"):
        build.load()
    assert not any(tmp_path.iterdir())


def test_where_the_kernels_are_missing_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unavailable_reason", lambda: "none here")
    model = wrap_model("tiny", build_module("qwen3", dtype=torch.bfloat16))
    assert not any(isinstance(module, FusedLayer | PackedLinear) for module in model.module.modules())


def test_one_openmp_runtime_serves_torch_and_kernels() -> None:
    assert cpu.unavailable_reason() is None
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1
