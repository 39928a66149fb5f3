"""Memory for weights and caches: zeros, whoever made them resident."""

import pytest

from batchspec.engine import pages

MIB = 2**20


@pytest.fixture(autouse=True)
def fresh_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages._Region, "rest", memoryview(b""))
    monkeypatch.setattr(pages._Region, "filling", None)


@pytest.mark.parametrize("ahead", [0, 1, 4096, 3 * MIB, 200 * MIB])
@pytest.mark.parametrize("sizes", [[1], [4096, 1, 8192], [MIB, 2 * MIB, 3 * MIB], [70 * MIB]])
def test_pieces_are_zero_apart_and_writable(ahead: int, sizes: list[int]) -> None:
    pages.take_ahead(ahead)
    pieces = [pages.take(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    for index, piece in enumerate(pieces, start=1):
        assert bytes(piece[:1]) == bytes(piece[-1:]) == b"\0"
        piece[:] = bytes([index]) * len(piece)
    for index, piece in enumerate(pieces, start=1):
        assert {piece[0], piece[-1]} == {index}


def test_what_was_asked_for_ahead_is_what_is_taken() -> None:
    pages.take_ahead(3 * MIB)
    region = pages._Region.rest.obj
    assert pages.take(2 * MIB).obj is region
    assert pages.take(MIB).obj is region
    assert pages.take(MIB).obj is not region


def test_no_more_is_made_resident_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MOST_BYTES_AHEAD", 2 * MIB)
    pages.take_ahead(2**60)
    assert len(pages._Region.rest) == 2 * MIB
