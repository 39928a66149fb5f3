"""What the pipeline's tests share: input files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.jobs import WritePrompts


@pytest.fixture
def write_prompts(tmp_path: Path) -> WritePrompts:
    """Write a Parquet file of prompts (or of any columns) and return its path."""

    def write(prompts: Sequence[str | None] | int, name: str = "in.parquet", **columns: Any) -> Path:
        texts = [f"question {i}" for i in range(prompts)] if isinstance(prompts, int) else list(prompts)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": pa.array(texts, pa.string()), **columns}), path)
        return path

    return write
