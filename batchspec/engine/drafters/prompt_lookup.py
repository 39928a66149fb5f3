"""Prompt lookup: propose what followed an earlier occurrence of the row's latest tokens in its own prompt + output.

Method: prompt lookup decoding (Saxena, 2023), also known as n-gram speculation. No model, no memory but an index.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.config import MAX_MATCH_TOKENS
from batchspec.types import NO_PROPOSAL, DraftRow, Proposal

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


class PromptLookupDrafter:
    """Looks rows up in themselves. Catches up lazily: a row that was not asked for a while costs nothing meanwhile."""

    def __init__(self) -> None:
        self._indexes: dict[int, dict[int, NgramIndex]] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._propose_one(row) for row in rows]

    def _propose_one(self, row: DraftRow) -> Proposal:
        if row.num_tokens <= 0:
            return NO_PROPOSAL
        n = row.route.min_match_tokens
        indexes = self._indexes.setdefault(row.row_index, {})
        index = indexes.setdefault(n, NgramIndex(n))
        index.extend(row.token_ids)
        match = index.longest_match(row.token_ids)
        if match is None:
            return NO_PROPOSAL
        follower, match_tokens = match
        count = min(row.num_tokens, row.route.tokens_for_match(match_tokens))
        if count <= 0:
            return NO_PROPOSAL
        return Proposal(continuation(row.token_ids, follower, count), from_lookup=True)

    def forget(self, row_index: int) -> None:
        self._indexes.pop(row_index, None)
