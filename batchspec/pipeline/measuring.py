"""Measuring a profile: what `batchspec profile` does, and `--profile auto` for the job at hand."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import MAX_SPECULATIVE_TOKENS, NO_PROFILE, ProfileOptions, RunConfig
from batchspec.errors import InputError, UsageError
from batchspec.io.inputs import resolve_inputs
from batchspec.io.parser import RowParser
from batchspec.io.reader import InputReader
from batchspec.io.store import Store, storage_faults
from batchspec.pipeline.checks import check_config
from batchspec.pipeline.devices import worker_places
from batchspec.pipeline.executors.process import die_with
from batchspec.pipeline.logs import set_up_logging
from batchspec.pipeline.models import locate_models
from batchspec.pipeline.profiling import (
    available_methods,
    cached_profile_path,
    read_profile_copy,
    run_fingerprint,
    target_only,
)
from batchspec.profile.curves import depth_curves, occupancy_curves
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.records import Profile
from batchspec.profile.scope import ListSource, Scope
from batchspec.profile.show import format_profile
from batchspec.profile.store import fingerprint_differences, load_profile, save_profile
from batchspec.types import Method, Request, Route

if TYPE_CHECKING:
    from batchspec.engine.engine import TorchEngine

logger = logging.getLogger(__name__)

# Rows of the input that a sample is drawn from.
_MOST_ROWS_READ = 20_000

# `--profile auto` measures on at least so many rows, and only where the job is this many times as long as the sample.
_LEAST_AUTO_ROWS = 12
_REPAYS = 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class TraceCell:
    """The step that `--trace` writes: `live_rows` rows of a class (None: of the sample's mix) on one static route."""

    route: Route
    live_rows: int
    request_class: str | None = None


def parse_methods(text: str) -> frozenset[Method]:
    """Methods by their names with dashes, comma-separated. Raises UsageError."""
    known = {m.value.replace("_", "-"): m for m in Method if m is not Method.TARGET_ONLY}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--methods {', '.join(unknown)}: not among {', '.join(known)}")
    return frozenset(known[name] for name in names)


def parse_trace_cell(text: str, min_match_tokens: int) -> TraceCell:
    """`METHOD:K:LIVE_ROWS[:CLASS]`, such as `prompt-lookup:4:8:rag`. Raises UsageError."""
    method, k, live_rows, request_class = (*text.split(":", 3), None, None, None)[:4]
    known = {m.value.replace("_", "-"): m for m in Method}
    numbers = str(k).isdecimal() and str(live_rows).isdecimal()
    if method not in known or not numbers or int(k or 0) > MAX_SPECULATIVE_TOKENS or int(live_rows or 0) < 1:
        raise UsageError(f"--trace-cell {text}: give METHOD:K:LIVE_ROWS[:CLASS], METHOD one of {', '.join(known)}")
    route = Route(known[method], int(k or 0), min_match_tokens=min_match_tokens)
    return TraceCell(route, int(live_rows or 0), request_class)


def make_profile(config: RunConfig, path: Path, options: ProfileOptions, say: Say) -> Profile:
    """Measure on a stratified sample of the input, and write the profile to `path` and to the cache. With
    `options.if_stale`, keep one that still fits."""
    check_config(config)
    scope = Scope(parse_methods(options.methods), options.max_depth, config.routes.min_match_tokens, options.budget)
    cell = parse_trace_cell(options.trace_cell, scope.min_match_tokens) if options.trace else None
    if config.engine.engine != "torch":
        raise UsageError(f"batchspec profile measures --engine torch, not {config.engine.engine}")
    config = replace(config, engine=locate_models(config.engine))
    fingerprint = run_fingerprint(config)
    scope = replace(scope, methods=_known_methods(scope.methods, config))
    if options.if_stale and path.exists():
        existing = load_profile(path)
        if not fingerprint_differences(existing, fingerprint):
            say(f"{path} still fits: nothing measured")
            return existing
    trace = None if cell is None else (cell, Path(str(options.trace)).expanduser())
    profile = _measure(config, fingerprint, scope, options.sample_rows, say, trace)
    cached = cached_profile_path(fingerprint)
    cached.parent.mkdir(parents=True, exist_ok=True)
    for file in (path, cached):
        save_profile(profile, file)
    for item in profile.skipped:
        say(f"skipped: {item}")
    say(f"wrote {os.path.relpath(path)} in {profile.measuring_seconds} s")
    return profile


def _known_methods(asked: frozenset[Method], config: RunConfig) -> frozenset[Method]:
    """The methods to measure: those asked for, all that are possible where none is."""
    possible = available_methods(config)
    if asked - possible:
        names = ", ".join(sorted(method.value.replace("_", "-") for method in asked - possible))
        raise UsageError(f"--methods {names}: needs --draft-model")
    return asked or possible


def _measure(
    config: RunConfig,
    fingerprint: dict[str, str],
    scope: Scope,
    sample_rows: int,
    say: Say,
    trace: tuple[TraceCell, Path] | None = None,
) -> Profile:
    from batchspec.engine.load import load_torch_engine
    from batchspec.profile.measure import measure_profile, stratified

    rows = readable_rows(config)
    if not rows:
        raise InputError("the input has no row that could be answered, so there is nothing to measure on")
    place = worker_places(config)[0]
    say(f"loading {config.engine.model} on {place.device}, {place.threads} threads")
    engine = load_torch_engine(config.engine, place.device, place.threads, 1.0, StepAttributionRule())
    profile = measure_profile(engine, stratified(rows, sample_rows), fingerprint, scope, say)
    if trace is not None:
        _write_trace(engine, rows, *trace, say)
    engine.close()
    return profile


def _write_trace(engine: TorchEngine, rows: Sequence[Request], cell: TraceCell, path: Path, say: Say) -> None:
    from batchspec.engine.trace import TracedEngine

    rows = [row for row in rows if cell.request_class in (None, row.request_class)]
    if not rows:
        raise UsageError(f"--trace-cell: the input has no row of class {cell.request_class}")
    if cell.live_rows > engine.info.max_batch:
        raise UsageError(f"--trace-cell: {cell.live_rows} live rows are more than --max-batch {engine.info.max_batch}")
    live = [replace(rows[i % len(rows)], row_index=i) for i in range(cell.live_rows)]
    written = TracedEngine(engine.parts).trace_step(ListSource(live), StaticPolicy(cell.route), len(live), path)
    say(f"wrote {path}: open it in chrome://tracing or Perfetto" if written else "no step proposed anything: no trace")


def show_profile(path: str, image: str | None = None) -> str:
    """A profile file as text, with every method that it measured; its curves go to `image` where that is given."""
    from batchspec.report.profile_image import write_image

    profile = load_profile(Path(path))
    methods = frozenset(Method(cell.method) for cell in profile.acceptance)
    if image is not None:
        by_depth = depth_curves(profile, methods, sorted({1, profile.max_batch}))
        write_image(Path(image).expanduser(), by_depth, occupancy_curves(profile, methods))
    return format_profile(profile, methods)


def readable_rows(config: RunConfig) -> list[Request]:
    """The rows that can be answered, from the start of the input."""
    inputs = resolve_inputs(config.input)
    reader, parser = InputReader(inputs), RowParser(config.input, config.sampling)
    rows: list[Request] = []
    for index, file in enumerate(inputs.files):
        first = file.first_row_index
        for batch in reader.iter_batches(index, 0, file.num_rows):
            rows += [row for row in parser.parse(batch, first) if isinstance(row, Request)]
            first += batch.num_rows
            if len(rows) >= _MOST_ROWS_READ:
                return rows
    return rows


def auto_profile(config: RunConfig, store: Store, num_rows: int) -> RunConfig:
    """The configuration of a job with `--profile auto`: with the profile that an earlier attempt left in the output,
    else with one that is measured now if the `num_rows` that are left repay it, else target-only."""
    fingerprint = run_fingerprint(config)
    path = cached_profile_path(fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage_faults(store):
        kept = read_profile_copy(store)
    if kept is not None:
        path.write_text(kept)
    if kept is not None and not fingerprint_differences(load_profile(path), fingerprint):
        logger.info("routes: by the profile that this job measured before")
        return replace(config, routes=replace(config.routes, profile=str(path)))
    sample_rows = min(ProfileOptions().sample_rows, num_rows // _REPAYS)
    if sample_rows < _LEAST_AUTO_ROWS:
        logger.info("%d rows are too few to repay measuring a profile: target-only", num_rows)
        return replace(config, routes=target_only(config))
    logger.info("--profile auto: measuring on %d rows", sample_rows)
    code = _in_own_process(config, path, sample_rows)
    if code:
        logger.warning("measuring a profile failed (exit code %d): target-only", code)
        return replace(config, routes=target_only(config))
    return replace(config, routes=replace(config.routes, profile=str(path)))


def _in_own_process(config: RunConfig, path: Path, sample_rows: int) -> int:
    """Measure in a process that gives its memory back, and that ends with this one; its exit code."""
    job = pickle.dumps((config, path, sample_rows, os.getpid()))
    process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE)
    try:
        process.communicate(job)
        return process.returncode
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """Measure what standard input says; signals are for the parent to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config, path, sample_rows, parent_pid = pickle.loads(sys.stdin.buffer.read())
    die_with(parent_pid)
    set_up_logging("profile")
    config = replace(config, routes=replace(config.routes, profile=NO_PROFILE))
    make_profile(config, path, ProfileOptions(sample_rows=sample_rows), logger.info)
    return 0


if __name__ == "__main__":
    sys.exit(main())
