"""An output as a pandas frame, for notebooks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from batchspec.io.results import load_results as load_table
from batchspec.io.store import open_store, storage_faults
from batchspec.io.writer import SUCCESS_NAME


def load_results(output: str, columns: Sequence[str] | None = None, allow_partial: bool = False) -> pd.DataFrame:
    """One line per input row, in the order of the input: all columns of the output, or those named.

    Counters that are null for some rows keep their integer type (pandas' nullable integers). `frame.attrs["summary"]`
    is the job's summary, None where the job has not finished. Raises UsageError in that case unless `allow_partial`.
    """
    table = load_table(output, columns, allow_partial)
    store = open_store(output)
    with storage_faults(store):
        finished = SUCCESS_NAME in store.names("")
        summary = json.loads(store.read(SUCCESS_NAME)) if finished else None
    nullable = {"int32": pd.Int32Dtype(), "int64": pd.Int64Dtype()}
    frame: pd.DataFrame = table.to_pandas(types_mapper=lambda kind: nullable.get(str(kind)))
    frame.attrs["summary"] = summary
    return frame
