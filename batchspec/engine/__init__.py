"""Engines decode requests. Importing this package loads none of them."""

from __future__ import annotations

from batchspec.config import EngineConfig
from batchspec.errors import UsageError
from batchspec.types import Engine, StepAttribution

ENGINES = ("torch", "fake")


def load_engine(
    config: EngineConfig, device: str, threads: int, device_share: float, attribution: StepAttribution
) -> Engine:
    """Load `config.engine` on `device` for this process.

    `threads` is the number of CPU threads the engine may use, `device_share` the part of the device that this worker
    holds: one second of its wall clock costs that many device seconds. `attribution` splits each step's seconds among
    the rows in it.
    """
    if config.engine == "torch":
        from batchspec.engine.load import load_torch_engine

        return load_torch_engine(config, device, threads, device_share, attribution)
    if config.engine == "fake":
        from batchspec.engine.fake import FakeEngine

        return FakeEngine.load(config, device, threads, device_share, attribution)
    raise UsageError(f"--engine {config.engine!r} is not one of {', '.join(ENGINES)}")
