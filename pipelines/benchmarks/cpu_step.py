"""The time of one engine step on CPU, over sequences x positions x context, beside the least that this machine allows.

    python pipelines/benchmarks/cpu_step.py [MODEL_DIRECTORY] [--threads 2] [--repeats 9]

The least time is that of the step's bytes (weights, K and V, logits) at the memory read rate, or of its multiplications
at the rate of large products, whichever is longer. Both rates are measured first. Without a directory the demo
model is taken.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from roofline import Machine, measure_machine, median_seconds
from roofline import step_seconds as least_step_seconds

from batchspec.engine.demo_model import demo_model_dir
from batchspec.engine.kv_cache import blocks_for
from batchspec.engine.model import PackedModel, load_model
from batchspec.engine.packed import Segment

# sequences, positions of each, tokens of context before them
STEPS = [(1, 1, 200), (1, 5, 200), (8, 1, 400), (8, 5, 400), (32, 1, 400), (32, 5, 400), (1, 1, 4000), (16, 1, 4000)]
PREFILLS = [(1, 256, 0), (1, 256, 1024), (1, 256, 3840)]


def step_seconds(model: PackedModel, shape: tuple[int, int, int], prefill: bool, repeats: int) -> float:
    num_seqs, positions, context = shape
    kv = model.new_cache(1 + num_seqs * blocks_for(context + positions), num_seqs)
    for pool in (*kv.keys, *kv.values):
        pool.normal_()
    segments = []
    for _ in range(num_seqs):
        slot = kv.acquire_slot()
        kv.reserve(slot, context + positions)
        tokens = torch.randint(model.vocab_size, (positions,)).tolist()
        segments.append(Segment(slot, tokens, context, prefill, () if prefill else range(positions)))
    return median_seconds(lambda: model.forward(segments, kv), repeats)


def least_of(model: PackedModel, machine: Machine, shape: tuple[int, int, int], prefill: bool) -> float:
    num_seqs, positions, context = shape
    rows = num_seqs * positions
    pairs = rows * (context + (positions + 1) / 2)
    return least_step_seconds(model, machine, rows, 0 if prefill else rows, pairs, num_seqs * (context + positions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    model = load_model(options.model or demo_model_dir(), "bfloat16", torch.device("cpu"))
    load_seconds = time.perf_counter() - start
    machine = measure_machine(model, options.threads, options.repeats)
    rates = f"{machine.read_bytes_per_second / 1e9:.1f} GB/s read, {machine.flops_per_second / 1e9:.0f} GFLOP/s"
    print(f"{options.threads} threads: {rates}; load {load_seconds:.1f} s")
    print("sequences positions context |  least ms    ms   fraction")
    results: list[dict[str, object]] = []
    for shape, prefill in [*((s, False) for s in STEPS), *((s, True) for s in PREFILLS)]:
        seconds = step_seconds(model, shape, prefill, options.repeats)
        least = least_of(model, machine, shape, prefill)
        note = f"  prefill, {shape[1] / seconds:.0f} tokens/s" if prefill else ""
        numbers = f"{least * 1e3:9.1f} {seconds * 1e3:6.1f} {least / seconds:9.2f}"
        print(f"{shape[0]:9d} {shape[1]:9d} {shape[2]:7d} | {numbers}{note}", flush=True)
        results.append({"shape": shape, "prefill": prefill, "seconds": seconds, "least_seconds": least})
    print(json.dumps({**machine.as_json(), "steps": results}))


if __name__ == "__main__":
    main()
