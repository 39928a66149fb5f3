"""Puts the kernels into a loaded `transformers` model: packed linears, and whole decoder layers where they are known.

A layer is replaced only if it is of a class whose forward the fused layer spells out, and if what it adds to a small
random step agrees with what the plain layer adds (or is known to); every other layer keeps its own code, with its
linears packed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.activations import SiLUActivation

from batchspec.engine.cpu import kernels
from batchspec.engine.kv_cache import KVCache, LayerShape, blocks_for
from batchspec.engine.packed import PackedStep, Segment, pack
from batchspec.engine.plain import ZeroLinears, plain_products

# Layers of one form: norm, attention with rotated queries and keys, norm, SiLU-gated MLP, each half added as it is.
# Others have the same children and differ in the code (no rotation in some layers, scaled residuals, norms of 1 + w).
_KNOWN_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})

# Relative error (L2) of what a fused layer adds to a row that another order of summation explains.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_CHECK_ROWS = (9, 14)


class PackedLinear(nn.Module):
    """One nn.Linear, or several of the same input joined, with weights as `kernels.pack_weights` lays them out."""

    def __init__(self, *linears: Any, interleaved: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = sum(each.out_features for each in linears), linears[0].in_features
        self.panels = _frozen(kernels.pack_weights([each.weight for each in linears], interleaved))
        self.bias = None
        if any(each.bias is not None for each in linears):
            biases = [each.weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears]
            self.bias = _frozen(kernels.pack_biases(biases, interleaved))
        self.c = kernels.c_linear(self.in_features, self.out_features, self.panels, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(self.c, x)


class FusedLayer(nn.Module):
    """A Llama-type decoder layer (optionally with biases and query/key norms)."""

    def __init__(self, layer: Any, settings: kernels.CAttention) -> None:
        super().__init__()
        attn, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attn.layer_idx
        self.qkv = PackedLinear(attn.q_proj, attn.k_proj, attn.v_proj)
        self.output = PackedLinear(attn.o_proj)
        self.gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj, interleaved=True)
        self.down = PackedLinear(mlp.down_proj)
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)]
        self.norm_weights = nn.ParameterList([norm.weight for norm in norms if norm is not None])
        self.c = kernels.CLayer(
            settings,
            attn.q_proj.in_features,
            mlp.gate_proj.out_features,
            self.qkv.c,
            self.output.c,
            self.gate_up.c,
            self.down.c,
            *(None if norm is None else norm.weight.data_ptr() for norm in norms),
            *(0.0 if norm is None else _eps(norm) for norm in norms),
        )


class FusedLayers(nn.Module):
    """Consecutive decoder layers in one call."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.first_index = layers[0].layer_idx
        self.c = kernels.c_layers([layer.c for layer in layers])

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        batchspec_step: PackedStep,
        **_: Any,
    ) -> torch.Tensor:
        return kernels.decoder_layers(self.c, batchspec_step, self.first_index, hidden_states, *position_embeddings)


def prepare_model(
    module: Any, layers: tuple[LayerShape, ...], refused: Collection[str] | None = None
) -> tuple[str, ...]:
    """Pack and fuse a causal LM in place, its attention already ours; returns the names of the layers that are refused:
    those whose fused form answers otherwise or, without looking, those that are known to be `refused`.

    Doing it twice changes nothing. The plain weights are let go, layer by layer. A model that the kernels do not serve
    (another device or dtype, no compiler) stays as it is.
    """
    if module.device.type != "cpu" or module.dtype not in kernels.DTYPES or kernels.unavailable_reason() is not None:
        return ()
    found = _fuse_layers(module, layers, refused)
    for name, child in list(module.named_modules()):
        if type(child) is nn.Linear and child.in_features % 2 == 0:
            module.set_submodule(name, PackedLinear(child))
    return found


