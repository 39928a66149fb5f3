"""From logits to the tokens that the target writes: processors, filters, and a draw by the row's own noise.

A token is drawn by an exponential race, which is Gumbel-max: token i with probability p_i arrives at E_i / p_i, the
first one wins. E_i is a pure function of seed, row, output position and token, so equal logits give an equal token
whatever else is in the batch, and a draft model that races with the same E_i mostly names the same winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchspec.engine import cpu, noise
from batchspec.engine.processors import apply_processors
from batchspec.types import SamplingParams

# Tokens looked at first; enough for nearly every row, and a tenth of the cost of sorting the vocabulary.
FIRST_CANDIDATES = 64
_MORE_CANDIDATES = 16

# What a race can end with instead of a token id.
_UNDECIDED = -1
_REST = -2

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One logits row: whose it is, which output position it predicts, and what stands before that position.

    `token_ids` are the row's prompt + committed output, `block` the proposals between them and this position: so
    processors see at every position of a block what target-only decoding would show them.
    """

    sampling: SamplingParams
    row_key: str
    output_index: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    block: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens looked at, most probable first: ids [R, C] and probabilities [R, C], 0 where a filter removes them.

    `rest` [R] is the mass of the tokens that were not looked at and that no filter removes; NaN where the filters
    cannot be settled by this many candidates.
    """

    ids: Ids
    probabilities: Floats
    rest: Floats


class Sampler:
    """Chooses a token for every logits row of a step, of the target or, with the same noise, of a draft model."""

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = sorted(stop_ids)

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """logits [R, vocab] (may be written to) -> R token ids. Greedy ties go to the lowest id."""
        logits = apply_processors(logits, rows, self._stop_ids)
        drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if len(drawn) == len(rows):
            return self._draw(logits, rows)
        chosen: list[int] = cpu.argmax(logits).tolist()
        if drawn:
            tokens = self._draw(logits[drawn], [rows[index] for index in drawn])
            for index, token in zip(drawn, tokens, strict=True):
                chosen[index] = token
        return chosen

    @torch.inference_mode()
    def distribution(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> Floats:
        """The probabilities [R, vocab] that `choose` draws from; for a greedy row all on one token."""
        logits = apply_processors(logits, rows, self._stop_ids)
        dense = np.zeros(tuple(logits.shape))
        greedy = [index for index, row in enumerate(rows) if row.sampling.greedy]
        drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if greedy:
            dense[greedy, logits[greedy].argmax(dim=-1).cpu().numpy()] = 1.0
        if drawn:
            found = find_candidates(logits[drawn], [rows[index].sampling for index in drawn], logits.shape[1])
            dense[np.array(drawn)[:, None], found.ids] = found.probabilities
        return dense

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
        keys = np.array([noise.stream_key(row.sampling.seed, row.row_key) for row in rows], dtype=np.uint64)
        positions = np.array([row.output_index for row in rows], dtype=np.int64)
        tokens = [_UNDECIDED] * len(rows)
        undecided, width = list(range(len(rows))), FIRST_CANDIDATES
        while undecided:
            found = find_candidates(logits[undecided], [rows[i].sampling for i in undecided], width)
            winners = race(found, keys[undecided], positions[undecided])
            for place, index in enumerate(undecided):
                tokens[index] = winners[place]
                if winners[place] == _REST:
                    tokens[index] = race_of_rest(
                        logits[index], rows[index].sampling, found.ids[place], keys[index], positions[index]
                    )
            undecided = [index for index in undecided if tokens[index] == _UNDECIDED]
            width *= _MORE_CANDIDATES
        return tokens


def find_candidates(logits: torch.Tensor, params: Sequence[SamplingParams], width: int) -> Candidates:
    """The `width` most probable tokens of each row [R, vocab], filtered by temperature, top-k, top-p, min-p in turn."""
    width = min(width, logits.shape[1])
    whole = width == logits.shape[1]
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
    if len(params) == 1:
        # a reduction to a single number is split over threads and sums in another order than that of several rows
        logits, temperatures = logits.expand(2, -1), temperatures.expand(2)
    scaled = logits.float() / temperatures[:, None]
    log_total = torch.logsumexp(scaled, dim=-1, keepdim=True)
    values, ids = scaled.topk(width, dim=-1)
    log_p = (values.double() - log_total.double())[: len(params)].cpu().numpy()

    top_k = np.array([p.top_k or logits.shape[1] for p in params])
    top_p = np.array([p.top_p for p in params])
    min_p = np.array([p.min_p for p in params])
    filtered = (top_k < logits.shape[1]) | (top_p < 1) | (min_p > 0)

    p = np.exp(log_p)
    kth = log_p[np.arange(len(params)), np.minimum(top_k, width) - 1]
    p = np.where(log_p >= kth[:, None], p, 0.0)  # tokens that tie with the k-th stay, as in transformers
    if (top_k < logits.shape[1]).any():
        p = np.where((top_k < logits.shape[1])[:, None], p / p.sum(axis=1, keepdims=True), p)
    before = np.cumsum(p, axis=1) - p
    reached = np.where(before < top_p[:, None], p, 0.0)
    kept = np.where(p >= min_p[:, None] * p[:, :1], reached, 0.0)

    suffices = (kth > log_p[:, -1]) | ((top_k >= logits.shape[1]) & ((kept[:, -1] == 0.0) | ~filtered)) | whole
    rest = np.where(filtered | whole, 0.0, np.maximum(0.0, 1.0 - p.sum(axis=1)))
    total = np.where(filtered | whole, kept.sum(axis=1), 1.0)
    return Candidates(ids[: len(params)].cpu().numpy(), kept / total[:, None], np.where(suffices, rest, np.nan))


def race(found: Candidates, keys: npt.NDArray[np.uint64], positions: Ids) -> list[int]:
    """The winner of each row; _UNDECIDED where its filters reach beyond the candidates, _REST where the tokens that
    were not looked at arrive first, together."""
    with np.errstate(divide="ignore"):
        arrivals = noise.exponential(keys[:, None], positions[:, None], found.ids) / found.probabilities
        rest = noise.exponential(keys, positions, np.full(len(keys), noise.REST_OF_VOCABULARY)) / found.rest
    winners = found.ids[np.arange(len(keys)), arrivals.argmin(axis=1)]
    winners = np.where(rest < arrivals.min(axis=1), _REST, winners)
    decided: list[int] = np.where(np.isnan(found.rest), _UNDECIDED, winners).tolist()
    return decided


def race_of_rest(logits: torch.Tensor, params: SamplingParams, seen: Ids, key: np.uint64, position: np.int64) -> int:
    """The winner among the tokens of an unfiltered row [vocab] that are not in `seen`, by their own noise."""
    scaled = logits.double().cpu().numpy() / params.temperature
    scaled[seen] = -np.inf
    with np.errstate(divide="ignore"):
        late = np.log(noise.exponential(np.array([key]), np.array([position]), np.arange(len(scaled)))) - scaled
    return int(late.argmin())
