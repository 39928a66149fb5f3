"""Whole jobs from and to a real S3 server."""

import json
import random
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import s3fs

from batchspec.errors import MismatchError, OutputLocked, UsageError
from batchspec.io.object_store import FLUSH_SECONDS
from batchspec.io.results import load_results
from batchspec.io.store import open_store
from batchspec.pipeline.lock import OutputLock
from batchspec.pipeline.runner import generate
from batchspec.pipeline.status import read_status
from batchspec.pipeline.worker import REPORT_SECONDS
from tests.pipeline.crashes import COUNT_DECODED_ROWS, MAX_BATCH, TARGETS, kill
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import (
    ANSWER_COLUMNS,
    WritePrompts,
    answers,
    fake_config,
    start_cli,
    wait_for,
    with_parts,
    worker_pids,
)
from tests.pipeline.threads import generate_in_threads

pytest_plugins = ["tests.s3"]


def s3_answers(output: str) -> list[dict[str, object]]:
    return load_results(output, ANSWER_COLUMNS).to_pylist()


def test_a_job_from_s3_to_s3_is_the_same_as_a_local_one(
    s3_bucket: str, write_prompts: WritePrompts, tmp_path: Path
) -> None:
    path = write_prompts([*(f"question {i}" for i in range(40)), None])
    system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    system.put(str(path), f"{s3_bucket}/data/in.parquet")
    source, output = f"{s3_bucket}/data/in.parquet", f"{s3_bucket}/answers/out"
    generate_in_threads(fake_config(path, tmp_path / "plain"))
    config = fake_config(Path("x"), workers=2)
    config = with_parts(config, input={"inputs": (source,)}, output={"output": output})
    summary = generate(config)
    assert summary.output == output
    assert s3_answers(output) == answers(tmp_path / "plain")
    assert read_status(output).state == "finished"
    names = {name.removeprefix(f"{output.removeprefix('s3://')}/") for name in system.find(output)}
    assert {name.partition("/")[0] for name in names} == {
        "part-00000.parquet",
        "part-00001.parquet",
        "part-00002.parquet",
        "_SUCCESS",
        "_batchspec",
    }
    assert not any(name.startswith("_batchspec/journal") for name in names)

    generate(config)
    with pytest.raises(MismatchError):
        generate(with_parts(config, sampling={"max_new_tokens": 1}))
    generate(with_parts(config, sampling={"max_new_tokens": 1}, output={"overwrite": True}))
    assert all(len(row["output_token_ids"] or []) <= 1 for row in s3_answers(output))
    kept = [system.cat_file(name) for name in system.find(f"{output}/_batchspec")]
    assert not any(b"a-secret-credential" in content for content in kept)


def test_no_output_beside_an_input_on_s3_unless_it_is_named(s3_bucket: str) -> None:
    with pytest.raises(UsageError, match="--output"):
        generate(with_parts(fake_config(Path("x")), input={"inputs": (f"{s3_bucket}/in.parquet",)}))


def test_retrying_error_rows_on_s3(s3_bucket: str, write_prompts: WritePrompts) -> None:
    output = f"{s3_bucket}/out"
    config = with_parts(fake_config(write_prompts(["a", None, "b"])), output={"output": output})
    generate(config)
    before = s3_answers(output)
    summary = generate(with_parts(config, run={"retry_errors": True}))
    assert s3_answers(output) == before
    attempts = load_results(output, ["attempt"])["attempt"].to_pylist()
    assert attempts == [1, 2, 1]
    assert summary.rows.job.rows == 3


def test_one_run_per_output_on_s3(s3_bucket: str) -> None:
    store = open_store(f"{s3_bucket}/out")
    with OutputLock(store) as lock:
        with pytest.raises(OutputLocked), OutputLock(store):
            pass
        content = json.loads(store.read("_batchspec/lock"))
        store.write("_batchspec/lock", json.dumps(content | {"process_started": "0"}).encode())
        with OutputLock(store), pytest.raises(OutputLocked):
            wait_for(lock.check)


@pytest.mark.parametrize(("num_kills", "num_rows"), [(1, 300), pytest.param(10, 2000, marks=pytest.mark.slow)])
def test_kills_on_s3_lose_no_row_and_repeat_at_most_a_flush_interval(
    s3_bucket: str, write_prompts: WritePrompts, tmp_path: Path, num_kills: int, num_rows: int
) -> None:
    tokens_per_second, tokens_per_row = 450, 7
    path, output = write_prompts(num_rows), f"{s3_bucket}/out"
    log = tmp_path / "decoded.log"
    counting = environment_with(tmp_path / "faults", COUNT_DECODED_ROWS.format(log=str(log)))
    generate_in_threads(fake_config(path, tmp_path / "plain"))
    store, chance = open_store(output), random.Random(3)
    system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    done_at_kills: list[set[int]] = []
    kills = num_interrupted = 0
    for attempt in range(100):
        workers = attempt % 3 + 1
        options = ["--engine", "fake", "--fake-tokens-per-second", str(tokens_per_second), "--max-batch", "8"]
        run = start_cli(
            "generate", path, "-o", output, *options, "--workers", str(workers), "--shard-rows", "100", **counting
        )
        kill_at = time.monotonic() + chance.uniform(2.0, FLUSH_SECONDS + 1)
        while kills < num_kills and run.poll() is None:
            if time.monotonic() > kill_at and worker_pids(run.pid):
                target = chance.choice([t for t in TARGETS if t != "worker"] if num_kills == 1 else TARGETS)
                kills += kill(run, target)
                if target != "worker":  # which the run survives
                    break
                num_interrupted += 1
                kill_at = time.monotonic() + chance.uniform(2.0, FLUSH_SECONDS + 1)
            time.sleep(0.01)
        _, stderr = run.communicate(timeout=120)
        if run.returncode == 0:
            break
        assert run.returncode == -9, stderr
        num_interrupted += workers
        records = [
            json.loads(line[9:])
            for name in store.names("_batchspec/journal")
            for line in store.read(f"_batchspec/journal/{name}").splitlines()
        ]
        journaled = {record["row_index"] for record in records if "row_index" in record}  # the others name suspects
        in_parts: set[int] = set()
        for name in [name for name in system.find(output) if name.endswith(".parquet")]:
            with system.open(name) as file:
                in_parts |= set(pq.read_table(file, columns=["row_index"])["row_index"].to_pylist())
        done_at_kills.append(journaled | in_parts)
    assert kills == num_kills
    decoded = Counter(log.read_text().split())
    assert len(decoded) == num_rows
    # A worker's last report, which flushes, may be a second late.
    rows_per_interval = (FLUSH_SECONDS + REPORT_SECONDS) * tokens_per_second / tokens_per_row
    assert decoded.total() - num_rows <= num_interrupted * (MAX_BATCH + rows_per_interval)
    assert s3_answers(output) == answers(tmp_path / "plain")
    attempt_of = load_results(output, ["attempt"])["attempt"].to_pylist()
    for number, done in enumerate(done_at_kills, start=1):
        assert all(attempt_of[row_index] <= number for row_index in done)
    assert store.names("_batchspec/journal") == []
