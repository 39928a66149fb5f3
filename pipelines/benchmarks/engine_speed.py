"""The engine on every workload, interleaved with its peers, each as a fraction of what this machine allows.

What it allows is measured before and after every run, since it changes from minute to minute; the better of the two
counts.

  python pipelines/benchmarks/engine_speed.py INPUT --model DIR [--workloads batch-32,batch-1] [--repeats 3]
    [--peers 'vllm=.venv-vllm/bin/python PEERS.py --engine vllm'] [--json FILE] [--table FILE]

A peer is a command that takes --model, --input, --batch, --max-new-tokens, --reps and --threads, and prints one JSON
line per repetition with `seconds` and `output_tokens`; only its first repetition, which meets cold caches, is taken.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from roofline import best, least_seconds, measure_machine
from transformers import AutoTokenizer
from workloads import WORKLOADS, Workload, write_workload

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig, InputConfig, RunConfig
from batchspec.engine import cpu
from batchspec.engine.load import load_torch_engine
from batchspec.engine.model import PackedModel, load_model
from batchspec.pipeline.measuring import readable_rows
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.scope import ListSource
from batchspec.types import Completion, Method, Route, SamplingParams


def run_ours(workload: Workload, path: Path, args: argparse.Namespace, shares: bool = True) -> dict[str, Any]:
    """One cold run: seconds, tokens, cached tokens; `sizes` are each row's (input, output, cached input) tokens."""
    config = EngineConfig(model=args.model, dtype="bfloat16", max_batch=workload.batch, no_shared_prefixes=not shares)
    engine = load_torch_engine(config, args.device, args.threads, 1.0, StepAttributionRule())
    sampling = SamplingParams(max_new_tokens=workload.max_new_tokens)
    rows = readable_rows(RunConfig(input=InputConfig(inputs=(str(path),)), sampling=sampling))
    started = time.perf_counter()
    done = [
        o for o in engine.run(ListSource(rows), StaticPolicy(Route(Method.TARGET_ONLY))) if isinstance(o, Completion)
    ]
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "output_tokens": sum(o.output_tokens for o in done),
        "input_tokens": sum(o.input_tokens for o in done),
        "cached_input_tokens": sum(o.cached_input_tokens for o in done),
        "sizes": [(o.input_tokens, o.output_tokens, o.cached_input_tokens) for o in done],
    }


def run_peer(command: str, workload: Workload, path: Path, model: str, threads: int) -> dict[str, Any] | None:
    """The first repetition of a peer; None where it failed."""
    arguments = ["--model", model, "--input", str(path), "--batch", str(workload.batch), "--reps", "1"]
    arguments += ["--max-new-tokens", str(workload.max_new_tokens), "--threads", str(threads)]
    done = subprocess.run([*shlex.split(command), *arguments], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(lines[0])
    return found


def measure(workload: Workload, path: Path, args: argparse.Namespace, model: PackedModel | None) -> dict[str, Any]:
    """Every contender in turn, `--repeats` times over. `model` is what the machine is measured by, if it is.

    The least time is that of our rows, with what they share computed once: also for the others."""
    contenders: dict[str, Callable[[], dict[str, Any] | None]] = {"batchspec": partial(run_ours, workload, path, args)}
    if workload.name == "shared-prefix-100":
        contenders["batchspec, reuse off"] = partial(run_ours, workload, path, args, shares=False)
    for peer in args.peers:
        name, _, command = peer.partition("=")
        contenders[name] = partial(run_peer, command, workload, path, args.model, args.threads)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    machines = [] if model is None else [measure_machine(model, args.threads)]
    for _ in range(args.repeats):
        for name, run in contenders.items():
            figures = run()
            if model is not None:
                machines.append(measure_machine(model, args.threads))
            if figures is None:
                continue
            sizes_of_run = figures.pop("sizes", None)
            if name == "batchspec":
                sizes, ours = sizes_of_run, figures
            rates = [x["output_tokens"] / x["seconds"] for x in (ours, figures)]
            found = {**figures, "engine": name, "of_the_least_time": None, "batchspec_is": rates[0] / rates[1]}
            if model is not None:
                least = least_seconds(model, best(machines[-2:]), sizes, workload.batch)
                found["of_the_least_time"] = least / figures["seconds"]
            runs[name].append(found)
            print(json.dumps({"workload": workload.name, **found}), flush=True)
    found_machines = [machine.as_json() for machine in machines]
    return {"workload": workload.name, "batch": workload.batch, "machines": found_machines, "runs": runs}


def spread(figures: Sequence[float], form: str) -> str:
    return f"{statistics.median(figures):{form}} ({min(figures):{form}}-{max(figures):{form}})"


def table(results: list[dict[str, Any]], versions: dict[str, str], threads: int) -> str:
    machines = [machine for result in results for machine in result["machines"]]
    limits = ""
    if machines:
        read = spread([m["read_bytes_per_second"] / 1e9 for m in machines], ".1f")
        products = spread([m["flops_per_second"] / 1e9 for m in machines], ".0f")
        limits = f"{read} GB/s read, {products} GFLOP/s in products of the model's shapes, {threads} threads. "
    lines = [
        f"{processor()}: {limits}" + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        "| workload | engine | seconds (spread) | output tokens/s | of the least time | batchspec is |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for name, runs in result["runs"].items():
            if not runs:
                continue
            seconds = [run["seconds"] for run in runs]
            rates = [run["output_tokens"] / run["seconds"] for run in runs]
            factor = statistics.median(run["batchspec_is"] for run in runs)
            of_least = [run["of_the_least_time"] for run in runs if run["of_the_least_time"] is not None]
            lines.append(
                f"| {result['workload']} | {name} | {spread(seconds, '.1f')} | {statistics.median(rates):.1f} | "
                f"{spread(of_least, '.2f') if of_least else ''} | {factor:.2f}x |"
            )
    return "\n".join(lines) + "\n"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="Parquet with a messages column: the prompts of the batch- workloads")
    parser.add_argument("--model", required=True)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--peers", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="the least time is known of CPUs alone")
    parser.add_argument("--json")
    parser.add_argument("--table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    versions = {name: metadata.version(name) for name in ("batchspec", "torch", "transformers")}
    results: list[dict[str, Any]] = []
    measures = args.device == "cpu" and cpu.unavailable_reason() is None
    model = load_model(Path(args.model), "bfloat16", torch.device("cpu")) if measures else None
    with tempfile.TemporaryDirectory() as folder:
        for name in args.workloads.split(","):
            path = write_workload(WORKLOADS[name], args.input, tokenizer, Path(folder))
            results.append(measure(WORKLOADS[name], path, args, model))
            text = table(results, versions, args.threads)
            if args.json:
                figures = {"processor": processor(), "threads": args.threads, "versions": versions, "results": results}
                Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
            if args.table:
                Path(args.table).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
