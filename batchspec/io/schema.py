"""The result columns: one explicit Arrow schema, the same for answered, failed and empty parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from batchspec.config import InputConfig
from batchspec.types import Outcome

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ResultRow:
    """An outcome and where it was made: what a part shows of one row beside the input's columns.

    `worker` and `attempt` are numbers; `price_per_hour` is that of the attempt (USD per device-hour, None: unknown).
    `request_class` is the class the run gave the row: it is shown where the input has no class column.
    """

    outcome: Outcome
    worker: int
    attempt: int
    price_per_hour: float | None = None
    request_class: str | None = None
    est_target_only_device_seconds: float | None = None

    @property
    def cost_usd(self) -> float | None:
        """What the row's share of metered device time costs; None without a price."""
        if self.price_per_hour is None:
            return None
        return self.outcome.times.device_seconds / 3600 * self.price_per_hour


@dataclass(frozen=True)
class ResultSchema:
    """The columns of an output: those of the input, untouched and first, then the result columns, `prefix` before each."""

    input_schema: pa.Schema
    config: InputConfig
    prefix: str = ""

    @property
    def arrow(self) -> pa.Schema:
        """The schema of every part. Raises InputError on a name clash, or for a type that Parquet cannot write."""
        raise NotImplementedError

    def build_table(
        self, input_rows: pa.Table, source_file: str, first_source_row: int, rows: Sequence[ResultRow]
    ) -> pa.Table:
        """A part (or a piece of one): `rows[i]` answers row i of `input_rows`, all from one file.

        Raises ValueError, with the row, where a counter identity is broken or rows and input do not fit each other.
        """
        raise NotImplementedError
