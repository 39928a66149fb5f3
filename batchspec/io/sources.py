"""From what the user names to the files behind it: paths, directories, globs and addresses, local or remote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from batchspec.errors import BatchspecError, InputError, MissingDependencyError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_WILDCARDS = "*?["
_IGNORED = ("_", ".")


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read. `path` opens it and may hold a signature: it is for no log and no record; `name` is for people,
    without credentials, and always valid Unicode.

    `partition` holds the columns that hive directories (`class=qa/`) give it; None is hive's null.
    """

    path: str
    name: str
    partition: tuple[tuple[str, str | None], ...] = ()


def find_sources(text: str) -> list[Source]:
    """The files that `text` stands for, in order of path.

    A file; a directory: every file below it whose path has no name that starts with `_` or `.`, with its `key=value`
    directories as partition columns; a glob: as if each match had been given; `hf://org/name[:split]`. A path that
    exists is taken as it is, whatever signs it holds. A file given by name gets no partition columns.
    Raises InputError where there is nothing.
    """
    if text.startswith("hf://"):
        from batchspec.io.hub import fetch_dataset

        return [Source(str(fetch_dataset(text)), text)]
    system, path = _filesystem(text)
    with reading(text, public_name(text)):
        if system.isdir(path):
            return _below(system, path)
        if system.exists(path):
            return [_source(system, path)]
        sources = _matches(system, path)
    if not sources:
        hint = f"; a dataset of the Hugging Face Hub is written hf://{text}" if text.count("/") == 1 else ""
        raise InputError(f"no file or directory {public_name(text)}{hint}")
    return sources


def open_source(path: str) -> pa.NativeFile:
    """Open a file of the input for reading at any position. Raises OSError."""
    if "://" not in path:
        return pa.OSFile(path)
    system, inner_path = _filesystem(path)
    return pa.PythonFile(system.open(inner_path, "rb"), mode="r")


@contextmanager
def reading(path: str, name: str) -> Iterator[None]:
    """Give what libraries raise while they read `path` its place in the error tree, and its `name`.

    Damage and missing permission are InputErrors, a fault of the storage is a BatchspecError.
    """
    is_local = "://" not in path
    try:
        yield
    except BatchspecError:
        raise
    except PermissionError as error:
        raise InputError(f"{name} may not be read") from error
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, pa.ArrowException) or (is_local and not error.errno):  # Arrow's own have no errno
            raise InputError(f"{name} cannot be decoded; the file may be damaged: {error}") from error
        # the text of a remote error may hold a signed address
        raise BatchspecError(f"cannot read {name}: {error if is_local else type(error).__name__}") from error
    except Exception as error:
        if is_local:
            raise
        raise BatchspecError(f"cannot read {name}: {type(error).__name__}") from error


def public_name(path: str) -> str:
    """The path or address without user, password and query, as valid Unicode."""
    if "://" in path:
        parts = urlsplit(path)
        path = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return path.encode(errors="backslashreplace").decode()


def _filesystem(text: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a path or address, and the path within it (absolute where it is local)."""
    import fsspec

    if "://" not in text:
        return fsspec.filesystem("file"), os.path.abspath(text)
    try:
        system, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        mend = "pip install 'batchspec[s3]'" if text.startswith("s3://") else str(error)
        raise MissingDependencyError(f"cannot open {public_name(text)}: {mend}") from error
    except ValueError as error:
        raise InputError(f"cannot open {public_name(text)}: {error}") from error
    return system, path


def _source(system: AbstractFileSystem, path: str, partition: tuple[tuple[str, str | None], ...] = ()) -> Source:
    address = path if _is_local(system) else system.unstrip_protocol(path)
    name = public_name(address)
    if _is_local(system) and name != path:
        raise InputError(f"the name of {name} is not valid Unicode; rename the file")
    return Source(address, name, partition)


def _below(system: AbstractFileSystem, directory: str) -> list[Source]:
    """Every visible file below `directory`, with the columns that the directories between give it."""
    paths = system.find(directory, on_error="raise") if _is_local(system) else system.find(directory)
    inner = [path.removeprefix(directory).lstrip("/") for path in sorted(paths)]
    visible = [path for path in inner if not _is_hidden(path)]
    if not visible:
        raise InputError(f"the directory {public_name(directory)} holds no file (names with _ or . first are ignored)")
    return [_source(system, f"{directory.rstrip('/')}/{path}", _partition(path)) for path in visible]


def _matches(system: AbstractFileSystem, pattern: str) -> list[Source]:
    if not any(sign in pattern for sign in _WILDCARDS):
        return []
    fixed = pattern[: min(pattern.find(sign) for sign in _WILDCARDS if sign in pattern)].rpartition("/")[0]
    found: dict[str, Source] = {}
    for path in sorted(system.glob(pattern)):
        if _is_hidden(path.removeprefix(fixed)):
            continue
        for source in _below(system, path) if system.isdir(path) else [_source(system, path)]:
            found.setdefault(source.path, source)
    return [found[path] for path in sorted(found)]


def _is_local(system: AbstractFileSystem) -> bool:
    return "file" in system.protocol


def _is_hidden(inner_path: str) -> bool:
    return any(part.startswith(_IGNORED) for part in inner_path.split("/"))


def _partition(inner_path: str) -> tuple[tuple[str, str | None], ...]:
    pairs = [part.split("=", 1) for part in inner_path.split("/")[:-1] if "=" in part]
    return tuple((unquote(key), None if value == _HIVE_NULL else unquote(value)) for key, value in pairs)
