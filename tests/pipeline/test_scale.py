"""The pipeline itself at a million rows: bounded memory, and every row once, whatever the shape of the files."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.io.results import load_results
from tests.pipeline.jobs import start_cli

MAX_BYTES = 700 * 2**20


def prompts(start: int, stop: int) -> pa.Table:
    return pa.table({"prompt": [f"question number {i} of many" for i in range(start, stop)]})


def write_one_row_group(folder: Path, num_rows: int) -> Path:
    pq.write_table(prompts(0, num_rows), folder / "in.parquet", row_group_size=num_rows)
    return folder / "in.parquet"


def write_groups_of_one_row(folder: Path, num_rows: int) -> Path:
    table = prompts(0, num_rows)
    with pq.ParquetWriter(folder / "in.parquet", table.schema, compression="none", write_statistics=False) as writer:
        writer.write_table(table, row_group_size=1)
    return folder / "in.parquet"


def write_many_files(folder: Path, num_rows: int, num_files: int = 2000) -> Path:
    (folder / "in").mkdir()
    for number in range(num_files):
        rows = range(num_rows * number // num_files, num_rows * (number + 1) // num_files)
        pq.write_table(prompts(rows.start, rows.stop), folder / "in" / f"{number:05d}.parquet")
    return folder / "in"


def run_measured(source: Path, output: Path) -> tuple[dict[str, object], int, float]:
    """The summary, the most bytes that any process held, and the wall seconds."""
    started = time.monotonic()
    run = start_cli("generate", source, "-o", output, "--engine", "fake", "--workers", "2")
    peak = 0

    def watch() -> None:
        nonlocal peak
        while run.poll() is None:
            try:
                root = psutil.Process(run.pid)
                peak = max([peak, *(process.memory_info().rss for process in [root, *root.children(recursive=True)])])
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    stdout, stderr = run.communicate()
    watcher.join()
    assert run.returncode == 0, stderr
    return json.loads(stdout), peak, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_one_row_group, write_groups_of_one_row, write_many_files])
def test_a_million_rows_fit_into_bounded_memory(tmp_path: Path, write: Callable[[Path, int], Path]) -> None:
    num_rows = 1_000_000
    source = write(tmp_path, num_rows)
    summary, peak, seconds = run_measured(source, tmp_path / "out")
    decode_seconds = float(str(summary["decode_wall_seconds"]))
    print(
        f"{write.__name__}: {num_rows / seconds:.0f} rows/s ({decode_seconds / num_rows * 1e6:.0f} us a row while "
        f"decoding), at most {peak / 2**20:.0f} MiB"
    )
    assert summary["rows"] == num_rows
    assert peak < MAX_BYTES
    for index, part in enumerate(sorted((tmp_path / "out").glob("part-*.parquet"))):
        rows = pq.read_table(part, columns=["row_index"])["row_index"].to_pylist()
        assert rows == list(range(index * 2000, index * 2000 + len(rows)))


def test_a_thousand_row_groups_of_one_row_and_a_hundred_files(tmp_path: Path) -> None:
    for name, source in (
        ("groups", write_groups_of_one_row(tmp_path, 1000)),
        ("files", write_many_files(tmp_path, 1000, num_files=100)),
    ):
        summary, _, _ = run_measured(source, tmp_path / name)
        assert summary["rows"] == 1000
        assert load_results(str(tmp_path / name), ["row_index"])["row_index"].to_pylist() == list(range(1000))
