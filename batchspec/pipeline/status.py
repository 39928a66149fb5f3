"""How far a job is, read from its output alone: no lock, no writing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from batchspec.accounting.cost import cost_usd
from batchspec.errors import UsageError
from batchspec.io.journal import JOURNAL_FOLDER, read_journal
from batchspec.io.store import Store, open_store, storage_faults
from batchspec.io.writer import SUCCESS_NAME, is_part_name, part_name
from batchspec.pipeline.attempts import load_attempts
from batchspec.pipeline.lock import read_lock
from batchspec.pipeline.plan import Manifest, load_manifest
from batchspec.stats import ratio


@dataclass(frozen=True, slots=True)
class Status:
    """`state` is finished, running, or stopped. Rates are of the last attempt; unknown is None. `end_reason` is that of
    the last attempt, None while it runs or where it was killed."""

    output: str
    run_id: str
    state: str
    rows: int
    rows_done: int
    error_rows: int
    parts: int
    shards: int
    attempts: int
    heartbeat_age_seconds: float | None
    rows_per_second: float | None
    output_tokens_per_second: float | None
    remaining_seconds: float | None
    device_seconds: float
    cost_usd: float | None
    worker_deaths: int
    end_reason: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        shown = {name.replace("_", " "): value for name, value in asdict(self).items() if value is not None}
        return "\n".join(
            f"{name:<26}{value:.2f}" if isinstance(value, float) else f"{name:<26}{value}"
            for name, value in shown.items()
        )


def read_status(output: str) -> Status:
    """Raises UsageError where there is no job."""
    store = open_store(output)
    with storage_faults(store):
        manifest = load_manifest(store)
        if manifest is None:
            raise UsageError(f"{store.root} is not the output of a batchspec job (it has no manifest)")
        attempts = load_attempts(store)
        lock = read_lock(store)
        names = store.names("")
        rows_done = _count_rows(store, manifest, set(names))
        summary = json.loads(store.read(SUCCESS_NAME)) if SUCCESS_NAME in names else None
    last = attempts[-1] if attempts else None
    running = lock is not None and not lock.stale
    seconds = (time.time() if running else last.refreshed_at) - last.started_at if last else 0.0
    rows_per_second = ratio(last.rows, seconds) if last else None
    costs = [cost_usd(a.metered_seconds, a.price_per_hour) for a in attempts]
    known = [cost for cost in costs if cost is not None]
    return Status(
        output=store.root,
        run_id=manifest.run_id,
        state="finished" if summary else "running" if running else "stopped",
        rows=manifest.num_rows,
        rows_done=rows_done,
        error_rows=summary["error_rows"] if summary else sum(attempt.error_rows for attempt in attempts),
        parts=sum(map(is_part_name, names)),
        shards=len(manifest.shard_stops),
        attempts=len(attempts),
        heartbeat_age_seconds=lock.age_seconds if lock is not None else None,
        rows_per_second=rows_per_second,
        output_tokens_per_second=ratio(last.output_tokens, seconds) if last else None,
        remaining_seconds=ratio(manifest.num_rows - rows_done, rows_per_second or 0.0) if running else None,
        device_seconds=sum(attempt.metered_seconds for attempt in attempts),
        cost_usd=sum(known) if known and len(known) == len(costs) else None,
        worker_deaths=sum(len(attempt.worker_deaths) for attempt in attempts),
        end_reason=last.end_reason if last else None,
    )


def _count_rows(store: Store, manifest: Manifest, names: set[str]) -> int:
    """Rows in parts and in the journals of the shards that have none yet."""
    journaled = {name.partition(".")[0] for name in store.names(JOURNAL_FOLDER)}
    rows = 0
    for shard in manifest.shards:
        if part_name(shard.index) in names:
            rows += shard.num_rows
        elif f"{shard.index:05d}" in journaled:
            rows += len(read_journal(store, shard.index).records)
    return rows
