"""Prompt lookup where it matches, else the draft model: the free proposal first, the paid one for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchspec.types import Drafter, DraftRow, Proposal


class LookupThenDraftDrafter:
    def __init__(self, lookup: Drafter, draft: Drafter) -> None:
        self._lookup = lookup
        self._draft = draft

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        proposals = self._lookup.propose(rows)
        unmatched = [index for index, proposal in enumerate(proposals) if not proposal.from_lookup]
        drafted = self._draft.propose([_as_deep_as_it_pays(rows[index]) for index in unmatched]) if unmatched else []
        for index, proposal in zip(unmatched, drafted, strict=True):
            proposals[index] = proposal
        return proposals

    def forget(self, row_index: int) -> None:
        self._lookup.forget(row_index)
        self._draft.forget(row_index)


def _as_deep_as_it_pays(row: DraftRow) -> DraftRow:
    limit = row.route.num_draft_tokens
    return row if limit is None else replace(row, num_tokens=min(row.num_tokens, limit))
