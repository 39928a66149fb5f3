"""Logit processors: what changes a row's logits before it is sampled, at every position of a block alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchspec.types import SamplingParams

if TYPE_CHECKING:
    from batchspec.engine.sampling import SampledRow


def apply_processors(logits: torch.Tensor, rows: Sequence[SampledRow], stop_ids: Sequence[int]) -> torch.Tensor:
    """logits [R, vocab] as the rows' settings want them; the tensor itself where no row wants anything.

    In turn: repetition penalty (prompt and output; Keskar et al., 2019), presence and frequency penalties (output
    only), logit bias, and no end of sequence before `min_new_tokens`.
    """
    held = [i for i, row in enumerate(rows) if row.output_index < row.sampling.min_new_tokens]
    changed = [i for i, row in enumerate(rows) if _has_processor(row.sampling)]
    if not changed and not (held and stop_ids):
        return logits
    logits = logits.float()
    for index in changed:
        _process(logits[index], rows[index])
    if held and stop_ids:
        logits[torch.tensor(held)[:, None], torch.tensor(stop_ids)] = -torch.inf
    return logits


def _has_processor(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
    )


def _process(logits: torch.Tensor, row: SampledRow) -> None:
    """Change one row [vocab] in place."""
    params = row.sampling
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique([*row.token_ids, *row.block])).to(logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        written = [*row.token_ids[row.num_prompt_tokens :], *row.block]
        tokens, counts = np.unique(np.array(written, dtype=np.int64), return_counts=True)
        ids = torch.from_numpy(tokens).to(logits.device)
        times = torch.from_numpy(counts).to(logits.device, logits.dtype)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias:
        logits[token] += bias
