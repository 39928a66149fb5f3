"""An output directory on an object store (s3:// and what else fsspec speaks).

Objects appear whole by nature. A part is one conditional put, so that nobody overwrites a committed one; journals are
segments, sent every few seconds. Credentials come from the usual environment alone.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from batchspec.errors import MissingDependencyError, UsageError
from batchspec.io.store import Appender

FLUSH_SECONDS = 5.0
FLUSH_BYTES = 8 * 2**20


class ObjectStore:
    """See Store."""

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._system, self._path = _file_system(self._root)

    @property
    def root(self) -> str:
        return self._root

    def read(self, name: str) -> bytes:
        with _storage_errors():
            return cast(bytes, self._system.cat_file(self._full(name)))

    def write(self, name: str, data: bytes) -> None:
        with _storage_errors():
            self._system.pipe_file(self._full(name), data)

    def create(self, name: str, write: Callable[[BinaryIO], None]) -> bool:
        buffer = io.BytesIO()
        write(buffer)
        try:
            with _storage_errors():
                self._system.pipe_file(self._full(name), buffer.getvalue(), mode="create")
        except FileExistsError:
            return False
        return True

    def replace_if(self, name: str, seen: bytes, data: bytes) -> bool:
        path = self._full(name)
        try:
            with _storage_errors():
                condition = self._etag_condition(path)
                if self._system.cat_file(path) != seen:
                    return False
                self._system.pipe_file(path, data, **condition)
        except (FileNotFoundError, FileExistsError):
            return False
        return True

    def names(self, folder: str) -> list[str]:
        path = self._full(folder).rstrip("/")
        try:
            with _storage_errors():
                entries = self._system.ls(path, detail=True, refresh=True)
        except FileNotFoundError:
            return []
        found = (entry for entry in entries if entry["type"] == "file" and entry["name"].rstrip("/") != path)
        return sorted(entry["name"].rpartition("/")[2] for entry in found)

    def open(self, name: str) -> BinaryIO:
        with _storage_errors():
            return cast(BinaryIO, self._system.open(self._full(name), "rb"))

    def move(self, name: str, new_name: str) -> None:
        with _storage_errors():
            self._system.copy(self._full(name), self._full(new_name))
            self._system.rm_file(self._full(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _storage_errors():
            self._system.rm_file(self._full(name))

    def appender(self, name: str) -> Appender:
        return _SegmentAppender(self, name)

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _etag_condition(self, path: str) -> dict[str, str]:
        """The condition that the object is still the one seen now; none where the store knows no such thing."""
        etag = self._system.info(path, refresh=True).get("ETag") if "s3" in self._system.protocol else None
        return {"IfMatch": etag} if etag else {}


class _SegmentAppender:
    """Numbered objects `NAME.000001`, each with the pieces of a few seconds. At most those are lost by a kill."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name
        self._num_segments = 0
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._flushed_at = time.monotonic()
        self._lock = threading.Lock()

    def append(self, data: bytes) -> None:
        with self._lock:
            self._pieces.append(data)
            self._num_bytes += len(data)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        with self._lock:
            if self._num_bytes >= FLUSH_BYTES or time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
                self._flush()

    def close(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self._pieces:
            self._store.write(f"{self._name}.{self._num_segments + 1:06d}", b"".join(self._pieces))
            self._num_segments += 1
            self._pieces, self._num_bytes = [], 0


def _file_system(root: str) -> tuple[Any, str]:
    parts = urlsplit(root)
    if "@" in parts.netloc or parts.query:
        raise UsageError("--output: put no credentials into the address; they come from the environment")
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(root)
    except ImportError as error:
        raise MissingDependencyError(f"--output {root}: {error}. For s3://: pip install 'batchspec[s3]'") from error
    except ValueError as error:
        raise UsageError(f"--output {root}: {error}") from error
    return system, path.rstrip("/")


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Whatever a client library raises is a fault of the storage: an OSError."""
    try:
        yield
    except OSError as error:
        if "PreconditionFailed" in str(error.__cause__ or error):
            raise FileExistsError(*error.args) from error
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
