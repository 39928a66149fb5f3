"""Measuring a profile: what `batchspec profile` does, and `--profile auto` for the job at hand."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import MAX_MATCH_TOKENS, MAX_SPECULATIVE_TOKENS, ProfileOptions, RunConfig
from batchspec.errors import InputError, UsageError
from batchspec.io.inputs import InputSet, resolve_inputs
from batchspec.io.parser import RowParser
from batchspec.io.reader import InputReader
from batchspec.pipeline.checks import check_config
from batchspec.pipeline.devices import worker_places
from batchspec.pipeline.measuring_routes import measure_route_engines
from batchspec.pipeline.models import locate_models
from batchspec.pipeline.profiling import (
    available_methods,
    cached_profile_path,
    run_fingerprint,
)
from batchspec.profile.curves import depth_curves, occupancy_curves
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.records import Profile
from batchspec.profile.sample import row_shares, stratified
from batchspec.profile.scope import ListSource, Scope
from batchspec.profile.show import format_profile
from batchspec.profile.store import fingerprint_differences, load_profile, save_profile
from batchspec.types import Method, Request, Route

if TYPE_CHECKING:
    from batchspec.engine.engine import TorchEngine

logger = logging.getLogger(__name__)

# Rows of the input that a sample is drawn from, and how many of them lie together.
_MOST_ROWS_READ = 20_000
_WINDOW_ROWS = 250

Say = Callable[[str], None]


@dataclass(frozen=True)
class TraceCell:
    """The step that `--trace` writes: `live_rows` rows of a class (None: the input's first) on one static route."""

    route: Route
    live_rows: int
    request_class: str | None = None


def parse_methods(text: str) -> frozenset[Method]:
    """Methods by their names with dashes, comma-separated. Raises UsageError."""
    known = {m.option_name: m for m in Method if m is not Method.TARGET_ONLY}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--methods {', '.join(unknown)}: not among {', '.join(known)}")
    return frozenset(known[name] for name in names)


def parse_least_matches(text: str) -> tuple[int, ...]:
    """Comma-separated numbers of tokens. Raises UsageError."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= number <= MAX_MATCH_TOKENS for number in numbers):
        raise UsageError(f"--least-matches {text}: give numbers from 1 to {MAX_MATCH_TOKENS}, such as 1,2")
    return tuple(sorted(set(numbers)))


def parse_trace_cell(text: str, min_match_tokens: int) -> TraceCell:
    """`METHOD:K:LIVE_ROWS[:CLASS]`, such as `prompt-lookup:4:8:rag`. Raises UsageError."""
    method, k, live_rows, request_class = (*text.split(":", 3), None, None, None)[:4]
    known = {m.option_name: m for m in Method}
    numbers = str(k).isdecimal() and str(live_rows).isdecimal()
    if method not in known or not numbers or int(k or 0) > MAX_SPECULATIVE_TOKENS or int(live_rows or 0) < 1:
        raise UsageError(f"--trace-cell {text}: give METHOD:K:LIVE_ROWS[:CLASS], METHOD one of {', '.join(known)}")
    route = Route(known[method], int(k or 0), min_match_tokens=min_match_tokens)
    return TraceCell(route, int(live_rows or 0), request_class)


def make_profile(config: RunConfig, path: Path, options: ProfileOptions, say: Say) -> Profile:
    """Measure on a stratified sample of the input, and write the profile to `path` and to the cache. With
    `options.if_stale`, keep one that still fits. What is wrong with the options is said before anything is measured."""
    check_config(config)
    if config.engine.engine == "fake":
        raise UsageError("batchspec profile measures --engine torch and vllm: the fake one has nothing to measure")
    if config.engine.engine == "vllm" and options.trace:
        raise UsageError("--trace: a step of --engine vllm cannot be looked into")
    config = replace(config, engine=locate_models(config.engine))
    methods = _known_methods(parse_methods(options.methods), config)
    least_matches = parse_least_matches(options.least_matches)
    scope = Scope(methods, options.max_depth, least_matches, options.budget, options.job_rows)
    cell = parse_trace_cell(options.trace_cell, config.routes.min_match_tokens) if options.trace else None
    _make_folder("-o", path)
    if options.trace:
        _make_folder("--trace", Path(options.trace).expanduser().absolute())
    fingerprint = run_fingerprint(config)
    if options.if_stale and _is_fresh(path, fingerprint, config):
        say(f"{path} still fits: nothing measured")
        return load_profile(path)
    rows = readable_rows(config)
    if not rows:
        raise InputError("the input has no row that could be answered, so there is nothing to measure on")
    traced = _traced_rows(rows, cell, config) if cell else []
    place = worker_places(config)[0]

    sample, scope = stratified(rows, options.sample_rows), replace(scope, row_shares=row_shares(rows))
    if config.engine.engine == "vllm":
        profile = measure_route_engines(config.engine, place, sample, fingerprint, scope, say)
        _save(profile, path, say)
        return profile

    from batchspec.engine.load import load_torch_engine
    from batchspec.profile.measure import measure_profile

    say(f"loading {config.engine.model} on {place.device}, {place.threads} threads")
    engine = load_torch_engine(config.engine, place.device, place.threads, 1.0, StepAttributionRule())
    try:
        profile = measure_profile(engine, sample, fingerprint, scope, say)
        _save(profile, path, say)
        if cell is not None:
            _write_trace(engine, traced, cell, Path(str(options.trace)).expanduser(), say)
    finally:
        engine.close()
    return profile


def _save(profile: Profile, path: Path, say: Say) -> None:
    save_profile(profile, path)
    _keep_in_cache(profile)
    for item in profile.skipped:
        say(f"skipped: {item}")
    say(f"wrote {os.path.relpath(path)} in {profile.measuring_seconds} s")


def _make_folder(option: str, file: Path) -> None:
    """Make the folder of a file that is written after minutes of work. Raises UsageError where either cannot be."""
    if file.is_dir():
        raise UsageError(f"{option} {file}: is a folder; name the file to write")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {file}: its folder cannot be made: {error.strerror}") from error


def _is_fresh(path: Path, fingerprint: Mapping[str, str], config: RunConfig) -> bool:
    """Whether there is a profile that can be read, of these models and settings, up to this batch."""
    try:
        found = load_profile(path)
    except UsageError:
        return False
    return not fingerprint_differences(found, fingerprint) and found.max_batch >= config.engine.max_batch


def _keep_in_cache(profile: Profile) -> None:
    cached = cached_profile_path(profile.fingerprint)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, cached)
    except (OSError, UsageError) as error:
        logger.warning("the profile is not kept in the cache: %s", error)


def _known_methods(asked: frozenset[Method], config: RunConfig) -> frozenset[Method]:
    """The methods to measure: those asked for, all that are possible where none is."""
    possible = available_methods(config)
    if asked - possible:
        names = ", ".join(sorted(method.option_name for method in asked - possible))
        missing = "needs --draft-model" if config.engine.draft_model is None else "--engine vllm has no such method"
        raise UsageError(f"--methods {names}: {missing}")
    return asked or possible


def _traced_rows(rows: Sequence[Request], cell: TraceCell, config: RunConfig) -> list[Request]:
    """As many rows as the cell has live, of its class. Raises UsageError where the cell cannot be."""
    if cell.live_rows > config.engine.max_batch:
        raise UsageError(
            f"--trace-cell: {cell.live_rows} live rows are more than --max-batch {config.engine.max_batch}"
        )
    if cell.route.method not in (Method.TARGET_ONLY, *available_methods(config)):
        raise UsageError(f"--trace-cell: {cell.route.method.option_name} needs --draft-model")
    found = [row for row in rows if cell.request_class in (None, row.request_class)]
    if not found:
        raise UsageError(f"--trace-cell: the input has no row of class {cell.request_class}")
    return [replace(found[i % len(found)], row_index=i) for i in range(cell.live_rows)]


def _write_trace(engine: TorchEngine, live: Sequence[Request], cell: TraceCell, path: Path, say: Say) -> None:
    from batchspec.engine.trace import TracedEngine

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
    """The rows that can be answered: all of them, or windows spread evenly over a long input."""
    return read_rows(config)[0]


def read_rows(config: RunConfig) -> tuple[list[Request], int]:
    """The readable rows, and how many were read to find them."""
    inputs = resolve_inputs(config.input)
    parser = RowParser(config.input, config.sampling)
    rows: list[Request] = []
    num_read = 0
    with InputReader(inputs) as reader:
        for file, start, stop in _windows(inputs):
            first = inputs.files[file].first_row_index + start
            for batch in reader.iter_batches(file, start, stop - start):
                rows += [row for row in parser.parse(batch, first) if isinstance(row, Request)]
                first += batch.num_rows
                num_read += batch.num_rows
    return rows, num_read


def _windows(inputs: InputSet) -> Iterator[tuple[int, int, int]]:
    """(file, first row, end) of what is read: every window of a long input as far from the next."""
    num_windows = max(1, _MOST_ROWS_READ // _WINDOW_ROWS)
    if inputs.num_rows <= _MOST_ROWS_READ:
        yield from ((index, 0, file.num_rows) for index, file in enumerate(inputs.files))
        return
    starts = [inputs.num_rows * number // num_windows for number in range(num_windows)]
    for index, file in enumerate(inputs.files):
        for start in starts:
            first = max(start, file.first_row_index) - file.first_row_index
            end = min(start + _WINDOW_ROWS - file.first_row_index, file.num_rows)
            if first < end:
                yield index, first, end
