"""Finished rows of running shards, one JSON line each with its checksum, so that a kill repeats only rows in flight.

`_batchspec/journal/00007.a0002-w1.jsonl` holds what worker 1 of attempt 2 finished of shard 7. Every writer has files
of its own; a reader takes all files of a shard and skips lines that are torn.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, cast

from batchspec.io.schema import ResultRow
from batchspec.io.store import Store
from batchspec.stats import DecodeStats
from batchspec.types import Completion, FinishReason, Method, Outcome, RowFailure, StepTimes

JOURNAL_FOLDER = "_batchspec/journal"


@dataclass(slots=True)
class ShardJournal:
    """What the journal knows of a shard: encoded rows by `row_index`, how many worker deaths each row was near, and in
    how many of them it was the only row in the worker."""

    records: dict[int, bytes] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)
    deaths_alone: Counter[int] = field(default_factory=Counter)


class JournalWriter:
    """Appends to the journal of one shard, for one worker of one attempt."""

    def __init__(self, store: Store, shard: int, attempt: int, writer: str) -> None:
        self._appender = store.appender(f"{JOURNAL_FOLDER}/{shard:05d}.a{attempt:04d}-{writer}.jsonl")

    def append(self, record: bytes) -> None:
        self._appender.append(_line(record))

    def append_death(self, row_indices: Iterable[int], alone: bool) -> None:
        """Note that a worker died while these rows were in it; `alone`: one row, and none of another shard."""
        self.append(_dump({"death": sorted(row_indices), "alone": alone}))

    def flush_if_due(self) -> None:
        self._appender.flush_if_due()

    def close(self) -> None:
        self._appender.close()


def read_journal(store: Store, shard: int) -> ShardJournal:
    """All whole records of a shard. A row that two workers finished is taken from the earlier attempt."""
    journal = ShardJournal()
    for name in _journal_names(store, shard):
        for line in store.read(f"{JOURNAL_FOLDER}/{name}").split(b"\n"):
            record = _checked(line)
            if record is None:
                continue
            parsed = json.loads(record)
            if "death" in parsed:
                journal.deaths.update(parsed["death"])
                if parsed["alone"]:
                    journal.deaths_alone.update(parsed["death"])
            else:
                journal.records.setdefault(parsed["row_index"], record)
    return journal


def remove_journal(store: Store, shard: int) -> None:
    for name in _journal_names(store, shard):
        store.remove(f"{JOURNAL_FOLDER}/{name}")


def _journal_names(store: Store, shard: int) -> list[str]:
    return [name for name in store.names(JOURNAL_FOLDER) if name.startswith(f"{shard:05d}.")]


def _line(record: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(record), record)


def _checked(line: bytes) -> bytes | None:
    """The record of a line, None where the line is torn or damaged."""
    checksum, record = line[:8], line[9:]
    return record if line and checksum == b"%08x" % zlib.crc32(record) else None


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def encode_row(row: ResultRow) -> bytes:
    """One line of strict JSON. The text may hold anything, lone surrogates too."""
    outcome = row.outcome
    record = _values(outcome)
    record["times"] = _values(outcome.times)
    if isinstance(outcome, Completion):
        record["stats"] = _values(outcome.stats)
    run = {name: getattr(row, name) for name in _names(ResultRow) if name != "outcome"}
    return _dump({"row_index": outcome.row_index, "run": run, "outcome": record})


def decode_row(record: bytes) -> ResultRow:
    parsed = json.loads(record)
    return ResultRow(outcome=_decode_outcome(parsed["outcome"]), **parsed["run"])


def is_failure(record: bytes) -> bool:
    return "error_type" in json.loads(record)["outcome"]


def _decode_outcome(record: dict[str, Any]) -> Outcome:
    record["times"] = StepTimes(**record["times"])
    if "error_type" in record:
        return RowFailure(**record)
    stats = record["stats"]
    stats |= {name: tuple(value) for name, value in stats.items() if name.endswith("_per_pos")}
    record["stats"] = DecodeStats(**stats)
    record["token_ids"] = tuple(record["token_ids"])
    record["method"] = Method(record["method"])
    record["finish_reason"] = FinishReason(record["finish_reason"])
    return Completion(**record)


def _values(instance: Any) -> dict[str, Any]:
    return {name: getattr(instance, name) for name in _names(cast(Hashable, type(instance)))}


@lru_cache
def _names(record_type: Hashable) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cast(Any, record_type)))
