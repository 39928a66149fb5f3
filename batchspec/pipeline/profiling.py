"""Profiles in a job: measuring one, checking that it fits, and building the policy that follows it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import RunConfig
from batchspec.errors import InputError, UsageError
from batchspec.io.inputs import resolve_inputs
from batchspec.io.parser import RowParser
from batchspec.io.reader import InputReader
from batchspec.io.store import Store
from batchspec.pipeline.checks import check_config
from batchspec.pipeline.devices import device_type, worker_places
from batchspec.pipeline.identity import model_identity
from batchspec.pipeline.models import locate_models
from batchspec.profile.holdout import HoldoutPolicy
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import static_policy
from batchspec.profile.records import Profile
from batchspec.profile.show import format_profile
from batchspec.profile.store import fingerprint_differences, load_profile, refuse_stale_profile, save_profile
from batchspec.types import Method, Request, RoutePolicy

NO_PROFILE = "none"
PROFILE_COPY_NAME = "_batchspec/profile.json"

# Rows of the input that a sample is drawn from.
_MOST_ROWS_READ = 20_000


def build_policy(config: RunConfig) -> HoldoutPolicy:
    """The policy of a worker: by profile where there is one, else as the options say."""
    policy: RoutePolicy = static_policy(config.routes, config.engine.draft_model)
    if config.routes.profile != NO_PROFILE:
        profile = load_profile(Path(config.routes.profile))
        policy = MeasuredPolicy(profile, available_methods(config), config.engine.max_batch)
    return HoldoutPolicy(policy, config.run.holdout, config.sampling.seed)


def available_methods(config: RunConfig) -> frozenset[Method]:
    drafting = {Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT} if config.engine.draft_model else set()
    return frozenset({Method.PROMPT_LOOKUP, *drafting})


def check_profile(config: RunConfig) -> RunConfig:
    """The configuration with a profile that fits this run, or none.

    Models are local directories by now. Raises MismatchError naming each difference, unless `accept_stale_profile`
    says to run target-only then.
    """
    if config.routes.profile == NO_PROFILE:
        return config
    path = Path(config.routes.profile).expanduser().absolute()
    profile = load_profile(path)
    now = run_fingerprint(config)
    if config.routes.accept_stale_profile and fingerprint_differences(profile, now):
        routes = replace(config.routes, profile=NO_PROFILE, method=Method.TARGET_ONLY, routes_file=None)
        return replace(config, routes=routes)
    refuse_stale_profile(str(path), profile, now)
    return replace(config, routes=replace(config.routes, profile=str(path)))


def keep_profile(config: RunConfig, store: Store) -> None:
    """Copy the profile that an attempt is routed by into its output."""
    if config.routes.profile != NO_PROFILE:
        store.write(PROFILE_COPY_NAME, Path(config.routes.profile).read_bytes())


def run_fingerprint(config: RunConfig) -> dict[str, str]:
    """What step costs and acceptance depend on: models, dtype, kind of device, threads, libraries."""
    places = worker_places(config)
    engine = config.engine
    found = {
        "engine": engine.engine,
        "dtype": engine.dtype if engine.dtype != "auto" else _stored_dtype(Path(engine.model)),
        "device_type": device_type(places),
        "threads": str(places[0].threads),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "acceptance_rule": engine.acceptance_rule,
        "temperature": str(config.sampling.temperature),
    }
    for role, path in (("target", engine.model), ("draft", engine.draft_model)):
        identity = model_identity(Path(path)) if path else None
        found |= {f"{role}_{part}": digest[:16] for part, digest in (identity or {}).items()}
    return found


def _stored_dtype(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def make_profile(
    config: RunConfig, output: str, budget_seconds: float, sample_rows: int, if_stale: bool, say: Callable[[str], None]
) -> Profile:
    """Measure on a stratified sample of the input and write the profile. With `if_stale`, keep one that still fits."""
    from batchspec.engine import load_engine
    from batchspec.profile.measure import measure_profile, stratified

    check_config(config)
    if config.engine.engine != "torch":
        raise UsageError(f"batchspec profile measures --engine torch, not {config.engine.engine}")
    config = replace(config, engine=locate_models(config.engine))
    fingerprint = run_fingerprint(config)
    path = Path(output).expanduser().absolute()
    if if_stale and path.exists():
        existing = load_profile(path)
        if not fingerprint_differences(existing, fingerprint):
            say(f"{path} still fits: nothing measured")
            return existing
    requests = stratified(readable_rows(config), sample_rows)
    if not requests:
        raise InputError("the input has no row that could be answered, so there is nothing to measure on")
    place = worker_places(config)[0]
    say(f"loading {config.engine.model} on {place.device}, {place.threads} threads")
    engine = load_engine(config.engine, place.device, place.threads, 1.0, StepAttributionRule())
    profile = measure_profile(engine, requests, fingerprint, budget_seconds, say)  # type: ignore[arg-type]
    engine.close()
    save_profile(profile, path)
    for item in profile.skipped:
        say(f"skipped: {item}")
    say(f"wrote {os.path.relpath(path)} in {profile.measuring_seconds} s")
    return profile


def show_profile(path: str) -> str:
    """A profile file as text, with every method that it measured."""
    profile = load_profile(Path(path))
    return format_profile(profile, frozenset(Method(cell.method) for cell in profile.acceptance))


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
