"""CPU memory in huge pages, where the system has them: a step reads all weights and all context, and with pages of
4 KiB it waits for their addresses, above all in a virtual machine."""

from __future__ import annotations

import math
import mmap

import torch

_REGION_BYTES = 64 * 2**20
_ALIGNMENT_BYTES = 4096


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that is not resident until it is written to. Small ones share a region, which goes when the
    last of them does."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _take(-(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)[:num_bytes].view(dtype).view(shape)


class _Region:
    rest = torch.empty(0, dtype=torch.uint8)


def _take(num_bytes: int) -> torch.Tensor:
    if num_bytes > len(_Region.rest):
        region = mmap.mmap(-1, max(_REGION_BYTES, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        _Region.rest = torch.frombuffer(region, dtype=torch.uint8)
    taken, _Region.rest = _Region.rest[:num_bytes], _Region.rest[num_bytes:]
    return taken
