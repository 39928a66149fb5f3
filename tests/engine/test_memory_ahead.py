"""Memory for weights and caches: zeros, whoever made them resident."""

import ctypes
import mmap
from collections.abc import Iterator

import pytest

from batchspec.engine import memory

MIB = 2**20


@pytest.fixture(autouse=True)
def fresh_region(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory._Region, "rest", memoryview(b""))
    monkeypatch.setattr(memory._Region, "filling", None)
    yield
    memory.take(0)  # waits for the thread


def resident_bytes(piece: memoryview) -> int:
    """Bytes of whole pages that are in memory (Linux)."""
    num_pages = len(piece) // mmap.PAGESIZE
    there = (ctypes.c_ubyte * num_pages)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(piece)), there) == 0
    return sum(page & 1 for page in there) * mmap.PAGESIZE


@pytest.mark.parametrize("ahead", [0, 1, 4096, 3 * MIB, 200 * MIB])
@pytest.mark.parametrize("sizes", [[1], [4096, 1, 8192], [MIB, 2 * MIB, 3 * MIB], [70 * MIB]])
def test_pieces_are_zero_apart_and_writable(ahead: int, sizes: list[int]) -> None:
    memory.take_ahead(ahead)
    pieces = [memory.take(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    for index, piece in enumerate(pieces, start=1):
        assert bytes(piece[:1]) == bytes(piece[-1:]) == b"\0"
        piece[:] = bytes([index]) * len(piece)
    for index, piece in enumerate(pieces, start=1):
        assert {piece[0], piece[-1]} == {index}


def test_what_was_asked_for_ahead_is_resident_and_taken_first() -> None:
    memory.take_ahead(4 * MIB)
    region = memory._Region.rest.obj
    pieces = [memory.take(2 * MIB), memory.take(2 * MIB)]
    assert [resident_bytes(piece) for piece in pieces] == [2 * MIB, 2 * MIB]
    assert all(piece.obj is region for piece in pieces)


def test_what_was_not_asked_for_is_not_resident() -> None:
    assert resident_bytes(memory.take(8 * MIB)) == 0


def test_no_more_is_made_resident_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST_BYTES_AHEAD", 4 * MIB)
    memory.take_ahead(64 * MIB)
    assert resident_bytes(memory.take(4 * MIB)) == 4 * MIB
    assert resident_bytes(memory.take(32 * MIB)) <= 2 * MIB  # the rest of a huge page


def test_more_than_can_be_mapped_is_left_to_who_needs_it() -> None:
    memory.take_ahead(2**60)
    assert len(memory.take(MIB)) == MIB
