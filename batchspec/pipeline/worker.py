"""A worker: one engine on one device, fed with shards by the parent. The same function runs under every executor."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace

from batchspec.accounting.cost import StepAttributionRule
from batchspec.engine import SelectiveEngine, load_engine
from batchspec.errors import BatchspecError
from batchspec.pipeline.collection import uncollected
from batchspec.pipeline.feed import ShardFeed
from batchspec.pipeline.messages import Failed, Finished, Link, Ready, Report, WorkerSpec
from batchspec.pipeline.profiling import policy_of
from batchspec.pipeline.shards import ShardBook
from batchspec.pipeline.watch import WatchedPolicy
from batchspec.profile.holdout import HoldoutPolicy
from batchspec.profile.predict import attribution_rule
from batchspec.types import Engine, EngineInfo, Request

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0


def run_worker(spec: WorkerSpec, link: Link) -> None:
    """Answer rows until the parent says that no more will come. Every fault becomes a Failed message.

    Raises OSError or EOFError where the parent is gone: then there is nobody left to tell.
    """
    try:
        Worker(spec, link).run()
    except (EOFError, ConnectionError):
        raise
    except BatchspecError as error:
        link.send(Failed(str(error), traceback.format_exc(), error.exit_code))
    except Exception as error:
        link.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))


class Worker:
    def __init__(self, spec: WorkerSpec, link: Link) -> None:
        self._spec = spec
        self._link = link
        self._output_seconds = 0.0
        self._closing_seconds = 0.0
        self._load_seconds = 0.0
        self._decoding = False
        self._last_retired_at: float | None = None

    def run(self) -> None:
        spec = self._spec
        engine_config = spec.config.engine
        sampling, run = spec.config.sampling, spec.config.run
        holdout = HoldoutPolicy(policy_of(spec.config, spec.routes), run.holdout, sampling.seed)
        self._policy = WatchedPolicy(holdout)
        cost = spec.step_cost
        attribution = StepAttributionRule() if cost is None else attribution_rule(cost, engine_config.max_batch)
        with uncollected():
            engine = load_engine(engine_config, spec.device, spec.threads, spec.device_share, attribution, spec.route)
        # The process's start and the imports: what passed before the engine's own clock ran.
        until_now = (time.monotonic() - spec.spawned_at) * spec.device_share
        self._load_seconds = until_now - sum(engine.metered_seconds.values())
        info = engine.info
        logger.info("%s %s on %s, max batch %d", info.engine, info.dtype, info.device, info.max_batch)
        for note in info.notes:
            logger.warning("%s", note)
        book = ShardBook(spec, {**spec.part_metadata, **_engine_metadata(info, attribution.rule)})
        feed = ShardFeed(self._link, book, spec, info.max_batch, self._rows_served(engine))
        self._link.send(Ready(info))
        stopped = threading.Event()
        reporter = threading.Thread(target=self._report_regularly, args=(engine, feed, book, stopped), daemon=True)
        reporter.start()
        try:
            self._decode(engine, feed)
        finally:
            started = time.monotonic()
            stopped.set()
            reporter.join()
            book.close()
            feed.close()
            self._closing_seconds = (time.monotonic() - started) * spec.device_share
        pairs = tuple((*pair.held, *pair.beside) for pair in holdout.pairs)
        self._link.send(Finished(replace(self._report(engine, feed), holdout_pairs=pairs)))
        engine.close()

    def _rows_served(self, engine: Engine) -> Callable[[Request], bool]:
        if isinstance(engine, SelectiveEngine):
            return lambda request: engine.serves(request, self._policy)
        return lambda request: True

    def _decode(self, engine: Engine, feed: ShardFeed) -> None:
        """Run the engine over the feed. What is done with an outcome is metered as output, not as the engine's idle."""
        outcomes = engine.run(feed, self._policy)
        while True:
            self._decoding = True
            outcome = next(outcomes, None)
            self._decoding = False
            if outcome is None:
                return
            started = time.monotonic()
            self._last_retired_at = time.time()
            feed.finish(outcome)
            self._output_seconds += (time.monotonic() - started) * self._spec.device_share

    def _report_regularly(self, engine: Engine, feed: ShardFeed, book: ShardBook, stopped: threading.Event) -> None:
        while not stopped.wait(REPORT_SECONDS):
            try:
                book.flush_if_due()
            except OSError as error:  # nothing is lost yet: the next append or flush tries again
                logger.warning("the journal could not be sent: %s", error)
            try:
                self._link.send(self._report(engine, feed))
            except OSError:
                os._exit(1)  # the parent is gone, and the main thread may be deep in a step

    def _report(self, engine: Engine, feed: ShardFeed) -> Report:
        lines = dict(engine.metered_seconds)
        lines["load"] = lines.get("load", 0.0) + self._load_seconds
        lines["idle"] = lines.get("idle", 0.0) - self._output_seconds
        lines["output"] = self._output_seconds + self._closing_seconds
        return Report(
            at=time.monotonic(),
            lines=lines,
            counters=feed.counters,
            decoding=self._decoding and feed.num_in_flight > 0,
            first_admitted_at=feed.first_admitted_at,
            last_retired_at=self._last_retired_at,
            usage=self._policy.usage,
        )


def _engine_metadata(info: EngineInfo, attribution_rule: str) -> Mapping[str, str]:
    """What a part says of the engine that decoded most of it (rows name their attempt, attempts their engines)."""
    return {
        "engine": json.dumps(
            {
                "engine": info.engine,
                "model": info.model,
                "draft_model": info.draft_model,
                "dtype": info.dtype,
                "device": info.device,
                "max_batch": info.max_batch,
                "batch_invariant": info.batch_invariant,
                "versions": dict(info.versions),
            },
            sort_keys=True,
        ),
        "attribution_rule": attribution_rule,
    }
