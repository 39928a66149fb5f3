"""One decode step as a Chrome trace (chrome://tracing, Perfetto): its six parts, their operators, and the gaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from batchspec.engine.engine import EngineParts, TorchEngine
from batchspec.errors import UsageError
from batchspec.types import Method, RequestSource, RoutePolicy

# Steps without prompts that are looked at for one in which the drafter proposes something.
_MOST_STEPS = 64


class TracedEngine(TorchEngine):
    """The engine with each part of its step named in the trace; draft and target forwards stand out within them."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        for part in ("_admit", "_propose", "_forward", "_accept", "_commit", "_retire"):
            setattr(self, part, _named(part.strip("_"), getattr(self, part)))

    def trace_step(self, source: RequestSource, policy: RoutePolicy, num_live: int, path: Path) -> bool:
        """Write the first step to `path` that has `num_live` rows, none of them in prefill, and a proposal where a
        route asks for one. Gives the rows up. False, with nothing written, where no step was like that."""
        try:
            num_steps = 0
            while num_steps < _MOST_STEPS:
                live = list(self.parts.scheduler.live)
                reads_prompts = not all(sequence.caught_up for sequence in live)
                num_steps += not reads_prompts
                if len(live) < num_live or reads_prompts:
                    self._step(source, policy)
                    continue
                speculates = any(policy.route(s.request_class, num_live).method is not Method.TARGET_ONLY for s in live)
                before = sum(sequence.counter.num_drafts for sequence in live)
                with profile() as trace:
                    self._step(source, policy)
                if not speculates or sum(sequence.counter.num_drafts for sequence in live) > before:
                    trace.export_chrome_trace(str(path))
                    return True
            return False
        except OSError as error:
            raise UsageError(f"--trace {path}: cannot be written: {error.strerror}") from error
        finally:
            self.close()


def _named(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*arguments: Any) -> Any:
        with record_function(f"batchspec: {name}"):
            return part(*arguments)

    return recorded
