"""A job, from its configuration to its summary."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchspec.accounting.summary import JobSummary
from batchspec.config import RunConfig
from batchspec.errors import UsageError
from batchspec.io.inputs import InputSet, resolve_inputs
from batchspec.io.store import Store, open_store, storage_faults
from batchspec.io.writer import SUCCESS_NAME, commit_part
from batchspec.pipeline.attempts import Attempt, load_attempts
from batchspec.pipeline.devices import Place, device_type, worker_places
from batchspec.pipeline.finish import charge_killed_attempts, check_complete, job_summary, sum_result_rows
from batchspec.pipeline.identity import job_identity, job_versions, refuse_mismatch, samples_by_rejection
from batchspec.pipeline.interrupts import Interrupts
from batchspec.pipeline.lock import OutputLock
from batchspec.pipeline.logs import set_up_logging
from batchspec.pipeline.messages import Executor
from batchspec.pipeline.models import locate_model, locate_models, refuse_large_demo
from batchspec.pipeline.output import resolve_output
from batchspec.pipeline.plan import Manifest, json_line, load_manifest, plan, save_manifest
from batchspec.pipeline.profiling import check_profile, keep_profile, route_files
from batchspec.pipeline.resume import (
    Stock,
    clear_output,
    refuse_foreign_files,
    remove_temporary_files,
    set_error_rows_free,
    take_stock,
)
from batchspec.pipeline.session import Session
from batchspec.pipeline.shards import result_schema

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is fit to run: everything that files and options can tell has been checked."""

    config: RunConfig
    inputs: InputSet
    output: str
    places: tuple[Place, ...]
    identity: Mapping[str, Any]
    versions: Mapping[str, Any]


def run_job(config: RunConfig, started_at: float, executor: Executor, interrupts: Interrupts) -> JobSummary:
    """Answer every row of the input that is not answered yet; the summary. `started_at` (monotonic) is when metering
    began."""
    job = prepare(config)
    store = open_store(job.output)
    with storage_faults(store):
        refuse_foreign_files(store)
    with OutputLock(store) as lock:
        with storage_faults(store):
            manifest = _claim_output(store, job)
            stock = take_stock(store, manifest, deep_check="://" not in job.output)
            finished = SUCCESS_NAME in store.names("") and not stock.pending
        if finished:
            logger.info("%s is finished already: nothing to do", store.root)
            rows = sum_result_rows(store, manifest, job.config, job.inputs)
            attempts = charge_killed_attempts(store, manifest, load_attempts(store), job.config)
            return job_summary(rows, attempts, store)
        return _work(store, job, manifest, stock, started_at, executor, interrupts, lock)


def prepare(config: RunConfig) -> Job:
    """Check everything that files can tell before a model loads. Raises UsageError or a subclass."""
    output = resolve_output(config.input, config.output)
    refuse_missing_folder("--summary-file", config.output.summary_file)
    inputs = resolve_inputs(config.input)
    _ = result_schema(config, inputs).arrow  # refuses names that clash
    refuse_large_demo(config.engine, inputs.num_rows)
    places = worker_places(config)
    model_path = locate_model(config.engine)
    logger.info(
        "input: %d rows in %d files; output: %s; model: %s", inputs.num_rows, len(inputs.files), output, model_path
    )
    config = replace(config, engine=locate_models(config.engine))
    config = check_profile(config)
    identity = job_identity(config, inputs, model_path)
    if samples_by_rejection(config):
        identity |= route_files(config)
    versions = job_versions(config, device_type(places))
    return Job(config, inputs, output, places, identity, versions)


def refuse_missing_folder(option: str, file: str | None) -> None:
    """Raise UsageError where a file to be written at the end has no folder to go to."""
    if file is not None and not Path(file).expanduser().absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: its folder does not exist")


def _claim_output(store: Store, job: Job) -> Manifest:
    """The manifest of the job in this output, a new one where there was none or `--overwrite` discards it."""
    remove_temporary_files(store)
    if job.config.output.overwrite:
        clear_output(store)
    manifest = load_manifest(store)
    if manifest is None:
        manifest = plan(job.inputs, job.config.output, job.identity, job.versions)
        save_manifest(store, manifest)
        return manifest
    refuse_mismatch(
        store.root,
        manifest.identity,
        job.identity,
        manifest.versions,
        job.versions,
        job.config.run.allow_version_change,
    )
    if job.config.run.retry_errors:
        store.remove(SUCCESS_NAME)
        set_error_rows_free(store, manifest, f"{job.config.output.output_prefix}error_type")
    return manifest


def _work(
    store: Store,
    job: Job,
    manifest: Manifest,
    stock: Stock,
    started_at: float,
    executor: Executor,
    interrupts: Interrupts,
    lock: OutputLock,
) -> JobSummary:
    """Answer what is pending and write `_SUCCESS`."""
    with storage_faults(store):
        store.remove(SUCCESS_NAME)
        keep_profile(job.config, store)
    attempts = load_attempts(store)
    attempt = Attempt(
        attempt=attempts[-1].attempt + 1 if attempts else 1,
        started_at=time.time() - (time.monotonic() - started_at),
        settings=_settings(job.config),
        versions=job.versions,
        price_per_hour=job.config.run.price_per_hour,
        rows_before=stock.rows_done,
    )
    set_up_logging(f"run {manifest.run_id} attempt {attempt.attempt} parent {os.getpid()}")
    session = Session(store, manifest, attempt, job.config, job.inputs, job.places, started_at, executor)
    try:
        if manifest.num_rows:
            session.run(stock.pending, interrupts, lock)
        else:
            schema = result_schema(job.config, job.inputs).arrow
            commit_part(store, 0, schema, (), {**session.part_metadata, "shard": "0"})
        check_complete(store, manifest)
        rows = sum_result_rows(store, manifest, job.config, job.inputs)
        attempts = charge_killed_attempts(store, manifest, attempts, job.config)
        session.end("finished")
        summary = job_summary(rows, [*attempts, attempt], store)
        with storage_faults(store):
            store.write(SUCCESS_NAME, json_line(summary.as_json()).encode())
    except BaseException as error:
        session.end_early(error)
        raise
    return summary


def _settings(config: RunConfig) -> dict[str, Any]:
    """The operational settings of an attempt, for the record."""
    return {"run": asdict(config.run), "routes": asdict(config.routes), "max_batch": config.engine.max_batch}
