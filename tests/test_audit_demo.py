"""The audit of healthy jobs of the demo model, in bfloat16, greedy and sampled: no fault."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchspec.pipeline.verify import verify_output
from tests.pipeline.jobs import run_cli

SAMPLE = Path(__file__).parent.parent / "data/sample_prompts.parquet"


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--top-p", "0.95")], ids=["greedy", "sampled"])
def test_a_healthy_bf16_job_has_near_ties_and_no_fault(tmp_path: Path, sampling: tuple[str, ...]) -> None:
    table = pq.read_table(SAMPLE)
    pq.write_table(table.take(list(range(0, 250, 6))), tmp_path / "in.parquet")
    options = ("--max-new-tokens", "32", "--method", "prompt-lookup", *sampling)
    done = run_cli("generate", tmp_path / "in.parquet", "-o", tmp_path / "out", *options)
    assert done.returncode in (0, 3), done.stderr
    audit = verify_output(str(tmp_path / "out"), sample_rows=36)
    assert audit.faults == []
    assert audit.total.rows == 36
    assert 0 < audit.total.near_ties < 0.05 * audit.total.tokens
