"""Which part of a proposal the target keeps, and the one token that it adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from batchspec.engine import noise
from batchspec.engine.sampling import Floats, SampledRow, Sampler
from batchspec.engine.sequence import StepRow

Block = tuple[list[int], int]
"""The tokens that a step gives a row (accepted prefix, then one of the target's own), and how many were accepted."""


class AcceptanceRule(Protocol):
    @property
    def fixes_route(self) -> bool:
        """A row keeps the route of its first step, since the route has a part in its text."""
        ...

    def blocks(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> list[Block]:
        """logits [sum of num_choices, vocab], row by row -> a block per row, empty for a row that is not at its end."""
        ...


class CoupledRule:
    """A proposal holds iff it is the very token that the target draws there by the row's own noise (greedy: its
    argmax). The text is that of target-only decoding, whatever was proposed."""

    fixes_route = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def blocks(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> list[Block]:
        sampled = [sampled_row(row, i) for row in rows for i in range(row.num_choices)]
        choices = iter(self._sampler.choose(logits, sampled) if sampled else ())
        blocks: list[Block] = []
        for row in rows:
            chosen = [next(choices) for _ in range(row.num_choices)]
            num_accepted = 0
            while num_accepted < len(chosen) - 1 and chosen[num_accepted] == row.proposal.token_ids[num_accepted]:
                num_accepted += 1
            blocks.append((chosen[: num_accepted + 1], num_accepted))
        return blocks


class RejectionRule:
    """Speculative sampling (Leviathan et al., 2023; Chen et al., 2023): accept with min(1, p / q), else draw from
    normalize(max(0, p - q)). Every token has exactly the target's distribution; the text depends on the proposals."""

    fixes_route = True

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._coupled = CoupledRule(sampler)

    def blocks(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> list[Block]:
        judged = [bool(row.proposal.token_ids) and not row.sequence.request.sampling.greedy for row in rows]
        by_choice = torch.tensor(
            [j for j, row in zip(judged, rows, strict=True) for _ in range(row.num_choices)]
        ).bool()
        judged_rows = [row for j, row in zip(judged, rows, strict=True) if j]
        others = [row for j, row in zip(judged, rows, strict=True) if not j]
        sampled = [sampled_row(row, i) for row in judged_rows for i in range(row.num_choices)]
        target = self._sampler.distribution(logits[by_choice], sampled) if sampled else None
        chosen = iter(self._coupled.blocks(logits[~by_choice], others) if others else ())
        blocks: list[Block] = []
        start = 0
        for j, row in zip(judged, rows, strict=True):
            if target is None or not j:
                blocks.append(next(chosen))
                continue
            end = start + row.num_choices
            blocks.append(judge(target[start:end], row, sampled[start:end]))
            start = end
        return blocks


def judge(target: Floats, row: StepRow, sampled: Sequence[SampledRow]) -> Block:
    """Accept or reject the row's n proposals in turn, given the target's probabilities [n + 1, vocab]."""
    proposed = row.proposal.token_ids
    for i, token in enumerate(proposed):
        p, q = target[i], proposal_distribution(row, i, target.shape[1])
        u = noise.uniform(*_stream(sampled[i]), np.array([noise.ACCEPTANCE]))[0]
        if u * q[token] >= p[token]:
            return [*proposed[:i], draw(residual(p, q), sampled[i], noise.RESIDUAL)], i
    return [*proposed, draw(target[-1], sampled[-1])], len(proposed)


def residual(p: Floats, q: Floats) -> Floats:
    """What the target would write more often than it was proposed, not normalised."""
    return np.maximum(0.0, p - q)


def proposal_distribution(row: StepRow, index: int, vocab_size: int) -> Floats:
    """What the proposal's token `index` was drawn from; prompt lookup is certain of its token."""
    if row.proposal.probabilities is not None:
        q: Floats = row.proposal.probabilities[index]
        return q
    certain = np.zeros(vocab_size)
    certain[row.proposal.token_ids[index]] = 1.0
    return certain


def draw(weights: Floats, row: SampledRow, first_token: int = 0) -> int:
    """A token by its weight [vocab], not normalised; `first_token` keeps this draw's noise apart from others'."""
    with np.errstate(divide="ignore"):
        arrivals = noise.exponential(*_stream(row), np.arange(len(weights)) + first_token) / weights
    return int(arrivals.argmin())


def _stream(
    row: SampledRow,
) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    key = noise.stream_key(row.sampling.seed, row.row_key)
    return np.array([key], dtype=np.uint64), np.array([row.output_index], dtype=np.int64)


def sampled_row(row: StepRow, index: int) -> SampledRow:
    """The logits row that follows `index` tokens of the row's proposal."""
    sequence = row.sequence
    return SampledRow(
        sampling=sequence.request.sampling,
        row_key=sequence.request.row_key,
        output_index=sequence.num_output_tokens + index,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        block=row.proposal.token_ids[:index],
    )