@torch.inference_mode()
def _fuse_layers(module: Any, layers: tuple[LayerShape, ...], known: Collection[str] | None) -> tuple[str, ...]:
    """Run a small step through the plain layers, and replace those that are not refused; the names of the others.
    Where it is `known` which are refused, the step is run for its settings alone."""
    candidates = [(name, layer) for name, layer in module.named_modules() if _is_fusible(layer)]
    calls: dict[str, tuple[Any, Any, torch.Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, arguments: Any, keywords: Any, output: torch.Tensor) -> None:
            calls[name] = (arguments, keywords, output)

        return hook

    hooks = [layer.register_forward_hook(keep(name), with_kwargs=True) for name, layer in candidates]
    try:
        with plain_products(module) if known is None else ZeroLinears():
            settings = _run_recorded(module, _check_step(module, layers))
    finally:
        for hook in hooks:
            hook.remove()
    own_step = _check_step(module, layers)  # what the plain layers wrote must not be there already
    refused = []
    for name, layer in candidates:
        arguments, keywords, expected = calls.pop(name)
        found = settings[layer.self_attn.layer_idx]
        if found is None or keywords["position_embeddings"][0].shape[-1] != found.head_dim:
            continue
        if known is not None and name in known:
            refused.append(name)
            continue
        fused = FusedLayers([FusedLayer(layer, found)])
        if known is None:
            got = fused(*arguments, **{**keywords, "batchspec_step": own_step})
            if not _adds_the_same(got.float(), expected.float(), arguments[0].float(), module.dtype):
                refused.append(name)
                continue
        module.set_submodule(name, fused)
    _join_layers(module)
    return tuple(refused)


def _join_layers(module: Any) -> None:
    """Where all layers of a model's list are fused, they become the only element of it: models of the known classes
    call the elements in turn, each with the same arguments but for the mask, which ours do not look at."""
    for name, stack in list(module.named_modules()):
        elements = list(stack.children()) if isinstance(stack, nn.ModuleList) else []
        if len(elements) > 1 and all(isinstance(element, FusedLayers) for element in elements):
            layers = [layer for layer in stack.modules() if isinstance(layer, FusedLayer)]
            module.set_submodule(name, nn.ModuleList([FusedLayers(layers)]))


def _adds_the_same(got: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two outputs of a layer, [1, rows, size], add the same to every row of its input, up to rounding. A row
    may be so large that what is added to it would not be seen in the whole, and that its own rounding counts."""
    added, whole = (expected - before).norm(dim=-1), expected.norm(dim=-1)
    return bool(((got - expected).norm(dim=-1) <= _TOLERANCE[dtype] * added + torch.finfo(dtype).eps * whole).all())


def _run_recorded(module: Any, step: PackedStep) -> dict[int, kernels.CAttention | None]:
    """Forward `step`; the settings that each layer's attention was called with, None where torch must serve it."""
    from batchspec.engine import attention

    settings: dict[int, kernels.CAttention | None] = {}

    def record(layer: Any, query: Any, key: Any, value: Any, mask: Any, **keywords: Any) -> Any:
        chosen = {name: keywords.get(name) for name in ("scaling", "sliding_window", "softcap")}
        settings[layer.layer_idx] = kernels.attention_settings(query, key, value, **chosen)
        return attention.batchspec_attention(layer, query, key, value, mask, **keywords)

    AttentionInterface.register("batchspec_settings", record)
    before = module.config._attn_implementation
    module.set_attn_implementation("batchspec_settings")
    try:
        module(input_ids=step.input_ids, position_ids=step.positions, use_cache=False, batchspec_step=step)
    finally:
        module.set_attn_implementation(before)
    return settings


def _check_step(module: Any, layers: tuple[LayerShape, ...]) -> PackedStep:
    """Two prefills of random tokens, over a cache of their own."""
    generator = torch.Generator().manual_seed(2)
    vocab_size = module.get_input_embeddings().weight.shape[0]
    longest = max(_CHECK_ROWS)
    kv = KVCache(
        layers, 1 + len(_CHECK_ROWS) * blocks_for(longest), len(_CHECK_ROWS), longest, module.dtype, module.device
    )
    segments = []
    for length in _CHECK_ROWS:
        slot = kv.acquire_slot()
        kv.reserve(slot, length)
        segments.append(Segment(slot, torch.randint(vocab_size, (length,), generator=generator).tolist(), 0, True, ()))
    return pack(segments, kv, 1, module.device)


def _is_fusible(layer: Any) -> bool:
    """A decoder layer of a known class, with the children of one, and nothing else."""
    if type(layer).__name__ not in _KNOWN_LAYERS or not type(layer).__module__.startswith("transformers."):
        return False
    children = dict(layer.named_children())
    if children.keys() != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attn, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    norms = [
        layer.input_layernorm,
        layer.post_attention_layernorm,
        *(attn.pop(name, None) for name in ("q_norm", "k_norm")),
    ]
    act = mlp.pop("act_fn", None)
    linears = [*attn.values(), *mlp.values()]
    return (
        attn.keys() == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and mlp.keys() == {"gate_proj", "up_proj", "down_proj"}
        and isinstance(act, (nn.SiLU, SiLUActivation))
        and not [*layer.self_attn.parameters(recurse=False), *layer.mlp.parameters(recurse=False)]
        and all(type(child) is nn.Linear for child in linears)
        and all(norm is None or (_eps(norm) is not None and norm.weight.shape[0] % 16 == 0) for norm in norms)
        and layer.self_attn.o_proj.out_features % kernels.PANEL_COLUMNS == 0
        and layer.mlp.down_proj.in_features % (kernels.PANEL_COLUMNS // 2) == 0
    )


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
