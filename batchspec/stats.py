"""Counters of decoding, the identities they obey, and the ratios derived from them.

Counters and seconds are the truth and add up; every ratio is computed here, sum over sum, and is None
where it has no denominator. Names follow vLLM's `spec_decode_*` metrics: acceptance excludes the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise, zip_longest
from typing import Any


def ratio(numerator: float, denominator: float) -> float | None:
    """`numerator / denominator`, None where there is nothing to divide by."""
    return numerator / denominator if denominator else None


def add_per_pos(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Sum two per-position counters of different lengths."""
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """What decoding one row (or, summed, a class or a job) took.

    num_target_steps counts forwards of the target that gave the row a token: the one that ends its prefill too.
    num_drafts counts steps in which something was proposed. num_draft_tokens counts every proposed token;
    those after the one that ended the row were proposed but never judged. num_discarded_tokens are target or
    accepted tokens that did not reach the output (the row had ended before them).
    num_lookup_* is the part of the draft counters that came from prompt lookup.
    """

    num_target_steps: int = 0
    num_draft_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_rejections_per_pos: tuple[int, ...] = ()
    num_discarded_tokens: int = 0
    num_lookup_draft_tokens: int = 0
    num_lookup_accepted_tokens: int = 0

    def __add__(self, other: DecodeStats) -> DecodeStats:
        summed: dict[str, Any] = {}
        for f in fields(self):
            left, right = getattr(self, f.name), getattr(other, f.name)
            summed[f.name] = add_per_pos(left, right) if f.name.endswith("_per_pos") else left + right
        return DecodeStats(**summed)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed tokens, the bonus token in neither."""
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a drafting step yields: 1 + accepted / drafts."""
        accepted_per_draft = ratio(self.num_accepted_tokens, self.num_drafts)
        return None if accepted_per_draft is None else 1 + accepted_per_draft

    def tokens_per_target_step(self, output_tokens: int) -> float | None:
        """Output tokens over target steps: the ratio that relates to speed."""
        return ratio(output_tokens, self.num_target_steps)

    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """Per position i, accepted over judged at i, given that i was reached: acc_i / (acc_i + rej_i)."""
        pairs = zip_longest(self.num_accepted_tokens_per_pos, self.num_rejections_per_pos, fillvalue=0)
        return tuple(ratio(accepted, accepted + rejected) for accepted, rejected in pairs)

    def check(self, output_tokens: int) -> None:
        """Raise ValueError, with the numbers, where a counter identity does not hold for `output_tokens`."""
        per_pos = self.num_accepted_tokens_per_pos
        identities = {
            "accepted <= draft tokens": self.num_accepted_tokens <= self.num_draft_tokens,
            "sum(accepted per position) == accepted": sum(per_pos) == self.num_accepted_tokens,
            "accepted per position never rises": all(a >= b for a, b in pairwise(per_pos)),
            "output + discarded == accepted + target steps": output_tokens + self.num_discarded_tokens
            == self.num_accepted_tokens + self.num_target_steps,
            "lookup counters are a part": self.num_lookup_draft_tokens <= self.num_draft_tokens
            and self.num_lookup_accepted_tokens <= self.num_accepted_tokens,
            "never proposed means all zero": self.num_drafts > 0 or (self.num_draft_tokens == 0 and not any(per_pos)),
        }
        broken = [name for name, holds in identities.items() if not holds]
        if broken:
            raise ValueError(f"counter identity broken: {'; '.join(broken)} (output_tokens={output_tokens}, {self})")


@dataclass(slots=True)
class DecodeCounter:
    """Accumulates one row's counters in the decode loop; `freeze()` gives the record."""

    num_target_steps: int = 0
    num_draft_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_discarded_tokens: int = 0
    num_lookup_draft_tokens: int = 0
    num_lookup_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    rejections_per_pos: list[int] = field(default_factory=list)

    def record_draft(self, num_proposed: int, num_accepted: int, rejected: bool, from_lookup: bool) -> None:
        """Count one step's proposal: `num_accepted` leading tokens held; `rejected` says that the next was judged
        and refused (False where all were accepted, or where the row ended inside the accepted prefix)."""
        self.num_drafts += 1
        self.num_draft_tokens += num_proposed
        grow = num_accepted + rejected - len(self.accepted_per_pos)
        if grow > 0:
            self.accepted_per_pos.extend([0] * grow)
            self.rejections_per_pos.extend([0] * grow)
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1
        if rejected:
            self.rejections_per_pos[num_accepted] += 1
        if from_lookup:
            self.num_lookup_draft_tokens += num_proposed
            self.num_lookup_accepted_tokens += num_accepted

    def freeze(self) -> DecodeStats:
        return DecodeStats(
            num_target_steps=self.num_target_steps,
            num_draft_steps=self.num_draft_steps,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(self.accepted_per_pos),
            num_accepted_tokens_per_pos=tuple(self.accepted_per_pos),
            num_rejections_per_pos=tuple(self.rejections_per_pos),
            num_discarded_tokens=self.num_discarded_tokens,
            num_lookup_draft_tokens=self.num_lookup_draft_tokens,
            num_lookup_accepted_tokens=self.num_lookup_accepted_tokens,
        )
