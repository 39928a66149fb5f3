"""CPU memory: what there is, and zeros in huge pages where the system has them. A step reads all weights and all
context, and with pages of 4 KiB it waits for their addresses, above all in a virtual machine.

Torch is imported by `zeros` alone: a worker asks for memory before it has imported torch.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_REGION_BYTES = 64 * 2**20
_ALIGNMENT_BYTES = 4096

# More than this is not made resident while libraries are imported, which is all the time there is for it.
_MOST_BYTES_AHEAD = 2**30

# What load checks take of a region before the weights, and what alignment adds to those.
_SLACK_BYTES = 16 * 2**20

# What is taken to be free where the system does not say.
_UNKNOWN_FREE_BYTES = 4 * 2**30

# Limit, use, and the line of memory.stat that counts file pages to be had back at once: control groups 2, then 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that is not resident until it is written to, unless it was asked for ahead."""
    import torch

    return torch.frombuffer(take(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


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


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could take now: what the machine has (Linux: MemAvailable), or what its container may
    still use if that is less."""
    meminfo = _numbers(root / "proc/meminfo")
    machine = meminfo["MemAvailable"] * 1024 if "MemAvailable" in meminfo else _UNKNOWN_FREE_BYTES
    return max(0, min([machine, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> list[int]:
    """Bytes left under each limit of this process's control groups. Inside a container its own group is the root."""
    left = []
    for group in {*_own_groups(root), root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"}:
        for limit_file, use_file, reclaimable in _GROUP_FILES:
            limit, use = _number(group / limit_file), _number(group / use_file)
            if limit is not None and use is not None:
                left.append(limit - use + _numbers(group / "memory.stat").get(reclaimable, 0))
    return left


def _own_groups(root: Path) -> list[Path]:
    """The control group of this process and those around it (control groups 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    top = root / "sys/fs/cgroup"
    folder = top / own.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]


def _number(path: Path) -> int | None:
    """The number that a file holds; None where it holds none ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line by the name before it."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _map(num_bytes: int) -> mmap.mmap:
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
