"""A small causal LM that drafts for the target. It reads the same ids, keeps its own KV cache, and draws with the
rows' own noise, so that it mostly names the token that the target will draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from batchspec.engine import noise
from batchspec.engine.acceptance import draw
from batchspec.engine.kv_cache import KVCache
from batchspec.engine.model import PackedModel
from batchspec.engine.packed import Segment
from batchspec.engine.sampling import Floats, SampledRow, Sampler
from batchspec.types import NO_PROPOSAL, DraftRow, Proposal, SamplingParams

# Tokens that one catch-up forward feeds at most, over all rows; a row that lags no more than this is caught up by the
# draft step itself.
_CATCH_UP_TOKENS = 1024
_SMALL_LAG = 16


@dataclass(slots=True)
class _DraftState:
    """What the draft model has read of a row: `fed` are the tokens whose K and V are in its cache, the first
    `num_known` of them text, the others its own proposals of the last step."""

    slot: int
    fed: list[int] = field(default_factory=list)
    num_known: int = 0


@dataclass(slots=True)
class _Draft:
    """A proposal in the making."""

    row: DraftRow
    state: _DraftState
    tokens: list[int] = field(default_factory=list)
    probabilities: list[Floats] = field(default_factory=list)
    num_steps: int = 0
    done: bool = False


class DraftModelDrafter:
    """Batched over the drafting rows. A row that was not asked for a while is caught up when it is asked again; a
    row beyond the draft's own context or cache is declined."""

    def __init__(
        self, model: PackedModel, kv: KVCache, sampler: Sampler, stop_ids: frozenset[int], vocab_size: int, rule: str
    ) -> None:
        self.model = model
        self.kv = kv
        self._sampler = sampler
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._keeps_probabilities = rule == "rejection"
        self._states: dict[int, _DraftState] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        started = [self._start(row) for row in rows]
        drafts = [draft for draft in started if draft is not None]
        self._catch_up(drafts)
        while live := [draft for draft in drafts if not draft.done]:
            self._draft_one_more(live)
        return [NO_PROPOSAL if draft is None else self._proposal(draft) for draft in started]

    def forget(self, row_index: int) -> None:
        state = self._states.pop(row_index, None)
        if state is not None:
            self.kv.release_slot(state.slot)

    @torch.inference_mode()
    def agrees(
        self, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams, row_key: str
    ) -> list[bool]:
        """For every output token of a finished row: does the draft, given all tokens before it, name it?"""
        slot = self.kv.acquire_slot()
        try:
            fed = min(len(token_ids), self.model.context_tokens)
            self.kv.reserve(slot, fed)
            wanted = range(num_prompt_tokens - 1, fed - 1)
            logits = self.model.forward([Segment(slot, token_ids[:fed], 0, True, wanted)], self.kv)
            rows = [
                SampledRow(sampling, row_key, i, token_ids[: num_prompt_tokens + i], num_prompt_tokens)
                for i in range(len(wanted))
            ]
            named = self._sampler.choose(fit_vocabulary(logits, self._vocab_size), rows)
        finally:
            self.kv.release_slot(slot)
        agreed = [a == b for a, b in zip(named, token_ids[num_prompt_tokens:], strict=False)]
        return agreed + [False] * (len(token_ids) - num_prompt_tokens - len(agreed))

    def _start(self, row: DraftRow) -> _Draft | None:
        """Roll the row's state back to what is still text, and reserve its cache; None where that cannot be had, or
        would take more than it brings."""
        length = len(row.token_ids)
        if row.num_tokens <= 0 or length + row.num_tokens > self.model.context_tokens:
            return None
        state = self._states.get(row.row_index)
        lag = length - (0 if state is None else len(state.fed))
        num_left = row.sampling.max_new_tokens - (length - row.num_prompt_tokens)
        most_lag = row.route.most_lag_per_token
        if most_lag is not None and lag > max(_SMALL_LAG, most_lag * num_left):
            return None
        if state is None:
            state = self._states[row.row_index] = _DraftState(self.kv.acquire_slot())
        common = min(state.num_known, length - 1)
        while common < min(len(state.fed), length - 1) and state.fed[common] == row.token_ids[common]:
            common += 1
        del state.fed[common:]
        if max(row.token_ids[common:]) >= self.model.vocab_size:
            return None  # the target's output layer is wider, and it wrote an id that the draft cannot read
        state.num_known = length
        self.kv.trim(state.slot, common)
        if not self.kv.reserve(state.slot, length + row.num_tokens):
            self.forget(row.row_index)
            return None
        return _Draft(row, state)

    def _catch_up(self, drafts: Sequence[_Draft]) -> None:
        """Feed rows that lag far behind, several at a time, in bounded forwards."""
        while True:
            room = _CATCH_UP_TOKENS
            behind: list[tuple[_Draft, Sequence[int]]] = []
            for draft in drafts:
                fed, length = len(draft.state.fed), len(draft.row.token_ids)
                if length - fed > _SMALL_LAG and room > 0:
                    behind.append((draft, draft.row.token_ids[fed : min(length - 1, fed + room)]))
                    room -= len(behind[-1][1])
            if not behind:
                return
            segments = [Segment(d.state.slot, tokens, len(d.state.fed), True, ()) for d, tokens in behind]
            self.model.forward(segments, self.kv)
            for draft, tokens in behind:
                draft.state.fed += tokens

    def _draft_one_more(self, drafts: Sequence[_Draft]) -> None:
        """One draft step: every row feeds what the draft has not read yet and proposes the next token."""
        segments = []
        for draft in drafts:
            fed = len(draft.state.fed)
            unread = draft.tokens[-1:] if draft.tokens else draft.row.token_ids[fed:]
            segments.append(Segment(draft.state.slot, unread, fed, False, (len(unread) - 1,)))
            draft.state.fed += unread
        logits = fit_vocabulary(self.model.forward(segments, self.kv), self._vocab_size)
        sampled = [_sampled_row(draft) for draft in drafts]
        for draft, token in zip(drafts, self._choose(logits, sampled, drafts), strict=True):
            draft.tokens.append(token)
            draft.num_steps += 1
            draft.done = len(draft.tokens) == draft.row.num_tokens or token in self._stop_ids

    def _choose(self, logits: torch.Tensor, sampled: Sequence[SampledRow], drafts: Sequence[_Draft]) -> list[int]:
        """By the target's own noise, or, under the rejection rule, from q with noise of its own, keeping q."""
        if not self._keeps_probabilities:
            return self._sampler.choose(logits, sampled)
        chosen = []
        for q, row, draft in zip(self._sampler.distribution(logits, sampled), sampled, drafts, strict=True):
            draft.probabilities.append(q)
            chosen.append(draw(q, row, noise.DRAFT))
        return chosen

    def _proposal(self, draft: _Draft) -> Proposal:
        probabilities = draft.probabilities if self._keeps_probabilities else None
        return Proposal(tuple(draft.tokens), num_draft_steps=draft.num_steps, probabilities=probabilities)


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Draft logits as wide as the target's: surplus ids are padding, missing ones cannot be proposed."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[:, :vocab_size]


def _sampled_row(draft: _Draft) -> SampledRow:
    row = draft.row
    return SampledRow(
        sampling=row.sampling,
        row_key=row.row_key,
        output_index=len(row.token_ids) - row.num_prompt_tokens + len(draft.tokens),
        token_ids=row.token_ids,
        num_prompt_tokens=row.num_prompt_tokens,
        block=tuple(draft.tokens),
    )
