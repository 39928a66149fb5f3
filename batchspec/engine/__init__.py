"""Engines decode requests. Importing this package loads none of them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from batchspec.config import EngineConfig
from batchspec.errors import UsageError
from batchspec.types import Engine, Method, Request, Route, RoutePolicy, StepAttribution

ENGINES = ("torch", "vllm", "fake")


@runtime_checkable
class SelectiveEngine(Protocol):
    """An engine that serves the rows of one route alone."""

    def serves(self, request: Request, policy: RoutePolicy) -> bool:
        """Whether this engine is the one for the row. Others are not to be given to it."""
        ...


def import_engine(engine: str) -> None:
    """Import what loading this engine will need, ahead of time. vLLM itself is not: it reads settings as it is."""
    if engine == "torch":
        from batchspec.engine.transformers_import import import_transformers

        import_transformers()
        from batchspec.engine import load  # noqa: F401
    elif engine == "vllm":
        from batchspec.engine import vllm_load  # noqa: F401


def load_engine(
    config: EngineConfig,
    device: str,
    threads: int,
    device_share: float,
    attribution: StepAttribution,
    route: Route | None = None,
) -> Engine:
    """Load `config.engine` on `device` for this process.

    `threads` is the number of CPU threads the engine may use, `device_share` the part of the device that this worker
    holds: one second of its wall clock costs that many device seconds. `attribution` splits each step's seconds among
    the rows in it. `route` is the one that a SelectiveEngine will serve.
    """
    if config.engine == "torch":
        from batchspec.engine.load import load_torch_engine

        return load_torch_engine(config, device, threads, device_share, attribution)
    if config.engine == "vllm":
        from batchspec.engine.vllm_load import load_vllm_engine

        target_only = Route(Method.TARGET_ONLY)
        return load_vllm_engine(config, route or target_only, device, device_share, attribution)
    if config.engine == "fake":
        from batchspec.engine.fake import FakeEngine

        return FakeEngine.load(config, device, threads, device_share, attribution)
    raise UsageError(f"--engine {config.engine!r} is not one of {', '.join(ENGINES)}")
