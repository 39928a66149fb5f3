"""Writes parts: a part file exists if and only if it is complete."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.io.store import Store

logger = logging.getLogger(__name__)

ROW_GROUP_ROWS = 4096
ROW_GROUP_BYTES = 32 * 2**20
SUCCESS_NAME = "_SUCCESS"
METADATA_PREFIX = "batchspec."


def part_name(shard: int) -> str:
    return f"part-{shard:05d}.parquet"


def is_part_name(name: str) -> bool:
    return name.startswith("part-") and name.endswith(".parquet") and name[5:-8].isdigit()


def commit_part(
    store: Store, shard: int, schema: pa.Schema, tables: Iterable[pa.Table], metadata: Mapping[str, str]
) -> bool:
    """Write a shard's rows, in order, as its part. False where the part is there already: that one stays.

    `metadata` is added to the schema's under `batchspec.` names. Pages carry checksums, so that a resume can tell a
    damaged part. Raises OSError where the storage fails; then there is no part and nothing is left behind.
    """
    full_schema = schema.with_metadata({**(schema.metadata or {}), **_prefixed(metadata)})

    def write(file: BinaryIO) -> None:
        with pq.ParquetWriter(file, full_schema, compression="zstd", write_page_checksum=True) as writer:
            for table in _row_groups(tables):
                writer.write_table(table.cast(full_schema), row_group_size=ROW_GROUP_ROWS)

    return store.create(part_name(shard), write)


def check_part(file: BinaryIO, shard: int, num_rows: int, run_id: str, deep: bool) -> str | None:
    """What is wrong with the part of a shard; None where it can be trusted. `deep` reads every page (checksums)."""
    try:
        with pq.ParquetFile(file, page_checksum_verification=deep) as part:
            metadata = part.schema_arrow.metadata or {}
            found = {
                name: metadata.get(f"{METADATA_PREFIX}{name}".encode(), b"").decode() for name in ("run_id", "shard")
            }
            if found != {"run_id": run_id, "shard": str(shard)}:
                return f"it belongs to run {found['run_id'] or 'unknown'}, shard {found['shard'] or 'unknown'}"
            if part.metadata.num_rows != num_rows:
                return f"it has {part.metadata.num_rows} rows instead of {num_rows}"
            if deep:
                for _ in part.iter_batches(batch_size=1024):
                    pass
    except (pa.ArrowException, OSError) as error:
        return str(error).splitlines()[0]
    return None


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Gather small tables, so that row groups are worth reading; memory stays bounded."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if (
            sum(piece.num_rows for piece in held) >= ROW_GROUP_ROWS
            or sum(piece.nbytes for piece in held) >= ROW_GROUP_BYTES
        ):
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _prefixed(metadata: Mapping[str, str]) -> dict[str, str]:
    return {f"{METADATA_PREFIX}{name}": value for name, value in metadata.items()}
