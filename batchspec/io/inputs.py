"""Finds the input files and checks, from footers alone, everything that can be checked before a model loads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from batchspec.config import InputConfig
from batchspec.errors import InputError
from batchspec.io.columns import check_columns, check_file_columns, unite_schemas
from batchspec.io.footer import Footer
from batchspec.io.sources import Source, find_sources, open_source, reading


@dataclass(frozen=True, slots=True)
class InputFile:
    """One Parquet file of the input.

    `path` is where it is opened; it may hold a signature, so it is for no log and no record. `name` is what
    `source_file` says: the absolute path, the address without query and credentials, or `hf://org/name:split`.
    `num_rows` is what the run reads of it, `uncompressed_bytes` about the size of these rows' data, `size_bytes` that
    of the whole file. `partition` holds the columns that come from hive directories (None: hive's null).
    `first_row_index` is the `row_index` of its first row. `fingerprint` is a hash of footer and size.
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
    """Find and check the input: `find_sources` says what each of `config.inputs` may be, `config.limit` keeps the
    first rows only.

    Raises InputError, naming file and column, for whatever files and schemas can tell: nothing there, not Parquet,
    columns missing, doubled or of a wrong type, files that do not fit each other.
    """
    sources = [source for text in config.inputs for source in find_sources(text)]
    if not sources:
        raise InputError("no input: name at least one Parquet file, directory, glob or hf:// dataset")
    twice = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
    if twice:
        raise InputError(f"{twice[0]} is given more than once; its rows would be answered twice")
    files: list[InputFile] = []
    schemas = []
    first_row_index = 0
    for source in sources:
        file, schema = _inspect(source, first_row_index)
        files.append(file)
        schemas.append((file.name, schema))
        first_row_index += file.num_rows
    schema = unite_schemas(schemas)
    check_columns(schema, config)
    return InputSet(tuple(_first_rows(files, config.limit)), schema)


def _inspect(source: Source, first_row_index: int) -> tuple[InputFile, pa.Schema]:
    with reading(source.path, source.name), open_source(source.path) as opened:
        footer = Footer(opened, source.name)
    check_file_columns(source.name, footer.schema, [key for key, _ in source.partition])
    schema = footer.schema
    for key, _ in source.partition:
        schema = schema.append(pa.field(key, pa.string()))
    file = InputFile(
        path=source.path,
        name=source.name,
        num_rows=footer.num_rows,
        size_bytes=footer.size_bytes,
        uncompressed_bytes=footer.uncompressed_bytes,
        first_row_index=first_row_index,
        partition=source.partition,
        fingerprint=footer.fingerprint,
    )
    return file, schema


def _first_rows(files: Sequence[InputFile], limit: int | None) -> list[InputFile]:
    """The files that hold the first `limit` rows, the last of them cut."""
    if limit is None:
        return list(files)
    kept = []
    for file in files:
        if file.first_row_index < limit:
            num_rows = min(file.num_rows, limit - file.first_row_index)
            num_bytes = file.uncompressed_bytes * num_rows // max(1, file.num_rows)
            kept.append(replace(file, num_rows=num_rows, uncompressed_bytes=num_bytes))
    return kept
