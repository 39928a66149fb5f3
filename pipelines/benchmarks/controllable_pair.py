"""Target and drafts whose speed and acceptance are known beforehand, made from one small model.

  python pipelines/benchmarks/controllable_pair.py --model DIR --output DIR [--copies 5]

Writes `target` (the model with each layer followed by `copies` layers whose output projections are zero: the same
text at a multiple of the cost), `good` (the model itself: every proposal right), `noisy` (noise on its weights: some
right) and `bad` (every second layer left out: mostly wrong).
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NOISE = 0.06


def expensive_target(model: Any, copies: int) -> Any:
    """The same function, `1 + copies` times the layers: the added ones add zero to the residual stream."""
    layers = []
    for layer in model.model.layers:
        layers.append(layer)
        for _ in range(copies):
            idle = copy.deepcopy(layer)
            torch.nn.init.zeros_(idle.self_attn.o_proj.weight)
            torch.nn.init.zeros_(idle.mlp.down_proj.weight)
            layers.append(idle)
    return with_layers(model, layers)


def noisy(model: Any, scale: float) -> Any:
    """Gaussian noise of `scale` standard deviations on every weight matrix of the layers."""
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.model.layers.parameters():
            if parameter.dim() == 2:
                spread = parameter.float().std()
                parameter += (scale * spread * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return made


def pruned(model: Any) -> Any:
    return with_layers(model, list(model.model.layers)[::2])


def with_layers(model: Any, layers: list[Any]) -> Any:
    made = copy.deepcopy(model)
    made.model.layers = torch.nn.ModuleList(copy.deepcopy(layers))
    for index, layer in enumerate(made.model.layers):
        layer.self_attn.layer_idx = index
    made.config.num_hidden_layers = len(layers)
    if getattr(made.config, "layer_types", None):
        made.config.layer_types = [made.config.layer_types[0]] * len(layers)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--copies", type=int, default=5)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    made = {
        "target": expensive_target(model, args.copies),
        "good": model,
        "noisy": noisy(model, NOISE),
        "bad": pruned(model),
    }
    for name, module in made.items():
        module.save_pretrained(args.output / name)
        tokenizer.save_pretrained(args.output / name)
        print(f"{args.output / name}: {module.config.num_hidden_layers} layers")


if __name__ == "__main__":
    main()
