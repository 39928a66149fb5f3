"""Prompt lookup: propose what followed an earlier occurrence of the row's latest tokens in its own prompt + output.

No model, and no memory but an index.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.ngrams import NgramIndex, continuation
from batchspec.types import NO_PROPOSAL, DraftRow, Proposal


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
        count = min(row.num_tokens, row.route.tokens_for_match(match.grade))
        if count <= 0:
            return Proposal(from_lookup=True)  # there is a match, and it is not worth a token
        return Proposal(continuation(row.token_ids, match.follower, count), from_lookup=True)

    def forget(self, row_index: int) -> None:
        self._indexes.pop(row_index, None)
