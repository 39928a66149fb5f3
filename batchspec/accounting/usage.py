"""How full a worker was: live rows, pre-emptions, memory, and what its policy changed on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """`peak_live_sequences` is None where an engine does not report its steps; `peak_memory_bytes` is the resident
    memory of the worker's process, None where the system does not tell. `route_events` say why a class changed over."""

    peak_live_sequences: int | None = None
    num_preemptions: int = 0
    peak_memory_bytes: int | None = None
    route_events: tuple[str, ...] = ()


def combine(parts: Iterable[Usage]) -> Usage:
    """The fullest of several workers or attempts; pre-emptions and events of all."""
    parts = list(parts)
    return Usage(
        max((p.peak_live_sequences for p in parts if p.peak_live_sequences is not None), default=None),
        sum(p.num_preemptions for p in parts),
        max((p.peak_memory_bytes for p in parts if p.peak_memory_bytes is not None), default=None),
        tuple(event for p in parts for event in p.route_events),
    )
