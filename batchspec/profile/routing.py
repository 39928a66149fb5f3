"""The policy that a profile gives a job, by how its engine takes routes. Pure; no torch."""

from __future__ import annotations

from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.phase_routes import phase_routes
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.records import Profile
from batchspec.types import Method

# So long that loading a second engine does not matter.
LONG_JOB_ROWS = 1_000_000


def job_policy(
    profile: Profile, methods: frozenset[Method], max_batch: int, num_rows: int = LONG_JOB_ROWS
) -> StaticPolicy | MeasuredPolicy:
    """Routes of every step by live occupancy; settled for the whole job of `num_rows` rows where an engine keeps one
    route."""
    if profile.one_route_per_engine:
        return phase_routes(profile, methods, max_batch, num_rows)
    return MeasuredPolicy(profile, methods, max_batch)
