"""Finds the input files and checks, from footers alone, everything that can be checked before a model loads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pyarrow as pa

from batchspec.config import InputConfig


@dataclass(frozen=True, slots=True)
class InputFile:
    """One Parquet file of the input.

    `path` is where it is opened, `name` what `source_file` says (the absolute path, the address without its query,
    or `hf://org/name:split`). `uncompressed_bytes` is the size of its data when read, `size_bytes` that of the file.
    `partition` holds the columns that come from hive directories (None: hive's null). `first_row_index` is
    the `row_index` of its first row. `fingerprint` is a hash of footer and size.
    """

    path: str
    name: str
    num_rows: int
    size_bytes: int
    uncompressed_bytes: int
    first_row_index: int
    partition: tuple[tuple[str, str | None], ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class InputSet:
    """The whole input, in row order. `schema` unites the files' schemas: a column that a file lacks is null there."""

    files: tuple[InputFile, ...]
    schema: pa.Schema

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def content_hash(self) -> str:
        """Identity of the rows and their order; paths are no part of it, so that moved files stay the same input."""
        content = [(file.fingerprint, file.num_rows, file.partition) for file in self.files]
        return hashlib.sha256(repr(content).encode()).hexdigest()


def resolve_inputs(config: InputConfig) -> InputSet:
    """Find and check the input. `config.limit` keeps the first rows only.

    Raises InputError, naming file and column, for whatever schemas and files can tell.
    """
    raise NotImplementedError
