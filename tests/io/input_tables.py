"""Small inputs for the tests of this folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.config import InputConfig
from batchspec.io.inputs import InputSet, resolve_inputs
from batchspec.io.parser import RowParser
from batchspec.io.reader import InputReader
from batchspec.types import Request, RowFailure, SamplingParams


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """Write a Parquet file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def resolve(*inputs: Path | str, **config: Any) -> InputSet:
    return resolve_inputs(InputConfig(inputs=tuple(map(str, inputs)), **config))


def read(inputs: InputSet) -> pa.Table:
    """The whole input as one table."""
    with InputReader(inputs) as reader:
        batches = [
            batch for index, file in enumerate(inputs.files) for batch in reader.iter_batches(index, 0, file.num_rows)
        ]
    return pa.Table.from_batches(batches, inputs.schema)


def parse(columns: dict[str, Any], defaults: SamplingParams | None = None, **config: Any) -> list[Request | RowFailure]:
    """Parse columns in memory, as rows from 0 on."""
    batch = pa.RecordBatch.from_pydict(columns)
    return RowParser(InputConfig(**config), defaults or SamplingParams()).parse(batch, 0)


def error_types(rows: Sequence[Request | RowFailure]) -> list[str | None]:
    return [row.error_type if isinstance(row, RowFailure) else None for row in rows]


def unchecked_strings(values: Sequence[bytes | None]) -> pa.Array:
    """A string array with any bytes in it, as careless writers make them."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())
