"""Interleaved runs of static and routed decoding on one file, in one process.

  python pipelines/benchmarks/routing.py INPUT --model DIR --profile FILE --batches 1/6,4,8,32 --repeats 3

`routed` follows --profile, `routed:OTHER` another file. Prints one JSON line per run and the ratios to target-only. A
row's ids must be the same at every setting and batch; the script exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig, InputConfig, RouteConfig, RunConfig
from batchspec.engine import load_engine
from batchspec.pipeline.measuring import readable_rows
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import static_policy
from batchspec.profile.scope import ListSource
from batchspec.profile.store import load_profile
from batchspec.types import Completion, Engine, Method, RoutePolicy, SamplingParams


def policies(args: argparse.Namespace, batch: int) -> dict[str, RoutePolicy]:
    found: dict[str, RoutePolicy] = {}
    for setting in args.settings.split(","):
        name, _, k = setting.partition(":")
        if name == "routed":
            profile = load_profile(Path(k or args.profile))
            methods = {Method.PROMPT_LOOKUP} | (
                {Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT} if args.draft_model else set()
            )
            found[setting] = MeasuredPolicy(profile, frozenset(methods), batch)
        else:
            found[setting] = static_policy(
                RouteConfig(Method(name), int(k or 0), min_match_tokens=args.min_match), args.draft_model
            )
    return found


def load(args: argparse.Namespace, batch: int) -> Engine:
    config = EngineConfig(model=args.model, draft_model=args.draft_model, dtype=args.dtype, max_batch=batch)
    return load_engine(config, args.device, args.threads, 1.0, StepAttributionRule())


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--profile")
    parser.add_argument("--settings", default="target_only,prompt_lookup:2,prompt_lookup:4,prompt_lookup:8,routed")
    parser.add_argument("--batches", default="1/6,4,8,32", help="most live rows, and which rows (/6: every sixth)")
    parser.add_argument("--request-class")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-match", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--ids", type=Path, help="file of ids by row: compared with where it exists, and kept up to date"
    )
    args = parser.parse_args()
    if args.profile is None and "routed" in args.settings.split(","):
        parser.error("the setting `routed` needs --profile")
    return args


def main() -> int:
    args = options()
    sampling = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    rows = readable_rows(RunConfig(input=InputConfig(inputs=(args.input,)), sampling=sampling))
    expected: dict[int, tuple[int, ...]] = {}  # ids by row, of whichever run decoded it first
    if args.ids and args.ids.exists():
        expected = {int(row): tuple(ids) for row, ids in json.loads(args.ids.read_text()).items()}
    faults = 0
    for spec in args.batches.split(","):
        batch, stride = (int(part) for part in [*spec.split("/"), "1"][:2])
        requests = [row for row in rows[::stride] if args.request_class in (None, row.request_class)]
        engine = load(args, batch)
        seconds: dict[str, list[float]] = {}
        for repeat in range(args.repeats):
            order = list(policies(args, batch).items())
            for setting, policy in order if repeat % 2 == 0 else reversed(order):
                engine.close()  # prompts are computed anew in every run
                started = time.perf_counter()
                done = [o for o in engine.run(ListSource(requests), policy) if isinstance(o, Completion)]
                took = time.perf_counter() - started
                seconds.setdefault(setting, []).append(took)
                differing = sum(o.token_ids != expected.setdefault(o.row_index, o.token_ids) for o in done)
                differing += len(requests) - len(done)
                faults += differing
                tokens = sum(o.output_tokens for o in done)
                steps = sum(o.stats.num_target_steps for o in done)
                figures = {
                    "setting": setting,
                    "batch": batch,
                    "repeat": repeat,
                    "rows": len(done),
                    "output_tokens": tokens,
                    "seconds": round(took, 2),
                    "output_tokens_per_second": round(tokens / took, 1),
                    "tokens_per_target_step": round(tokens / steps, 3),
                    "rows_with_other_ids": differing,
                }
                print(json.dumps(figures), flush=True)
        print_ratios(batch, seconds)
    if args.ids:
        args.ids.write_text(json.dumps(expected))
    return 1 if faults else 0


def print_ratios(batch: int, seconds: dict[str, list[float]]) -> None:
    """The median of each setting, and of its ratio to the target-only run beside it."""
    base = seconds.get("target_only")
    for setting, found in seconds.items():
        ratios = [b / s for b, s in zip(base or found, found, strict=True)]
        print(
            f"batch {batch:>3} {setting:>22}: median {statistics.median(found):7.2f} s, "
            f"x{statistics.median(ratios):.3f} of target-only ({min(ratios):.3f}-{max(ratios):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
