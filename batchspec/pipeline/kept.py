"""`--retry-errors`: the good rows of a part that had error rows wait here until its error rows are decoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.io.schema import ResultSchema
from batchspec.io.store import Store
from batchspec.io.writer import part_name

KEPT_FOLDER = "_batchspec/retry"


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Finished rows of a former part. `row_indices` maps each to its place in `table`."""

    table: pa.Table | None = None
    row_indices: dict[int, int] = field(default_factory=dict)

    def rows(self, row_indices: Sequence[int]) -> pa.Table:
        """These rows, in this order, in the schema of a part."""
        assert self.table is not None
        return self.table.take([self.row_indices[row_index] for row_index in row_indices])


def kept_name(shard: int) -> str:
    return f"{KEPT_FOLDER}/{part_name(shard)}"


def keep_good_rows(store: Store, shard: int) -> None:
    """Take a part out of the output. A crash at any point leaves the part in one place or in the other."""
    store.move(part_name(shard), kept_name(shard))


def load_kept_rows(store: Store, shard: int, schema: ResultSchema) -> KeptRows:
    """The good rows kept of a shard; none where there was no retry."""
    try:
        file = store.open(kept_name(shard))
    except FileNotFoundError:
        return KeptRows()
    with file:
        table = pq.read_table(file)
    good = table.filter(table[f"{schema.prefix}error_type"].is_null())
    places = {row_index: place for place, row_index in enumerate(good[f"{schema.prefix}row_index"].to_pylist())}
    return KeptRows(good, places)


def remove_kept_rows(store: Store, shard: int) -> None:
    store.remove(kept_name(shard))
