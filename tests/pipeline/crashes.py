"""Kills a running job again and again, at instants of every phase, and keeps count of what that cost."""

import contextlib
import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from batchspec.errors import UsageError
from batchspec.io.results import load_results
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import finished_rows, start_cli, summary_of, worker_pids

MAX_BATCH = 8
COUNT_DECODED_ROWS = """
def counted(request):
    os.write(log, b"%d\\n" % request.row_index)
    return answer(request)
fake.answer = counted
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
"""

Phase = Callable[[Path, random.Random], Callable[[], bool]]


def after_more_rows(output: Path, chance: random.Random) -> Callable[[], bool]:
    """In the midst of journaling."""
    wanted = finished_rows(output) + chance.randint(1, 300)
    return lambda: finished_rows(output) >= wanted


def while_a_file_is_temporary(output: Path, chance: random.Random) -> Callable[[], bool]:
    skipped = chance.randint(0, 5)
    seen: set[str] = set()

    def found() -> bool:
        with contextlib.suppress(FileNotFoundError):
            seen.update(os.listdir(output / "_batchspec" / "tmp"))
        return len(seen) > skipped

    return found


def just_after_a_part_appeared(output: Path, chance: random.Random) -> Callable[[], bool]:
    wanted = len(list(output.glob("part-*"))) + chance.randint(1, 3)
    return lambda: len(list(output.glob("part-*"))) >= wanted


def when_only_the_summary_is_missing(output: Path, chance: random.Random) -> Callable[[], bool]:
    return lambda: finished_rows(output) > 0 and not any((output / "_batchspec" / "journal").iterdir())


PHASES: list[Phase] = [
    after_more_rows,
    while_a_file_is_temporary,
    just_after_a_part_appeared,
    when_only_the_summary_is_missing,
]
TARGETS = ("parent", "worker", "both", "group")


def kill(run: subprocess.Popen[str], target: str) -> bool:
    """Send SIGKILL; False where there was nothing left to kill."""
    workers = worker_pids(run.pid)
    victims = {"parent": [run.pid], "worker": workers[:1], "both": [*workers[:1], run.pid], "group": [run.pid]}[target]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if target == "group" else os.kill)(pid, signal.SIGKILL)
    return bool(victims)


class Reader:
    """Polls an output as a user's job would: whatever it sees must be whole."""

    def __init__(self, output: Path, num_rows: int) -> None:
        self._output, self._num_rows = output, num_rows
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self.faults: list[str] = []
        self.parts_read = 0

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(0.02):
            try:
                for path in self._output.rglob("*.parquet"):
                    pq.read_table(path)
                    self.parts_read += 1
                with contextlib.suppress(UsageError):
                    num_rows = load_results(str(self._output), ["row_index"]).num_rows
                    if num_rows != self._num_rows:
                        self.faults.append(f"taken for finished with {num_rows} rows")
            except Exception as error:
                self.faults.append(repr(error))


@dataclass
class Crashes:
    """Runs one job after another into `folder`, with kills, until `num_kills` landed inside a job."""

    source: Path
    folder: Path
    num_rows: int
    options: tuple[str, ...] = ()
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_jobs: int = 0

    def run(self, num_kills: int) -> list[Path]:
        """The outputs of the finished jobs."""
        outputs: list[Path] = []
        while self.kills.total() < num_kills:
            outputs.append(self._run_job(num_kills))
        return outputs

    def _run_job(self, num_kills: int) -> Path:
        self.num_jobs += 1
        output = self.folder / f"out{self.num_jobs}"
        log = self.folder / f"decoded{self.num_jobs}.log"
        counting = environment_with(self.folder / f"faults{self.num_jobs}", COUNT_DECODED_ROWS.format(log=str(log)))
        max_decoded_again = 0
        finished = False
        with Reader(output, self.num_rows) as reader:
            for attempt in range(1000):
                finished, num_interrupted = self._attempt(output, attempt % 3 + 1, counting, num_kills)
                max_decoded_again += num_interrupted * MAX_BATCH
                if finished:
                    break
        assert finished
        assert reader.faults == []
        assert reader.parts_read > 0
        decoded = Counter(log.read_text().split())
        assert len(decoded) == self.num_rows
        assert decoded.total() - self.num_rows <= max_decoded_again
        return output

    def _attempt(self, output: Path, workers: int, environment: dict[str, str], num_kills: int) -> tuple[bool, int]:
        """One run, killed if it can be: whether it finished, and how many workers were interrupted at work."""
        command = ["generate", self.source, "-o", output, "--engine", "fake", "--max-batch", str(MAX_BATCH)]
        command += ["--workers", str(workers), *self.options]
        run = start_cli(*command, **environment)
        phase, target = self.chance.choice(PHASES), self.chance.choice(TARGETS)
        reached = phase(output, self.chance)
        landed = False
        while self.kills.total() < num_kills and not landed and run.poll() is None:
            if worker_pids(run.pid) and reached():
                landed = kill(run, target) and not (output / "_SUCCESS").exists()
        # The pipes close when the last worker is gone, so nothing of this attempt is left afterwards.
        stdout, stderr = run.communicate(timeout=60)
        if landed:
            self.kills[phase.__name__, target] += 1
        if run.returncode == 0:
            assert summary_of(stdout)["rows"] == self.num_rows
            return True, int(landed)
        assert run.returncode == -signal.SIGKILL, stderr
        return False, workers
