"""`batchspec report`: collects the records of finished outputs for `report/`, and writes what it makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchspec.accounting.saving import net_of
from batchspec.errors import BatchspecError, UsageError
from batchspec.io.results import class_column
from batchspec.io.store import Store, open_store, storage_faults
from batchspec.io.writer import SUCCESS_NAME, part_name
from batchspec.pipeline.attempts import Attempt, load_attempts
from batchspec.pipeline.plan import Manifest, load_manifest
from batchspec.pipeline.profiling import PROFILE_COPY_NAME
from batchspec.pipeline.verify import AUDIT_NAME
from batchspec.report.compare import compare
from batchspec.report.numbers import describe
from batchspec.report.run import Run, read_rows


def report_numbers(outputs: Sequence[str]) -> dict[str, Any]:
    """The numbers of finished outputs: `runs`, and `comparison` where there are several. Strict JSON."""
    runs = [describe(load_run(output)) for output in outputs]
    return {"runs": runs, "comparison": compare(runs)}


def load_run(output: str) -> Run:
    """Raises UsageError where there is no finished job."""
    store = open_store(output)
    with storage_faults(store):
        manifest = load_manifest(store)
        if manifest is None:
            raise UsageError(f"{store.root} is not the output of a batchspec job (it has no manifest)")
        if SUCCESS_NAME not in store.names(""):
            raise UsageError(f"{store.root} has no {SUCCESS_NAME}: its job has not finished (`batchspec status` it)")
        summary = json.loads(store.read(SUCCESS_NAME))
        attempts = load_attempts(store)
        audit, profile = (_read_json(store, name) for name in (AUDIT_NAME, PROFILE_COPY_NAME))
        with store.open(part_name(0)) as part:
            schema = pq.read_schema(part)
    if audit is not None and summary.get("saving"):
        summary["saving"] = net_of(summary["saving"], summary["device_seconds"], audit["device_seconds"])
    columns = manifest.identity["columns"]
    rows, acceptance = read_rows(store.root, columns["output_prefix"], class_column(schema, columns))
    return Run(
        output=store.root,
        run_id=manifest.run_id,
        created_at=manifest.created_at,
        summary=summary,
        attempts=[asdict(attempt) for attempt in attempts],
        settings=_settings(manifest, attempts),
        audit=audit,
        profile=profile,
        rows=rows,
        acceptance=acceptance,
    )


def write_html(numbers: Mapping[str, Any], path: str) -> None:
    """Write the report as one page. Raises MissingDependencyError without the extra, BatchspecError on a disk fault."""
    from batchspec.report.page import render

    page = render(numbers)
    try:
        Path(path).expanduser().write_text(page, encoding="utf-8")
    except OSError as error:
        raise BatchspecError(f"cannot write --html {path}: {error.strerror}") from error


def _read_json(store: Store, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(store.read(name))
    except FileNotFoundError:
        return None
    return found


def _settings(manifest: Manifest, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """What a reader compares runs by: of the job, and of its last attempt."""
    identity, last = manifest.identity, attempts[-1] if attempts else None
    engine = last.engines[0] if last and last.engines else {}
    settings = last.settings if last else {}
    return {
        "model": engine.get("model"),
        "draft model": engine.get("draft_model"),
        "dtype": engine.get("dtype"),
        "device": manifest.versions.get("device_type"),
        "workers": len(last.engines) if last else None,
        "batch": settings.get("max_batch"),
        "method": settings.get("routes", {}).get("method"),
        "routes": settings.get("routes", {}).get("routes_file"),
        "temperature": identity["sampling"]["temperature"],
        "max new tokens": identity["sampling"]["max_new_tokens"],
        "input rows": manifest.num_rows,
        "price per hour": last.price_per_hour if last else None,
        **{name: version for name, version in manifest.versions.items() if name != "device_type"},
    }
