"""Profiles in a job: finding the one to follow, checking that it fits, and building the policy that follows it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from batchspec.config import AUTO_PROFILE, NO_PROFILE, RouteConfig, RunConfig, cache_dir
from batchspec.engine.model_files import model_identity, stored_dtype
from batchspec.engine.versions import vllm_version
from batchspec.errors import UsageError
from batchspec.io.store import Store, storage_faults
from batchspec.pipeline.devices import CPU, device_type, worker_places
from batchspec.pipeline.identity import samples_by_rejection
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import StaticPolicy, static_policy
from batchspec.profile.records import Profile
from batchspec.profile.routing import job_policy
from batchspec.profile.store import fingerprint_differences, load_profile, parse_profile, refuse_stale_profile
from batchspec.types import Method, RoutePolicy, SamplingParams

logger = logging.getLogger(__name__)

PROFILE_COPY_NAME = "_batchspec/profile.json"


def job_profile(config: RunConfig) -> Profile | None:
    """The profile that routes the rows; None without one."""
    path = config.routes.profile
    return None if path in (None, NO_PROFILE) else load_profile(Path(path))


def job_routes(config: RunConfig, profile: Profile | None, num_rows: int) -> StaticPolicy | Profile:
    """What all workers of a job of `num_rows` rows route by: the profile where routes follow live occupancy, else the
    routes themselves. The parent reads their files, since workers may be on other machines."""
    if profile is None:
        return static_policy(config.routes, config.engine.draft_model)
    return profile_routes(config, profile, num_rows)


def profile_routes(config: RunConfig, profile: Profile, num_rows: int) -> StaticPolicy | Profile:
    """The profile itself, or the routes that it settles: where each needs an engine of its own, and where a row's text
    depends on its route (then by what the profile says at its own largest batch, whatever the run's is)."""
    methods, settled = available_methods(config), samples_by_rejection(config)
    if not settled and config.engine.max_batch > profile.max_batch:
        logger.warning(
            "the profile was measured up to %d live rows, and beyond it rows are decoded target-only: measure with "
            "--max-batch %d",
            profile.max_batch,
            config.engine.max_batch,
        )
    max_batch = profile.max_batch if settled else config.engine.max_batch
    policy = job_policy(profile, methods, max_batch, num_rows)
    if isinstance(policy, StaticPolicy):
        return policy
    return policy.frozen(max_batch) if settled else profile


def policy_of(config: RunConfig, routes: StaticPolicy | Profile) -> RoutePolicy:
    if isinstance(routes, Profile):
        return MeasuredPolicy(routes, available_methods(config), config.engine.max_batch)
    return routes


def route_files(config: RunConfig) -> dict[str, str | None]:
    """Digests of the files that route the rows."""
    paths = {"profile": config.routes.profile, "routes_file": config.routes.routes_file}
    return {
        name: None if path in (None, NO_PROFILE, AUTO_PROFILE) else hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for name, path in paths.items()
    }


def available_methods(config: RunConfig) -> frozenset[Method]:
    """What a profile of this run may measure and route by."""
    if config.engine.draft_model is None:
        return frozenset({Method.PROMPT_LOOKUP})
    all_drafting = frozenset(Method) - {Method.TARGET_ONLY}
    return all_drafting - {Method.LOOKUP_THEN_DRAFT} if config.engine.engine == "vllm" else all_drafting


def check_profile(config: RunConfig) -> RunConfig:
    """The configuration with a profile that fits this run, `none`, or `auto` (then it is still to be measured).

    Without --profile, --method and --routes, a profile from the cache is followed where one fits. Models are local
    directories by now. Raises MismatchError naming each difference, unless `accept_stale_profile` says to run
    target-only then.
    """
    routes = config.routes
    if routes.profile in (NO_PROFILE, AUTO_PROFILE):
        return config
    if routes.profile is None:
        return replace(config, routes=replace(routes, profile=_cached_profile(config)))
    path = Path(routes.profile).expanduser().absolute()
    profile = load_profile(path)
    now = run_fingerprint(config)
    differences = fingerprint_differences(profile, now)
    if routes.accept_stale_profile and differences:
        found = "; ".join(differences)
        logger.warning("%s was measured with something else (%s): what changed runs target-only", path, found)
        if all(line.startswith("draft_") for line in differences):  # what is known of the target alone still holds
            return replace(
                config,
                engine=replace(config.engine, draft_model=None, draft_device=None),
                routes=replace(routes, profile=str(path)),
            )
        return replace(config, routes=target_only(config))
    refuse_stale_profile(str(path), profile, now)
    return replace(config, routes=replace(routes, profile=str(path)))


def target_only(config: RunConfig) -> RouteConfig:
    return replace(config.routes, profile=NO_PROFILE, method=Method.TARGET_ONLY, routes_file=None)


def _cached_profile(config: RunConfig) -> str:
    """The profile that this machine keeps for these models and settings, or `none`."""
    if config.engine.engine == "fake" or config.routes.routes_file or config.routes.method is not Method.TARGET_ONLY:
        return NO_PROFILE
    now = run_fingerprint(config)
    try:
        path = cached_profile_path(now)
        profile = load_profile(path)
    except UsageError:
        logger.info("no profile of this model here: target-only. `batchspec profile INPUT` measures one")
        return NO_PROFILE
    if fingerprint_differences(profile, now):
        return NO_PROFILE
    logger.info("routes: by the profile measured %s (%s); --profile none turns it off", profile.created_at, path)
    return str(path)


def sampling_cell(sampling: SamplingParams) -> str:
    """How tokens are drawn, as far as acceptance depends on it."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return " ".join(f"{name}={getattr(sampling, name):g}" for name in names)


def cached_profile_path(fingerprint: Mapping[str, str]) -> Path:
    key = hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "profiles" / f"{key}.json"


def keep_profile(config: RunConfig, store: Store) -> None:
    """Copy the profile that an attempt is routed by into its output."""
    if config.routes.profile not in (NO_PROFILE, AUTO_PROFILE, None):
        store.write(PROFILE_COPY_NAME, Path(config.routes.profile).read_bytes())


def read_profile_copy(store: Store) -> Profile | None:
    """The profile that an attempt left in the output; None, with a warning where it cannot be read, without one."""
    folder, name = PROFILE_COPY_NAME.split("/")
    with storage_faults(store):
        if name not in store.names(folder):
            return None
        content = store.read(PROFILE_COPY_NAME)
    try:
        return parse_profile(content.decode(errors="replace"), f"{store.root}/{PROFILE_COPY_NAME}")
    except UsageError as error:
        logger.warning("the profile that this job was routed by cannot be read: %s", error)
        return None


def run_fingerprint(config: RunConfig) -> dict[str, str]:
    """What step costs and acceptance depend on: models, dtype, kind of device, threads, libraries."""
    places = worker_places(config)
    engine = config.engine
    found = {
        "engine": engine.engine,
        "dtype": engine.dtype if engine.dtype != "auto" else stored_dtype(Path(engine.model)),
        "device_type": device_type(places),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "acceptance_rule": engine.acceptance_rule,
        "sampling": sampling_cell(config.sampling),
        "tensor_parallel_size": str(engine.tensor_parallel_size),
    }
    if found["device_type"] == CPU:
        found["threads"] = str(places[0].threads)
    if engine.draft_model:
        found["draft_device"] = engine.draft_device or "the target's"
    if engine.engine == "vllm":
        found |= {"vllm": vllm_version(), "vllm_arg": " ".join(engine.vllm_arg)}
    for role, path in (("target", engine.model), ("draft", engine.draft_model)):
        identity = model_identity(Path(path)) if path else None
        found |= {f"{role}_{part}": digest[:16] for part, digest in (identity or {}).items()}
    return found
