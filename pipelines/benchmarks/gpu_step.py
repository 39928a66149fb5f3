"""The time of one engine step on a GPU, over live rows x positions x context, with random weights in real sizes.

    python pipelines/benchmarks/gpu_step.py --device cuda [--target 8b] [--draft 0.5b] [--json gpu.json]

Prints milliseconds of the target's steps of 1 and of 5 positions a row and of the draft's of 1, what attends, and the
acceptance per proposed token from which four drafted tokens a step pay. What does not fit into memory is left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from roofline import median_seconds
from transformers import AutoModelForCausalLM, LlamaConfig

from batchspec.engine import flash
from batchspec.engine.kv_cache import KVCache, blocks_for, bytes_per_block
from batchspec.engine.model import PackedModel, wrap_model
from batchspec.engine.packed import Segment

# The shapes of well-known models: layers, hidden size, heads, KV heads, MLP size, vocabulary.
SIZES = {
    "8b": (32, 4096, 32, 8, 14336, 128256),
    "0.5b": (24, 896, 14, 2, 4864, 151936),
    "tiny": (2, 64, 4, 2, 96, 512),
}
LIVE_ROWS = (1, 4, 16, 64, 256)
CONTEXTS = (1024, 4096, 16384, 32000)
DRAFTED = 4


def random_model(size: str, device: str, dtype: torch.dtype) -> PackedModel:
    layers, hidden, heads, kv_heads, mlp, vocabulary = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
    )
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    return wrap_model(size, module)


def step_seconds(model: PackedModel, rows: int, positions: int, context: int, repeats: int) -> float | None:
    """A forward and the reading of its tokens; None where the cache does not fit into what memory is free."""
    num_blocks = 1 + rows * blocks_for(context + positions)
    if num_blocks * bytes_per_block(model.layers, model.dtype) > 0.9 * free_bytes(model.device):
        return None
    kv = KVCache(model.layers, num_blocks, rows, context + positions, model.dtype, model.device)
    segments = []
    for _ in range(rows):
        slot = kv.acquire_slot()
        kv.reserve(slot, context + positions)
        segments.append(Segment(slot, [1] * positions, context, False, range(positions)))
    return median_seconds(lambda: model.forward(segments, kv).argmax(-1).tolist(), repeats)


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**30
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def attention_of(model: PackedModel) -> str:
    if model.device.type != "cuda":
        return "the CPU's kernels"
    config, layer = model.module.config, model.layers[0]
    query = torch.zeros(1, config.num_attention_heads, 1, layer.key_dim, device=model.device, dtype=model.dtype)
    key = query[:, : layer.num_kv_heads]
    variant = flash.variant_for(query, key, key, None)
    if variant is None:
        return "padded products"
    return f"{variant.kernels or 'FA2'}, {'paged' if variant.paged else 'gathered'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", choices=SIZES, default="8b")
    parser.add_argument("--draft", choices=SIZES, default="0.5b")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target, draft = (random_model(size, args.device, torch.bfloat16) for size in (args.target, args.draft))
    name = torch.cuda.get_device_name(args.device) if target.device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; target {attention_of(target)}, draft {attention_of(draft)}")
    print("  rows  context | target ms  of 5 positions  draft ms | acceptance from which 4 drafted tokens pay")
    results: list[dict[str, Any]] = []
    for context in CONTEXTS:
        for rows in LIVE_ROWS:
            one = step_seconds(target, rows, 1, context, args.repeats)
            five = step_seconds(target, rows, 1 + DRAFTED, context, args.repeats)
            drafted = step_seconds(draft, rows, 1, context, args.repeats)
            if one is None or five is None or drafted is None:
                print(f"{rows:6d} {context:8d} | does not fit into memory", flush=True)
                continue
            # a step of k drafts must yield as many times the tokens as it takes the time
            needed = ((five + DRAFTED * drafted) / one - 1) / DRAFTED
            figures = [seconds * 1e3 for seconds in (one, five, drafted)]
            print(
                f"{rows:6d} {context:8d} | {figures[0]:9.2f} {figures[1]:15.2f} {figures[2]:9.2f} | {needed:.2f}",
                flush=True,
            )
            results.append(
                {"rows": rows, "context": context, "one": one, "five": five, "draft": drafted, "acceptance": needed}
            )
    if args.json is not None:
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "steps": results}, indent=1))


if __name__ == "__main__":
    main()
