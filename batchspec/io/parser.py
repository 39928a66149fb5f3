"""Turns input rows into requests; a row that cannot be one becomes a row error."""

from __future__ import annotations

import pyarrow as pa

from batchspec.config import InputConfig
from batchspec.types import Request, RowFailure, SamplingParams


class RowParser:
    """Parses record batches of one input. `defaults` is what a row's null or absent sampling column inherits."""

    def __init__(self, config: InputConfig, defaults: SamplingParams) -> None:
        self._config = config
        self._defaults = defaults

    def parse(self, batch: pa.RecordBatch, first_row_index: int) -> list[Request | RowFailure]:
        """One Request or RowFailure per row of `batch`, in order; the first has `row_index` `first_row_index`."""
        raise NotImplementedError
