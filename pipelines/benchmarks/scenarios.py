"""Does routing keep its promises where a job is not even? Each scenario prints JSON lines and its ratio.

  python pipelines/benchmarks/scenarios.py drift INPUT --model DIR --profile FILE --batch 4
  python pipelines/benchmarks/scenarios.py tail  INPUT --model DIR --profile FILE --batch 32
  python pipelines/benchmarks/scenarios.py grid  INPUT --model DIR --profile FILE

drift: a class whose second half writes random numbers: throughput on that half, routed against target-only.
tail: 40 rows, one of which writes far longer than the others: wall clock, routed against target-only.
grid: tokens per second by class, method, draft length and live rows, beside what the profile predicts.
budget: live rows where answers of 60 tokens were allowed 2,048, against 64.
sampled: tokens per second at temperature 0.8 and top-p 0.95, against greedy.
waste: the share of the live rows' KV blocks that holds no token, and what is kept of prompts beside them.
lookup: what prompt lookup costs a row in a step, by length of context.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig, InputConfig, RunConfig
from batchspec.engine.engine import TorchEngine
from batchspec.engine.kv_cache import BLOCK_TOKENS
from batchspec.engine.load import load_torch_engine
from batchspec.ngrams import NgramIndex, continuation
from batchspec.pipeline.measuring import readable_rows
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.predict import predict_seconds
from batchspec.profile.records import ClassSample, Profile
from batchspec.profile.scope import ListSource
from batchspec.profile.store import load_profile
from batchspec.types import Completion, Engine, Method, Request, Route, RoutePolicy, SamplingParams, StepReport
from batchspec.workload import label_of

PREDICTABLE = "translation"
LONG_ANSWER_TOKENS = 1500


def decode(engine: Engine, rows: Sequence[Request], policy: RoutePolicy) -> tuple[float, list[Completion]]:
    engine.close()  # prompts are computed anew in every run
    started = time.perf_counter()
    done = [o for o in engine.run(ListSource(rows), policy) if isinstance(o, Completion)]
    return time.perf_counter() - started, sorted(done, key=lambda o: o.row_index)


def target_only() -> StaticPolicy:
    return StaticPolicy(Route(Method.TARGET_ONLY))


def routed(profile: Profile, batch: int) -> MeasuredPolicy:
    return MeasuredPolicy(profile, frozenset({Method.PROMPT_LOOKUP}), batch)


def load(args: argparse.Namespace, batch: int) -> TorchEngine:
    config = EngineConfig(model=args.model, max_batch=batch)
    return load_torch_engine(config, "cpu", args.threads, 1.0, StepAttributionRule())


def show(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def report_ratios(name: str, pairs: Sequence[tuple[float, float]]) -> None:
    ratios = [plain / with_routes for plain, with_routes in pairs]
    print(f"{name}: x{statistics.median(ratios):.3f} of target-only ({min(ratios):.3f}-{max(ratios):.3f})", flush=True)


def drift(args: argparse.Namespace, rows: list[Request], profile: Profile) -> None:
    """The policy lives through both halves; only the broken one is timed against target-only."""
    engine = load(args, args.batch)
    whole = [row for row in rows if label_of(row.request_class) == PREDICTABLE]
    broken = [random_numbers(row, args.max_new_tokens, number) for number, row in enumerate([*whole, *whole])]
    pairs = []
    for repeat in range(args.repeats):
        policy = routed(profile, args.batch)
        decode(engine, whole, policy)
        before = len(policy.events)
        order = ["routed", "target_only"] if repeat % 2 else ["target_only", "routed"]
        took = {}
        for name in order:
            took[name], done = decode(engine, broken, policy if name == "routed" else target_only())
            proposed = sum(o.stats.num_draft_tokens for o in done)
            accepted = sum(o.stats.num_accepted_tokens for o in done)
            show(scenario="drift", setting=name, seconds=round(took[name], 2), proposed=proposed, accepted=accepted)
        show(scenario="drift", events=policy.events[before:])
        pairs.append((took["target_only"], took["routed"]))
    report_ratios("drift, broken half", pairs)


def random_numbers(row: Request, num_tokens: int, seed: int) -> Request:
    """A row of the same class that asks for numbers drawn at random: what was said before matches often, and tells
    nothing of what follows."""
    chooser = random.Random(seed)
    numbers = " ".join(str(chooser.randrange(10, 100)) for _ in range(150))
    messages = [{"role": "user", "content": f"Go on with more random numbers, nothing else: {numbers}"}]
    sampling = SamplingParams(num_tokens, num_tokens, temperature=1.5, seed=seed)
    return replace(row, row_index=seed, messages=messages, sampling=sampling)


def tail(args: argparse.Namespace, rows: list[Request], profile: Profile) -> None:
    engine = load(args, args.batch)
    short = [replace(row, sampling=replace(row.sampling, max_new_tokens=48)) for row in rows[:40]]
    question = [{"role": "user", "content": "Count from one to five hundred, one number on each line."}]
    sampling = SamplingParams(max_new_tokens=LONG_ANSWER_TOKENS, min_new_tokens=LONG_ANSWER_TOKENS)
    short[20] = Request(20, messages=question, request_class=short[20].request_class, sampling=sampling)
    pairs = []
    for repeat in range(args.repeats):
        took = {}
        for name in ["routed", "target_only"] if repeat % 2 else ["target_only", "routed"]:
            policy = routed(profile, args.batch) if name == "routed" else target_only()
            took[name], done = decode(engine, short, policy)
            longest = max(done, key=lambda o: o.output_tokens)
            per_step = round(longest.stats.tokens_per_target_step(longest.output_tokens) or 0.0, 2)
            show(scenario="tail", setting=name, seconds=round(took[name], 2), tokens_per_step_of_the_long_row=per_step)
        pairs.append((took["target_only"], took["routed"]))
    report_ratios("tail", pairs)


def grid(args: argparse.Namespace, rows: list[Request], profile: Profile) -> None:
    """Predicted on the rows' own lengths, so that the error is the cost model's and acceptance's alone."""
    labels = [sample.request_class for sample in profile.samples]
    errors = []
    for batch, num_rows in ((1, 3), (4, 8), (8, 16), (32, 16)):
        engine = load(args, batch)
        for label in labels:
            chosen = [row for row in rows if label_of(row.request_class) == label][:num_rows]
            for method, k in [(Method.TARGET_ONLY, 0), *((Method.PROMPT_LOOKUP, k) for k in (2, 4, 8))]:
                route = Route(method, k)
                seconds, done = decode(engine, chosen, StaticPolicy(route))
                sample = ClassSample(label, tuple(o.input_tokens for o in done), tuple(o.output_tokens for o in done))
                predicted = predict_seconds(profile, [sample], StaticPolicy(route).route, batch)
                errors.append(abs(predicted / seconds - 1))
                tokens = sum(sample.output_tokens)
                show(
                    request_class=label,
                    method=method.value,
                    k=k,
                    batch=batch,
                    measured=round(tokens / seconds, 1),
                    predicted=round(tokens / predicted, 1),
                    error=round(predicted / seconds - 1, 3),
                )
    errors.sort()
    median, most = statistics.median(errors), errors[-len(errors) // 10]
    print(f"{len(errors)} cells: median error {median:.1%}, 90 % below {most:.1%}")


def budget(args: argparse.Namespace, rows: list[Request]) -> None:
    """The same answers of about 60 tokens, once with a budget of 64 and once with one of 2,048, in a small KV cache."""
    kv_memory_bytes = 320 * 2**20
    config = EngineConfig(model=args.model, max_batch=32, kv_memory_bytes=kv_memory_bytes)
    engine = load_torch_engine(config, "cpu", args.threads, 1.0, StepAttributionRule())
    short = [replace(row, sampling=replace(row.sampling, max_new_tokens=64)) for row in rows]
    _, done = decode(engine, short, target_only())
    endings = {o.row_index: engine.parts.decoder.text(o.token_ids[-6:]) for o in done if len(o.token_ids) == 64}
    generous = [
        replace(r, sampling=replace(r.sampling, max_new_tokens=2048, stop=(endings[r.row_index],)))
        for r in short
        if endings.get(r.row_index, "").strip()
    ]
    kept = {row.row_index for row in generous}
    live = {}
    for name, chosen in (("64", [r for r in short if r.row_index in kept]), ("2048", generous)):
        seconds, done = decode(engine, chosen, target_only())
        tokens = sum(o.output_tokens for o in done)
        live[name] = sum(o.mean_live_sequences * o.output_tokens for o in done) / tokens
        show(
            scenario="budget",
            budget=name,
            rows=len(done),
            output_tokens=tokens,
            seconds=round(seconds, 2),
            mean_live_rows=round(live[name], 2),
            preemptions=engine.parts.scheduler.num_preemptions,
        )
    print(f"budget: {live['2048'] / live['64']:.3f} of the live rows")


def sampled(args: argparse.Namespace, rows: list[Request]) -> None:
    engine = load(args, args.batch)
    drawn = [replace(r, sampling=replace(r.sampling, temperature=0.8, top_p=0.95)) for r in rows]
    ratios = []
    for repeat in range(args.repeats):
        rates = {}
        for name in ["sampled", "greedy"] if repeat % 2 else ["greedy", "sampled"]:
            seconds, done = decode(engine, drawn if name == "sampled" else rows, target_only())
            rates[name] = sum(o.output_tokens for o in done) / seconds
            show(scenario="sampled", setting=name, tokens_per_second=round(rates[name], 1))
        ratios.append(rates["sampled"] / rates["greedy"])
    print(f"sampled: x{statistics.median(ratios):.3f} of greedy ({min(ratios):.3f}-{max(ratios):.3f})")


def waste(args: argparse.Namespace, rows: list[Request]) -> None:
    engine = load(args, args.batch)
    scheduler, kv = engine.parts.scheduler, engine.parts.kv

    class Watched(StaticPolicy):
        num_tokens = num_places = num_kept = 0

        def observe(self, step: StepReport) -> None:
            Watched.num_tokens += sum(sequence.num_computed for sequence in scheduler.live)
            held = set(kv.block_tables[kv.block_tables > 0].tolist())
            Watched.num_places += np.count_nonzero(kv.block_tables) * BLOCK_TOKENS
            Watched.num_kept += len(set(scheduler.prefixes.kept_blocks) - held) * BLOCK_TOKENS

    decode(engine, rows, Watched(Route(Method.TARGET_ONLY)))
    kept = Watched.num_kept / Watched.num_places
    print(f"waste: {1 - Watched.num_tokens / Watched.num_places:.1%} of the live rows' KV blocks hold no token")
    print(f"kept of prompts for rows to come: {kept:.1%} as many blocks as live rows have")


def lookup(args: argparse.Namespace, rows: list[Request]) -> None:
    """Seconds of one step of prompt lookup with one new token, at 200 and at 8,000 tokens of context: where every
    token has been seen often (as many places to look at in both), and where a short context hardly ever matches."""
    chooser = random.Random(0)
    for text, vocabulary in (("repetitive", 3), ("varied", 50)):
        median = {}
        for context in (200, 8000):
            index, tokens = NgramIndex(2), [chooser.randrange(vocabulary) for _ in range(context)]
            index.extend(tokens)
            took = []
            for _ in range(200):
                tokens.append(chooser.randrange(vocabulary))
                started = time.perf_counter()
                index.extend(tokens)
                match = index.longest_match(tokens)
                if match is not None:
                    continuation(tokens, match.follower, 8)
                took.append(time.perf_counter() - started)
            median[context] = statistics.median(took)
            show(scenario="lookup", text=text, context_tokens=context, microseconds=round(median[context] * 1e6, 2))
        print(f"lookup, {text} text: {median[8000] / median[200]:.3f} of the cost at 200 tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=[*BY_PROFILE, *WITHOUT_PROFILE])
    parser.add_argument("input")
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, help="needed by drift, tail and grid")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens)
    rows = readable_rows(RunConfig(input=InputConfig(inputs=(args.input,)), sampling=sampling))
    if args.scenario in WITHOUT_PROFILE:
        WITHOUT_PROFILE[args.scenario](args, rows)
        return
    if args.profile is None:
        parser.error(f"{args.scenario} needs --profile")
    BY_PROFILE[args.scenario](args, rows, load_profile(args.profile))


BY_PROFILE = {"drift": drift, "tail": tail, "grid": grid}
WITHOUT_PROFILE = {"budget": budget, "sampled": sampled, "waste": waste, "lookup": lookup}


if __name__ == "__main__":
    main()
