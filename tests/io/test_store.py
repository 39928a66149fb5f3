"""The contract of an output's store, on a directory and on a real S3 server."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from batchspec.errors import BatchspecError, UsageError
from batchspec.io.object_store import FLUSH_SECONDS
from batchspec.io.store import TEMPORARY_FOLDER, LocalStore, Store, open_store, storage_faults

pytest_plugins = ["tests.s3"]


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(str(tmp_path / "out"))
    return open_store(f"{request.getfixturevalue('s3_bucket')}/some/out")


def writing(data: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def test_a_file_is_put_replaced_read_and_removed(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read("a/x")
    store.write("a/x", b"1")
    store.write("a/x", b"22")
    assert store.read("a/x") == b"22"
    with store.open("a/x") as file:
        file.seek(1)
        assert file.read() == b"2"
    store.remove("a/x")
    store.remove("a/x")
    assert store.names("a") == []


def test_creating_never_replaces(store: Store) -> None:
    assert store.create("part", writing(b"first"))
    assert not store.create("part", writing(b"second"))
    assert store.read("part") == b"first"


def test_replacing_is_refused_where_somebody_else_was_faster(store: Store) -> None:
    assert not store.replace_if("lock", b"", b"mine")
    store.write("lock", b"old")
    assert store.replace_if("lock", b"old", b"mine")
    assert not store.replace_if("lock", b"old", b"theirs")
    assert store.read("lock") == b"mine"


def test_names_are_those_of_one_folder_in_order(store: Store) -> None:
    for name in ("b", "a", "folder/c", "folder/d", "_batchspec/e"):
        store.write(name, b"")
    assert store.names("") == ["a", "b"]
    assert store.names("folder") == ["c", "d"]
    assert store.names("none") == []


def test_moving(store: Store) -> None:
    store.write("a", b"1")
    store.move("a", "kept/a")
    assert (store.names(""), store.read("kept/a")) == ([], b"1")


def test_appended_pieces_are_there_after_closing(store: Store) -> None:
    appender = store.appender("journal/00001.w0")
    appender.append(b"one\n")
    appender.append(b"two\n")
    appender.flush_if_due()
    appender.close()
    names = store.names("journal")
    assert b"".join(store.read(f"journal/{name}") for name in names) == b"one\ntwo\n"
    assert all(name.startswith("00001.w0") for name in names)


def test_an_object_store_sends_segments_as_the_interval_passes(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("batchspec.io.object_store.time.monotonic", lambda: now[0])
    store = open_store(f"{s3_bucket}/out")
    appender = store.appender("j")
    appender.append(b"a")
    appender.flush_if_due()
    assert store.names("") == []
    now[0] += FLUSH_SECONDS
    appender.flush_if_due()
    appender.flush_if_due()
    appender.append(b"b")
    appender.close()
    assert store.names("") == ["j.000001", "j.000002"]


@pytest.mark.parametrize("failing", ["fsync", "link", "open"])
def test_r12_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    store = LocalStore(tmp_path)
    store.write("before", b"1")

    def no_space(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(file: BinaryIO) -> None:
        no_space()

    if failing != "open":
        monkeypatch.setattr(f"batchspec.io.store.os.{failing}", no_space)
        if failing == "link":
            monkeypatch.setattr("batchspec.io.store.os.rename", no_space)
    with pytest.raises(BatchspecError, match=r"No space left.*run the same command again"), storage_faults(store):
        store.create("part", full if failing == "open" else writing(b"1"))
    monkeypatch.undo()
    assert store.names("") == ["before"]
    assert store.names(TEMPORARY_FOLDER) == []


def test_a_file_system_without_hard_links_still_creates_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr("batchspec.io.store.os.link", refuse)
    store = LocalStore(tmp_path)
    assert store.create("part", writing(b"1"))
    monkeypatch.undo()
    assert not store.create("part", writing(b"2"))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://user:secret@bucket/out", "credentials"),
        ("s3://bucket/out?X-Amz-Signature=secret", "credentials"),
        ("warp://bucket/out", "warp"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_repeating_it(address: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        open_store(address)
    assert "secret" not in str(caught.value)


def test_a_store_that_cannot_be_reached_is_a_storage_fault(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://no-such-bucket-anywhere/out")
    with (
        pytest.raises(BatchspecError, match=r"cannot write the output s3://no-such-bucket-anywhere/out"),
        storage_faults(store),
    ):
        store.write("x", b"1")
