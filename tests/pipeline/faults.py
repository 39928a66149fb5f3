"""Faults that only a worker process can have, brought in from outside by a `sitecustomize` module."""

from pathlib import Path

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path

def once(name):
    try:
        Path({folder!r}, name).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

if "batchspec.pipeline.executors.process" in sys.orig_argv:
    from batchspec.engine import fake
    from batchspec.engine.fake import FakeEngine
    answer, load = fake.answer, FakeEngine.load
"""


def environment_with(folder: Path, code: str) -> dict[str, str]:
    """The environment in which every worker runs `code` when it starts. `answer(request)` and `load(...)` are the fake
    engine's own; `once(name)` is true a single time over all processes."""
    folder.mkdir(parents=True, exist_ok=True)
    body = "".join(f"    {line}\n" for line in code.strip().splitlines())
    (folder / "sitecustomize.py").write_text(PREAMBLE.format(folder=str(folder)) + body)
    return {"PYTHONPATH": str(folder)}
