"""One attempt at work: its workers, its clock, its record, and what the user sees of it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import batchspec
from batchspec.accounting.usage import combine
from batchspec.config import AUTO_PROFILE, RunConfig
from batchspec.errors import BatchspecError
from batchspec.io.inputs import InputSet
from batchspec.io.store import Store
from batchspec.pipeline.attempts import REFRESH_SECONDS, Attempt
from batchspec.pipeline.auto import auto_profile
from batchspec.pipeline.deaths import Deaths
from batchspec.pipeline.devices import Place
from batchspec.pipeline.display import Display
from batchspec.pipeline.interrupts import Interrupts
from batchspec.pipeline.lock import OutputLock
from batchspec.pipeline.messages import Counters, Executor, Shard, WorkerSpec
from batchspec.pipeline.meter import AttemptMeter
from batchspec.pipeline.phases import Phase, plan_phases
from batchspec.pipeline.plan import Manifest, to_json
from batchspec.pipeline.profiling import job_profile, job_routes, keep_profile, route_files
from batchspec.pipeline.supervisor import Supervisor
from batchspec.pipeline.timeline import Timeline
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.records import Profile, StepCost

logger = logging.getLogger(__name__)


class Session:
    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        attempt: Attempt,
        config: RunConfig,
        inputs: InputSet,
        places: Sequence[Place],
        started_at: float,
        executor: Executor,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._attempt = attempt
        self._config = config
        self._inputs = inputs
        self._places = places
        self._executor = executor
        self._meter = AttemptMeter([place.device_share for place in places], started_at)
        self._deaths = Deaths(store, attempt.attempt, attempt.price_per_hour, config.run.max_worker_deaths)
        self._supervisors: list[Supervisor] = []
        self._phase = Phase()
        self._routes: StaticPolicy | Profile | None = None
        self._step_cost: StepCost | None = None
        self._timeline = Timeline()
        self._saved_at = 0.0
        self.part_metadata = self._part_metadata()

    def run(self, shards: Sequence[Shard], interrupts: Interrupts, lock: OutputLock) -> None:
        """Answer the rows of these shards. Raises what Supervisor.run does, OutputLocked where the lock is lost."""
        if not shards:
            return
        display = Display(self._manifest.num_rows, self._attempt.rows_before, self._attempt.price_per_hour)

        def on_tick() -> None:
            lock.check()
            self._note_progress()
            display.show(self._counters, self._meter.metered())
            if time.monotonic() - self._saved_at >= REFRESH_SECONDS:
                self._save()

        self._save()
        self._measure_profile()
        try:
            profile = job_profile(self._config)
            self._routes = job_routes(self._config, profile, self._inputs.num_rows)
            self._step_cost = None if profile is None else profile.step_cost
            phases = plan_phases(self._config, self._inputs, self._routes)
            for number, phase in enumerate(phases, start=1):
                if not shards:
                    break
                if len(phases) > 1:
                    logger.info("phase %d of %d: %s", number, len(phases), phase.title)
                shards = self._run_phase(phase, shards, interrupts, on_tick)
        finally:
            display.close()

    def _measure_profile(self) -> None:
        """With `--profile auto`, settle what the rows are routed by; its time is a line of its own."""
        if self._config.routes.profile != AUTO_PROFILE:
            return
        self._meter.lap_all("startup")
        num_rows = self._manifest.num_rows - self._attempt.rows_before
        self._config = auto_profile(self._config, self._store, num_rows)
        keep_profile(self._config, self._store)
        self.part_metadata = self._part_metadata()
        self._meter.lap_all("profile")

    def _run_phase(
        self, phase: Phase, shards: Sequence[Shard], interrupts: Interrupts, on_tick: Callable[[], None]
    ) -> list[Shard]:
        """Answer the rows of a phase; the shards that need a further one."""
        self._phase = phase
        supervisor = Supervisor(
            self._executor,
            self._new_spec,
            shards,
            self._meter.places,
            self._config.run,
            self._deaths,
            interrupts,
            on_tick,
        )
        self._supervisors.append(supervisor)
        supervisor.run()
        for place in self._meter.places:
            place.ended("idle")
        return supervisor.left_over

    def end(self, reason: str) -> None:
        """Close the books: everything after the workers was the parent's."""
        self._meter.lap_all("finalize")
        self._attempt.end_reason = reason
        self._save()

    def end_early(self, error: BaseException) -> None:
        """Close the books of an attempt that failed. The storage may be what failed, so this is allowed to as well."""
        try:
            self.end(str(error).splitlines()[0] if isinstance(error, BatchspecError) else type(error).__name__)
        except BatchspecError as fault:
            logger.warning("the record of this attempt could not be written: %s", fault)

    def _new_spec(self, worker: int, spawned_at: float) -> WorkerSpec:
        assert self._routes is not None
        place = self._places[worker]
        return WorkerSpec(
            worker=worker,
            attempt=self._attempt.attempt,
            run_id=self._manifest.run_id,
            config=self._config,
            inputs=self._inputs,
            output=self._store.root,
            device=place.device,
            threads=place.threads,
            device_share=place.device_share,
            spawned_at=spawned_at,
            part_metadata=self.part_metadata,
            routes=self._routes,
            route=self._phase.route,
            step_cost=self._step_cost,
        )

    def _part_metadata(self) -> dict[str, str]:
        """What every part says of its job, beside the engine and the attribution rule that its worker adds."""
        config = self._config
        return {
            "version": batchspec.__version__,
            "run_id": self._manifest.run_id,
            "attempt": str(self._attempt.attempt),
            "manifest_sha256": hashlib.sha256(self._manifest.to_json().encode()).hexdigest(),
            "identity": json.dumps(self._manifest.identity, sort_keys=True, ensure_ascii=False),
            "config_sha256": hashlib.sha256(to_json(asdict(config)).encode()).hexdigest(),
            "profile_sha256": route_files(config)["profile"] or "",
            "price_per_hour": json.dumps(config.run.price_per_hour),
        }

    @property
    def _counters(self) -> Counters:
        return sum((supervisor.counters for supervisor in self._supervisors), start=Counters())

    def _note_progress(self) -> None:
        counters = self._counters
        elapsed = time.time() - self._attempt.started_at
        num_in_flight = self._supervisors[-1].num_in_flight
        self._timeline.note((elapsed, counters.rows, counters.output_tokens, num_in_flight))

    def _save(self) -> None:
        attempt, supervisors = self._attempt, self._supervisors
        metered = self._meter.metered()
        attempt.metered_seconds, attempt.line_seconds = metered.total_seconds, metered.line_seconds
        attempt.worker_deaths = self._deaths.descriptions
        if supervisors:
            counters = self._counters
            attempt.rows, attempt.error_rows = counters.rows, counters.error_rows
            attempt.input_tokens, attempt.output_tokens = counters.input_tokens, counters.output_tokens
            attempt.target_steps = counters.target_steps
            attempt.row_device_seconds = counters.row_device_seconds
            admitted = [s.first_admitted_at for s in supervisors if s.first_admitted_at is not None]
            attempt.first_admitted_at = min(admitted, default=None)
            attempt.decode_wall_seconds = sum(supervisor.decode_wall_seconds for supervisor in supervisors)
            attempt.engines = [asdict(engine) for supervisor in supervisors for engine in supervisor.engines]
            attempt.timeline = self._timeline.samples
            attempt.usage = asdict(combine(supervisor.usage for supervisor in supervisors))
            attempt.holdout_pairs = [pair for supervisor in supervisors for pair in supervisor.holdout_pairs]
        attempt.save(self._store)
        self._saved_at = time.monotonic()
