"""Reads a finished output back as one table, in the order of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.errors import UsageError
from batchspec.io.store import open_store, storage_faults
from batchspec.io.writer import SUCCESS_NAME, is_part_name


def load_results(output: str, columns: Sequence[str] | None = None, allow_partial: bool = False) -> pa.Table:
    """The rows of an output directory (all columns, or those named), ordered as in the input.

    Raises UsageError where the job has not finished, unless `allow_partial`: then the rows of finished parts.
    """
    store = open_store(output)
    with storage_faults(store):
        names = store.names("")
        if SUCCESS_NAME not in names and not allow_partial:
            raise UsageError(
                f"{store.root} has no {SUCCESS_NAME}: its job has not finished (allow_partial reads it all the same)"
            )
        parts = sorted(filter(is_part_name, names), key=lambda name: int(name[5:-8]))
        if not parts:
            raise UsageError(f"{store.root} has no finished part yet")
        tables = []
        for name in parts:
            with store.open(name) as file:
                tables.append(pq.read_table(file, columns=None if columns is None else list(columns)))
    return cast(pa.Table, pa.concat_tables(tables))


def class_column(schema: pa.Schema, columns: Mapping[str, str]) -> str:
    """The whole name of the column with the classes: the input's own, where it has one.

    `columns` are the names that the job was told, as its manifest has them.
    """
    own = columns["request_class"]
    return own if own in schema.names else f"{columns['output_prefix']}request_class"
