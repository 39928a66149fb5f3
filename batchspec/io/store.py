"""Where an output lives: whole-file writes, create-if-absent, and appending, on a file system or an object store."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from batchspec.errors import BatchspecError

TEMPORARY_FOLDER = "_batchspec/tmp"


class Appender(Protocol):
    """A growing file. Its name is its own: two writers never share one."""

    def append(self, data: bytes) -> None:
        """Add `data` as one piece; after a kill it is there whole, torn at the end, or (object stores) not yet."""
        ...

    def flush_if_due(self) -> None:
        """Object stores: send what is older than the flush interval. May be called from another thread."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """An output directory; names are relative to it, with `/`. Faults of the storage are OSErrors."""

    @property
    def root(self) -> str:
        """The absolute path or address, without credentials."""
        ...

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Put or replace a file; readers see the old or the new one, whole."""
        ...

    def create(self, name: str, write: Callable[[BinaryIO], None]) -> bool:
        """Put what `write` writes, whole and durable; False, and nothing changed, where the name exists already."""
        ...

    def replace_if(self, name: str, seen: bytes, data: bytes) -> bool:
        """Put `data` in place of a file that still holds `seen`; False, and nothing changed, where it does not."""
        ...

    def names(self, folder: str) -> list[str]:
        """The names (without folder) of the files in `folder`, sorted; empty where there is none."""
        ...

    def open(self, name: str) -> BinaryIO:
        """A seekable file to read."""
        ...

    def move(self, name: str, new_name: str) -> None: ...

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no fault."""
        ...

    def appender(self, name: str) -> Appender: ...


def open_store(root: str) -> Store:
    """The store of an output directory: a path, or an address such as s3://bucket/folder."""
    if "://" in root and not root.startswith("file://"):
        from batchspec.io.object_store import ObjectStore

        return ObjectStore(root)
    return LocalStore(Path(root.removeprefix("file://")))


@contextlib.contextmanager
def storage_faults(store: Store) -> Iterator[None]:
    """Name the output where the storage fails (full, read-only, not permitted, unreachable): BatchspecError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise BatchspecError(
            f"cannot write the output {store.root}: {reason}. What is finished is kept: mend it and run the same "
            "command again."
        ) from error


class LocalStore:
    """A directory. Files appear by `link` or `rename` from a folder that readers' globs leave out, after an fsync."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    @property
    def root(self) -> str:
        return str(self._directory)

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with self._temporary(lambda file: _write_all(file, data)) as temporary:
            os.replace(temporary, self._prepared(name))
        _sync_directory((self._directory / name).parent)

    def create(self, name: str, write: Callable[[BinaryIO], None]) -> bool:
        path = self._prepared(name)
        if path.exists():
            return False
        with self._temporary(write) as temporary:
            try:
                _link(temporary, path)
            except FileExistsError:
                return False
        _sync_directory(path.parent)
        return True

    def replace_if(self, name: str, seen: bytes, data: bytes) -> bool:
        import fcntl

        try:
            with (self._directory / name).open("rb") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                if self.read(name) != seen:
                    return False
                self.write(name, data)
                return True
        except FileNotFoundError:
            return False

    def names(self, folder: str) -> list[str]:
        try:
            with os.scandir(self._directory / folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return []

    def open(self, name: str) -> BinaryIO:
        return (self._directory / name).open("rb")

    def move(self, name: str, new_name: str) -> None:
        os.replace(self._directory / name, self._prepared(new_name))
        _sync_directory((self._directory / new_name).parent)
        _sync_directory((self._directory / name).parent)

    def remove(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def appender(self, name: str) -> Appender:
        return _FileAppender(self._prepared(name))

    def _prepared(self, name: str) -> Path:
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def _temporary(self, write: Callable[[BinaryIO], None]) -> Iterator[Path]:
        """A complete, durable file under a name that no reader looks at; gone at the end, whatever happens."""
        path = self._prepared(f"{TEMPORARY_FOLDER}/{uuid.uuid4().hex}.tmp")
        try:
            with path.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)


class _FileAppender:
    """Each piece is one `write` call, so that a killed process has lost nothing that it had finished."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def flush_if_due(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._descriptor)


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name unless the name is taken (FileExistsError)."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # file systems without hard links: the remaining window is that of one system call
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(temporary, path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
