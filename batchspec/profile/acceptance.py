"""Acceptance by replay: exact text makes it replayable. The outputs of a sample are decoded once, target-only; every
drafter is then judged against them without running the target again. Pure; no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from batchspec.config import MAX_SPECULATIVE_TOKENS
from batchspec.ngrams import NgramIndex, continuation
from batchspec.profile.records import AcceptanceCell
from batchspec.types import Method


@dataclass(frozen=True)
class DecodedRow:
    """A sampled row with its exact output."""

    request_class: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int


# (tokens matched, support) of the match that proposed; of a draft model neither
_Kind = tuple[int | None, int | None]


@dataclass
class _Tally:
    num_steps: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_SPECULATIVE_TOKENS)
    rejected: list[int] = field(default_factory=lambda: [0] * MAX_SPECULATIVE_TOKENS)

    def add(self, num_accepted: int, rejected: bool) -> None:
        self.num_steps += 1
        for position in range(num_accepted):
            self.accepted[position] += 1
        if rejected:
            self.rejected[num_accepted] += 1


def replay_lookup(rows: Iterable[DecodedRow], max_tokens: int, min_match_tokens: int) -> list[AcceptanceCell]:
    """Prompt lookup's cells by class and grade of match: each row stepped through as the engine would, proposing
    `max_tokens` wherever at least `min_match_tokens` match."""
    tallies: dict[str, dict[tuple[int, int], _Tally]] = defaultdict(lambda: defaultdict(_Tally))
    num_steps: dict[str, int] = defaultdict(int)
    for row in rows:
        index = NgramIndex(min_match_tokens)
        place = row.num_prompt_tokens + 1
        while place < len(row.token_ids):
            num_steps[row.request_class] += 1
            seen = row.token_ids[:place]
            index.extend(seen)
            room = min(max_tokens, len(row.token_ids) - place - 1)
            match = index.longest_match(seen)
            num_accepted = 0
            if match is not None and room > 0:
                proposal = continuation(seen, match.follower, room)
                num_accepted = _agreement(proposal, row.token_ids[place:])
                tallies[row.request_class][match[1:]].add(num_accepted, num_accepted < room)
            place += num_accepted + 1
    return [
        _cell(request_class, Method.PROMPT_LOOKUP, min_match_tokens, kind, steps, tally)
        for request_class, steps in num_steps.items()
        for kind, tally in sorted(tallies[request_class].items()) or [((min_match_tokens, 0), _Tally())]
    ]


def replay_draft(
    rows: Sequence[DecodedRow], agrees: Sequence[Sequence[bool]], max_tokens: int, min_match_tokens: int | None = None
) -> list[AcceptanceCell]:
    """A draft model's cells by class, from its teacher-forced choices: `agrees[r][i]` says that it names output token
    i of row r. With `min_match_tokens`, only the steps in which prompt lookup finds nothing count (lookup_then_draft);
    lookup's own proposals are taken to be right as far as they are."""
    method = Method.DRAFT_MODEL if min_match_tokens is None else Method.LOOKUP_THEN_DRAFT
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    num_steps: dict[str, int] = defaultdict(int)
    for row, right in zip(rows, agrees, strict=True):
        index = None if min_match_tokens is None else NgramIndex(min_match_tokens)
        place = row.num_prompt_tokens + 1
        while place < len(row.token_ids):
            num_steps[row.request_class] += 1
            room = min(max_tokens, len(row.token_ids) - place - 1)
            seen = row.token_ids[:place]
            match = None
            if index is not None:
                index.extend(seen)
                match = index.longest_match(seen)
            num_accepted = 0
            if match is not None:
                num_accepted = _agreement(continuation(seen, match.follower, room), row.token_ids[place:])
            elif room > 0:
                ahead = right[place - row.num_prompt_tokens :][:room]
                num_accepted = next((i for i, ok in enumerate(ahead) if not ok), len(ahead))
                tallies[row.request_class].add(num_accepted, num_accepted < room)
            place += num_accepted + 1
    return [
        _cell(c, method, min_match_tokens, (None, None), num_steps[c], tally) for c, tally in sorted(tallies.items())
    ]


def _agreement(proposal: Sequence[int], truth: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(proposal, truth, strict=False)) if a != b), len(proposal))


def _cell(
    request_class: str,
    method: Method,
    min_match_tokens: int | None,
    kind: _Kind,
    num_class_steps: int,
    tally: _Tally,
) -> AcceptanceCell:
    depth = max((i + 1 for i in range(MAX_SPECULATIVE_TOKENS) if tally.accepted[i] + tally.rejected[i]), default=0)
    return AcceptanceCell(
        request_class,
        method.value,
        min_match_tokens,
        *kind,
        num_class_steps,
        tally.num_steps,
        tuple(tally.accepted[:depth]),
        tuple(tally.rejected[:depth]),
    )
