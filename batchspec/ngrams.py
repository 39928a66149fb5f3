"""The n-gram index behind prompt lookup, shared by the drafter and by replay. Pure; no torch.

Method: prompt lookup decoding (Saxena, 2023), also known as n-gram speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from batchspec.config import MAX_MATCH_TOKENS

# More candidates than this are older than it pays to look at.
MAX_CANDIDATES = 16

# A match that is this much shorter than the longest still says something of what follows.
_NEARLY_TOKENS = 4


class Support(IntEnum):
    """What the other places with a match nearly as long say of the token that follows."""

    CONTRADICTED = 0
    ALONE = 1
    AGREED = 2


class Match(NamedTuple):
    """`follower` is the position behind the match, from which to copy; `num_tokens` is how many tokens match."""

    follower: int
    num_tokens: int
    support: Support

    @property
    def grade(self) -> int:
        return grade_of(self.num_tokens, self.support)


def grade_of(num_tokens: int, support: int) -> int:
    """One number for all that tells matches apart."""
    return num_tokens * len(Support) + support


NUM_GRADES = grade_of(MAX_MATCH_TOKENS, Support.AGREED) + 1


class NgramIndex:
    """Where each n-gram of one row was followed by something. Grows with the row, so that a lookup costs the same
    whatever the length of the context."""

    def __init__(self, num_tokens: int) -> None:
        self._n = num_tokens
        self._num_indexed = num_tokens
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index every n-gram that has a follower and was not seen yet."""
        for follower in range(self._num_indexed, len(token_ids)):
            self._followers.setdefault(tuple(token_ids[follower - self._n : follower]), []).append(follower)
        self._num_indexed = max(self._num_indexed, len(token_ids))

    def longest_match(self, token_ids: Sequence[int]) -> Match | None:
        """The longest match of the row's end, the latest of equals."""
        followers = self._followers.get(tuple(token_ids[len(token_ids) - self._n :]))
        if followers is None:
            return None
        candidates = [(self._length(token_ids, f), f) for f in followers[: -MAX_CANDIDATES - 1 : -1]]
        length, follower = max(candidates)
        nearly = [token_ids[f] for found, f in candidates if found >= length - _NEARLY_TOKENS]
        if len(nearly) == 1:
            return Match(follower, length, Support.ALONE)
        agreed = nearly.count(token_ids[follower]) == len(nearly)
        return Match(follower, length, Support.AGREED if agreed else Support.CONTRADICTED)

    def _length(self, token_ids: Sequence[int], follower: int) -> int:
        """Tokens before `follower` that are those at the row's end."""
        length, end, limit = self._n, len(token_ids), min(MAX_MATCH_TOKENS, follower)
        while length < limit and token_ids[follower - length - 1] == token_ids[end - length - 1]:
            length += 1
        return length


def continuation(token_ids: Sequence[int], follower: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `follower` on; past the row's end the copy goes on over itself, as in a repeating text."""
    copied: list[int] = list(token_ids[follower : follower + count])
    period = len(copied)
    while len(copied) < count:
        copied.append(copied[-period])
    return tuple(copied)
