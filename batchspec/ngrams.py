"""The n-gram index behind prompt lookup, shared by the drafter and by replay. Pure; no torch.

Method: prompt lookup decoding (Saxena, 2023), also known as n-gram speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.config import MAX_MATCH_TOKENS

# More candidates than this are older than it pays to look at.
MAX_CANDIDATES = 16


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

    def longest_match(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """(position of the follower, tokens matched) of the longest match of the row's end, the latest of equals."""
        end = len(token_ids)
        best: tuple[int, int] | None = None
        for follower in self._followers.get(tuple(token_ids[end - self._n :]), [])[: -MAX_CANDIDATES - 1 : -1]:
            length = self._n
            limit = min(MAX_MATCH_TOKENS, follower)
            while length < limit and token_ids[follower - length - 1] == token_ids[end - length - 1]:
                length += 1
            if best is None or length > best[1]:
                best = (follower, length)
            if length >= MAX_MATCH_TOKENS:
                break
        return best


def continuation(token_ids: Sequence[int], follower: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `follower` on; past the row's end the copy goes on over itself, as in a repeating text."""
    copied: list[int] = list(token_ids[follower : follower + count])
    period = len(copied)
    while len(copied) < count:
        copied.append(copied[-period])
    return tuple(copied)
