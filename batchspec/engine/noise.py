"""Noise as a pure function: the same (seed, row, output position, token) always draws the same number.

That is what makes sampled text independent of batch, route, draft length and worker (Gumbel-max coupling; Daliri,
Musco & Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIT = 2.0**-53

# Stand-ins for a token id, beyond any vocabulary, for draws that belong to a position and not to a token.
REST_OF_VOCABULARY = 1 << 40
ACCEPTANCE = (1 << 40) + 1
RESIDUAL = 1 << 41
DRAFT = 1 << 42


@lru_cache(maxsize=4096)
def stream_key(seed: int, row_key: str) -> int:
    """64 bits that name the noise stream of one row."""
    digest = hashlib.blake2b(row_key.encode(), digest_size=8, key=(seed % 2**64).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Uniform in (0, 1), 53 bits, by broadcasting stream keys, output positions and token ids."""
    with np.errstate(over="ignore"):
        state = _mix(keys + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
        bits = _mix(_mix(state + _GOLDEN * (tokens.astype(np.uint64) + np.uint64(1))) ^ state)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * _UNIT


def exponential(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Exponential(1). The race is won by small values, and -log1p(-u) keeps all of a small u's bits."""
    return -np.log1p(-uniform(keys, positions, tokens))
