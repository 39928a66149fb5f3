"""Fixes the shards of a job, once, in `_batchspec/manifest.json`. The number of workers is no part of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO

from batchspec.config import OutputConfig
from batchspec.errors import MismatchError
from batchspec.io.inputs import InputSet
from batchspec.io.store import Store
from batchspec.pipeline.messages import Shard

MANIFEST_NAME = "_batchspec/manifest.json"
MANIFEST_VERSION = 1
AIMED_SHARDS = 16
SMALLEST_SHARD_ROWS = 16


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a job is: its shards (each ends before row `shard_stops[i]`), what it must agree with, what made it."""

    run_id: str
    created_at: str
    shard_stops: tuple[int, ...]
    inputs: tuple[Mapping[str, Any], ...]
    identity: Mapping[str, Any]
    versions: Mapping[str, Any]

    @property
    def shards(self) -> tuple[Shard, ...]:
        starts = (0, *self.shard_stops)
        return tuple(Shard(i, starts[i], stop) for i, stop in enumerate(self.shard_stops))

    @property
    def num_rows(self) -> int:
        return self.shard_stops[-1]

    def to_json(self) -> str:
        return to_json(
            {
                "manifest_version": MANIFEST_VERSION,
                "run_id": self.run_id,
                "created_at": self.created_at,
                "num_rows": self.num_rows,
                "shard_stops": list(self.shard_stops),
                "inputs": list(self.inputs),
                "identity": self.identity,
                "versions": self.versions,
            }
        )


def to_json(value: Any) -> str:
    """Strict JSON that diffs well."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def json_line(value: Any) -> str:
    """Strict JSON on one line, its end included."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n"


def plan(inputs: InputSet, config: OutputConfig, identity: Mapping[str, Any], versions: Mapping[str, Any]) -> Manifest:
    """A new job over `inputs`."""
    return Manifest(
        run_id=uuid.uuid4().hex[:12],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        shard_stops=tuple(_shard_stops(inputs, config)) or (0,),
        inputs=tuple(
            {"name": f.name, "num_rows": f.num_rows, "size_bytes": f.size_bytes, "fingerprint": f.fingerprint}
            for f in inputs.files
        ),
        identity=identity,
        versions=versions,
    )


def save_manifest(store: Store, manifest: Manifest) -> None:
    """Write the manifest of a new job. Raises MismatchError where another job put one there meanwhile."""
    encoded = manifest.to_json().encode()

    def write(file: BinaryIO) -> None:
        file.write(encoded)

    if not store.create(MANIFEST_NAME, write):
        raise MismatchError(f"{store.root}: another job started there at this moment; choose another --output")


def load_manifest(store: Store) -> Manifest | None:
    """The manifest of an output; None where there is none. Raises MismatchError where it cannot be understood."""
    try:
        encoded = store.read(MANIFEST_NAME)
    except FileNotFoundError:
        return None
    try:
        values = json.loads(encoded)
        if values["manifest_version"] != MANIFEST_VERSION:
            raise ValueError(f"version {values['manifest_version']}, not {MANIFEST_VERSION}")
        return Manifest(
            run_id=values["run_id"],
            created_at=values["created_at"],
            shard_stops=tuple(values["shard_stops"]),
            inputs=tuple(values["inputs"]),
            identity=values["identity"],
            versions=values["versions"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise MismatchError(
            f"{store.root}/{MANIFEST_NAME} is not a manifest of this version ({type(error).__name__}: {error}). "
            "Choose another --output, or discard this one with --overwrite."
        ) from error


def _shard_stops(inputs: InputSet, config: OutputConfig) -> Iterator[int]:
    """Cut the rows, in order, into shards capped in rows and bytes; small jobs finer, to spread over workers."""
    aimed_rows = max(-(-inputs.num_rows // AIMED_SHARDS), SMALLEST_SHARD_ROWS)
    max_rows = min(config.shard_rows, aimed_rows)
    rows, num_bytes = 0, 0.0
    for file in inputs.files:
        bytes_per_row = file.uncompressed_bytes / max(file.num_rows, 1)
        left = file.num_rows
        while left:
            room = min(max_rows - rows, int((config.shard_bytes - num_bytes) / max(bytes_per_row, 1e-9)))
            if room < 1 and rows:
                yield file.first_row_index + file.num_rows - left
                rows, num_bytes = 0, 0.0
                continue
            taken = min(left, max(room, 1))
            rows, num_bytes, left = rows + taken, num_bytes + taken * bytes_per_row, left - taken
    if rows:
        yield inputs.num_rows
