"""A job with vLLM: its routes in phases, and a killed worker leaves nothing behind."""

import os
import signal
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.io.results import load_results
from tests.pipeline.jobs import WritePrompts, finished_rows, start_cli, summary_of, wait_for, worker_pids

ROUTES = '["*"]\nmethod = "target-only"\n[repeat]\nmethod = "prompt-lookup"\nnum_speculative_tokens = 4\n'
LOAD_SECONDS = 240.0


@pytest.mark.vllm
def test_r06_a_job_in_two_phases_survives_a_killed_worker(
    write_prompts: WritePrompts, tmp_path: Path, demo_model_path: Path
) -> None:
    prompts = [f"red green blue {i} red green blue {i} red" for i in range(16)]
    classes = pa.array(["repeat" if i % 2 else "plain" for i in range(16)])
    source, output = write_prompts(prompts, request_class=classes), tmp_path / "out"
    (tmp_path / "routes.toml").write_text(ROUTES)
    command = ["generate", source, "-o", output, "--engine", "vllm", "--model", demo_model_path, "--dtype", "float32"]
    command += ["--vllm-arg", "enforce_eager=true", "--vllm-arg", "max_model_len=1024", "--kv-memory", "256MiB"]
    command += ["--max-batch", "2", "--max-new-tokens", "24", "--routes", tmp_path / "routes.toml", "--shard-rows", "4"]
    run = start_cli(*command)
    wait_for(lambda: finished_rows(output) > 2 or run.poll() is not None, LOAD_SECONDS)
    worker = psutil.Process(worker_pids(run.pid)[0])
    family = [worker, *worker.children(recursive=True)]
    os.kill(worker.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    stdout, stderr = run.communicate(timeout=2 * LOAD_SECONDS)
    assert run.returncode == 0, stderr
    assert "phase 2 of 2: prompt-lookup with 4 tokens for class repeat" in stderr
    summary = summary_of(stdout)
    assert summary["rows"] == 16
    assert summary["error_rows"] == 0
    assert abs(summary["unattributed_share"]) < 0.02
    columns = ["request_class", "method", "draft_seconds", "spec_decode_num_draft_tokens", "output_tokens"]
    rows = load_results(str(output), columns).to_pylist()
    assert len(rows) == 16
    for row in rows:
        drafting = row["spec_decode_num_draft_tokens"] > 0
        assert row["method"] == ("prompt_lookup" if drafting else "target_only")
        assert row["draft_seconds"] == (None if row["request_class"] == "repeat" else 0.0)
    assert any(row["method"] == "prompt_lookup" for row in rows)
    assert all(pq.read_metadata(path).num_rows == 4 for path in output.glob("part-*.parquet"))
