"""One record per attempt at a job, refreshed every few seconds: `_batchspec/attempts/<number>.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from batchspec.accounting.cost import MeteredTime
from batchspec.accounting.saving import PairSums
from batchspec.accounting.summary import AttemptTime
from batchspec.errors import MismatchError
from batchspec.io.store import Store, storage_faults
from batchspec.pipeline.plan import to_json
from batchspec.pipeline.timeline import Sample

ATTEMPTS_FOLDER = "_batchspec/attempts"
REFRESH_SECONDS = 2.0


@dataclass(slots=True)
class Attempt:
    """What an attempt is and what became of it. Times are Unix seconds; `metered_seconds` are device seconds.

    `rows_before` were done when it began; `timeline` are samples of its progress. `end_reason` is None while it runs,
    and stays so where it was killed.
    """

    attempt: int
    started_at: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    price_per_hour: float | None = None
    refreshed_at: float = 0.0
    first_admitted_at: float | None = None
    rows_before: int = 0
    rows: int = 0
    error_rows: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    target_steps: int = 0
    row_device_seconds: float = 0.0
    decode_wall_seconds: float = 0.0
    metered_seconds: float = 0.0
    line_seconds: Mapping[str, float] = field(default_factory=dict)
    engines: Sequence[Mapping[str, Any]] = ()
    worker_deaths: list[str] = field(default_factory=list)
    timeline: Sequence[Sample] = ()
    holdout_pairs: Sequence[PairSums] = ()
    usage: Mapping[str, Any] = field(default_factory=dict)
    end_reason: str | None = None

    @property
    def time(self) -> AttemptTime:
        metered = MeteredTime(self.metered_seconds, self.line_seconds)
        wall_seconds = self.refreshed_at - self.started_at
        return AttemptTime(wall_seconds, self.decode_wall_seconds, metered, self.price_per_hour)

    def save(self, store: Store) -> None:
        self.refreshed_at = time.time()
        with storage_faults(store):
            store.write(f"{ATTEMPTS_FOLDER}/{self.attempt:04d}.json", to_json(asdict(self)).encode())


def load_attempts(store: Store) -> list[Attempt]:
    """All attempts so far, oldest first."""
    attempts = []
    for name in store.names(ATTEMPTS_FOLDER):
        try:
            attempts.append(Attempt(**json.loads(store.read(f"{ATTEMPTS_FOLDER}/{name}"))))
        except (ValueError, TypeError) as error:
            raise MismatchError(f"{store.root}/{ATTEMPTS_FOLDER}/{name} is damaged: {error}") from error
    return attempts
