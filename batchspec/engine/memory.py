"""CPU memory: what there is, and tensors in huge pages where the system has them. A step reads all weights and all
context, and with pages of 4 KiB it waits for their addresses, above all in a virtual machine."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from batchspec.engine import pages

# What is taken to be free where the system does not say.
_UNKNOWN_FREE_BYTES = 4 * 2**30

# Limit, use, and the line of memory.stat that counts file pages to be had back at once: control groups 2, then 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that is not resident until it is written to. Small ones share a region, which goes when the
    last of them does."""
    return torch.frombuffer(pages.take(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


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
