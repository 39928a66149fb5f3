"""Memory in huge pages, where the system has them. Torch-free: a worker asks for it before it imports torch."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress

_REGION_BYTES = 64 * 2**20
_ALIGNMENT_BYTES = 4096

# More than this is not made resident while libraries are imported, which is all the time there is for it.
_MOST_BYTES_AHEAD = 2**30

# What load checks take of a region before the weights, and what alignment adds to those.
_SLACK_BYTES = 16 * 2**20


class _Region:
    """What is left of the last region, and the thread that makes it resident, if one does."""

    rest = memoryview(b"")
    filling: threading.Thread | None = None


def take(num_bytes: int) -> memoryview:
    """Zeros that are not resident until they are written to, unless they were asked for ahead. Small pieces share a
    region, which goes when the last of them does."""
    if _Region.filling is not None:
        _Region.filling.join()
        _Region.filling = None
    aligned = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if aligned > len(_Region.rest):
        _Region.rest = memoryview(_map(max(_REGION_BYTES, aligned)))
    taken, _Region.rest = _Region.rest[:num_bytes], _Region.rest[aligned:]
    return taken


def take_ahead(num_bytes: int) -> None:
    """Set memory aside for `num_bytes` and make up to 1 GiB of them resident in the background: a virtual machine has
    to get every page from its host, which may take longer than whatever is written there."""
    if num_bytes <= 0:
        return
    try:
        region = _map(num_bytes + _SLACK_BYTES)
    except OSError:  # who needs it will ask again, and say so
        return
    resident = ctypes.c_char.from_buffer(region)  # keeps the region mapped while the thread runs

    def fill() -> None:
        # ctypes lets the interpreter go on meanwhile
        ctypes.memset(ctypes.addressof(resident), 0, min(num_bytes, _MOST_BYTES_AHEAD))

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    _Region.rest, _Region.filling = memoryview(region), filling


def _map(num_bytes: int) -> mmap.mmap:
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
