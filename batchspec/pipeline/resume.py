"""What an output holds already: parts that can be trusted, rows in journals, and what has to go first."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchspec.errors import UsageError
from batchspec.io.journal import JOURNAL_FOLDER, read_journal, remove_journal
from batchspec.io.store import TEMPORARY_FOLDER, Store
from batchspec.io.writer import SUCCESS_NAME, check_part, is_part_name, part_name
from batchspec.pipeline.attempts import ATTEMPTS_FOLDER
from batchspec.pipeline.kept import KEPT_FOLDER, keep_good_rows
from batchspec.pipeline.messages import Shard
from batchspec.pipeline.plan import MANIFEST_NAME, Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stock:
    """Where a job stands: the shards without a part, and how many rows are done (in parts and journals)."""

    pending: tuple[Shard, ...]
    rows_done: int


def refuse_foreign_files(store: Store) -> None:
    """Raise UsageError where the directory holds what is not ours: a reader would mix it up with the answers."""
    foreign = [name for name in store.names("") if not name.startswith(".")]
    if foreign and MANIFEST_NAME.rpartition("/")[2] not in store.names("_batchspec"):
        raise UsageError(
            f"--output {store.root} holds files that are not of a batchspec job ({foreign[0]}, ...): name a directory "
            "of its own"
        )


def clear_output(store: Store) -> None:
    """Discard a former job: only what is ours, `_SUCCESS` first and the manifest last."""
    store.remove(SUCCESS_NAME)
    for name in filter(is_part_name, store.names("")):
        store.remove(name)
    for folder in (JOURNAL_FOLDER, KEPT_FOLDER, ATTEMPTS_FOLDER):
        for name in store.names(folder):
            store.remove(f"{folder}/{name}")
    store.remove(MANIFEST_NAME)


def remove_temporary_files(store: Store) -> None:
    """What a killed attempt left half written."""
    for name in store.names(TEMPORARY_FOLDER):
        store.remove(f"{TEMPORARY_FOLDER}/{name}")


def take_stock(store: Store, manifest: Manifest, deep_check: bool) -> Stock:
    """Find the shards that still have to be answered. Parts that cannot be trusted are removed, and said so."""
    parts = set(store.names(""))
    journaled = {name.partition(".")[0] for name in store.names(JOURNAL_FOLDER)}
    pending: list[Shard] = []
    rows_done = 0
    for shard in manifest.shards:
        if part_name(shard.index) in parts and _is_sound(store, shard, manifest.run_id, deep_check):
            rows_done += shard.num_rows
            if f"{shard.index:05d}" in journaled:  # a kill came between the part and the end of its journal
                remove_journal(store, shard.index)
            continue
        pending.append(shard)
        if f"{shard.index:05d}" in journaled:
            rows_done += len(read_journal(store, shard.index).records)
    return Stock(tuple(pending), rows_done)


def set_error_rows_free(store: Store, manifest: Manifest, error_column: str) -> None:
    """`--retry-errors`: take every part that has error rows out of the output, its good rows kept aside."""
    for name in filter(is_part_name, store.names("")):
        with store.open(name) as file:
            errors = pq.read_table(file, columns=[error_column])[error_column]
        if pc.count(errors).as_py():
            keep_good_rows(store, int(name[5:-8]))


def _is_sound(store: Store, shard: Shard, run_id: str, deep_check: bool) -> bool:
    name = part_name(shard.index)
    with store.open(name) as file:
        fault = check_part(file, shard.index, shard.num_rows, run_id, deep_check)
    if fault is not None:
        logger.warning("%s is damaged (%s): its rows are decoded again", name, fault)
        store.remove(name)
    return fault is None
