"""From logits to the tokens that the target writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchspec.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One logits row: whose it is, and the tokens that stand before the position it predicts.

    `output_index` counts output tokens: 0 predicts the first. `token_ids` are prompt + output + the proposals before
    this position, so that processors see at every position of a block what target-only decoding would show them.
    """

    sampling: SamplingParams
    row_key: str
    output_index: int


class Sampler:
    """Chooses the target's token for every logits row of a step."""

    def __init__(self, stop_ids: frozenset[int], device: torch.device) -> None:
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """logits [R, vocab] -> R token ids; ties go to the lowest id. The one host synchronisation of a step."""
        held = [index for index, row in enumerate(rows) if row.output_index < row.sampling.min_new_tokens]
        if held and len(self._stop_ids):
            logits[torch.tensor(held, device=logits.device)[:, None], self._stop_ids] = -torch.inf
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        return chosen
