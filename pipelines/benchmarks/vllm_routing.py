"""vLLM behind batchspec: a job routed by a measured profile against its two static settings, load left out.

  .venv-vllm/bin/python pipelines/benchmarks/vllm_routing.py INPUT --profile-input OTHER --model DIR --max-batch 32

Measures the profile first where --profile names no file that exists. Prints one JSON line per run, and the ratio of
routed to the better static setting; ids are compared with those of target-only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchspec.config import NO_PROFILE, EngineConfig, InputConfig, OutputConfig, ProfileOptions, RouteConfig, RunConfig
from batchspec.io.results import load_results
from batchspec.pipeline.measuring import make_profile
from batchspec.pipeline.runner import generate
from batchspec.types import Method, SamplingParams


def run(config: RunConfig, routes: RouteConfig, folder: Path) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    figures = generate(replace(config, output=OutputConfig(output=str(folder)), routes=routes)).as_json()
    rows = load_results(str(folder), ["output_token_ids"])
    return figures, [tuple(ids) for ids in rows["output_token_ids"].to_pylist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="Parquet with a messages column")
    parser.add_argument("--profile-input", help="rows to measure on, of the same kind but not the same")
    parser.add_argument("--profile", type=Path, default=Path("vllm-profile.json"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--stride", type=int, default=1, help="take every Nth row")
    parser.add_argument("--sample-rows", type=int, default=48)
    parser.add_argument("--budget", type=float, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-arg", action="append", default=["max_model_len=4096"])
    args = parser.parse_args()
    if not args.profile.exists() and args.profile_input is None:
        parser.error(f"there is no {args.profile}: name rows to measure it on with --profile-input")
    engine = EngineConfig(
        engine="vllm",
        model=args.model,
        draft_model=args.draft_model,
        max_batch=args.max_batch,
        kv_memory_bytes=2**31,
        vllm_arg=tuple(args.vllm_arg),
    )
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens)
    if not args.profile.exists():
        measured_on = RunConfig(input=InputConfig(inputs=(args.profile_input,)), engine=engine, sampling=sampling)
        options = ProfileOptions(budget=args.budget, sample_rows=args.sample_rows)
        make_profile(measured_on, args.profile.absolute(), options, print)
    settings = {
        "target_only": RouteConfig(profile=NO_PROFILE),
        "prompt_lookup": RouteConfig(Method.PROMPT_LOOKUP, 4, profile=NO_PROFILE),
        "routed": RouteConfig(profile=str(args.profile)),
    }
    rates: dict[str, list[float]] = {name: [] for name in settings}
    with tempfile.TemporaryDirectory() as folder:
        table = pq.read_table(args.input)
        source = Path(folder) / "rows.parquet"
        pq.write_table(table.take(list(range(0, table.num_rows, args.stride))), source)
        config = RunConfig(input=InputConfig(inputs=(str(source),)), engine=engine, sampling=sampling)
        plain: list[tuple[int, ...]] = []
        for repeat in range(args.repeats):
            for name in list(settings) if repeat % 2 == 0 else list(settings)[::-1]:
                figures, ids = run(config, settings[name], Path(folder) / f"{name}-{repeat}")
                plain = plain or ids
                rate = figures["output_tokens"] / figures["decode_wall_seconds"]
                rates[name].append(rate)
                line = {"setting": name, "repeat": repeat, "output_tokens_per_second": round(rate, 1)}
                line["rows_with_other_ids"] = sum(a != b for a, b in zip(plain, ids, strict=True))
                print(json.dumps(line), flush=True)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    better = max(medians["target_only"], medians["prompt_lookup"])
    print(
        f"batch {args.max_batch}: {medians}; routed is x{medians['routed'] / better:.3f} of the better static setting"
    )


if __name__ == "__main__":
    main()
