"""Parts of an output, written by hand."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PART_SCHEMA = pa.schema(
    {
        "request_class": pa.string(),
        "method": pa.string(),
        "error_type": pa.string(),
        "output_text": pa.string(),
        "input_tokens": pa.int32(),
        "output_tokens": pa.int32(),
        "num_target_steps": pa.int32(),
        "num_draft_steps": pa.int32(),
        "spec_decode_num_drafts": pa.int32(),
        "spec_decode_num_draft_tokens": pa.int32(),
        "spec_decode_num_accepted_tokens": pa.int32(),
        "num_discarded_tokens": pa.int32(),
        "mean_live_sequences": pa.float64(),
        "device_seconds": pa.float64(),
        "cost_usd": pa.float64(),
    }
)


@pytest.fixture
def write_part(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as the next part; missing columns are null. `prefix` goes before the result columns' names."""
    written: list[Path] = []

    def write(rows: Sequence[Mapping[str, Any]], prefix: str = "", class_column: str = "request_class") -> Path:
        path = tmp_path / f"part-{len(written):05d}.parquet"
        names = [class_column, *(prefix + name for name in PART_SCHEMA.names[1:])]
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=PART_SCHEMA).rename_columns(names)
        pq.write_table(table, path)
        written.append(path)
        return path

    return write
