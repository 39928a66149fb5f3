"""What speculation saved, from the blocks of steps that ran without it beside those that ran with it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchspec.stats import ratio

_RESAMPLES = 1000
_LEAST_PAIRS = 3

# held tokens, held seconds, tokens beside, seconds beside
PairSums = tuple[int, float, int, float]


@dataclass(frozen=True, slots=True)
class Spent:
    """Device seconds of a job: all that was metered, what decoding took of it, and what measuring did (a profile made
    for the job; an audit that followed it)."""

    metered_seconds: float
    decode_seconds: float
    measuring_seconds: float = 0.0


def measured_saving(pairs: Sequence[PairSums], held_share: float, spent: Spent) -> dict[str, Any] | None:
    """The share of the job's metered time that speculation saved, with a 90 % interval from resampled pairs; None below
    three pairs.

    Rates are sums over sums. Net: with `held_share` of the tokens nothing was saved, and measuring cost what it cost.
    `classes` is empty, since rows of all classes share every step.
    """
    if len(pairs) < _LEAST_PAIRS:
        return None
    chooser = random.Random(0)
    resampled = sorted(_without(chooser.choices(pairs, k=len(pairs)), held_share, spent) for _ in range(_RESAMPLES))
    without = _without(pairs, held_share, spent)
    low, high = resampled[_RESAMPLES // 20], resampled[-_RESAMPLES // 20]
    share, low, high = (1 - spent.metered_seconds / seconds for seconds in (without, low, high))
    saved = without - spent.metered_seconds
    return {"share": share, "low": low, "high": high, "saved_seconds": saved, "pairs": len(pairs), "classes": {}}


def net_of(saving: Mapping[str, Any], metered_seconds: float, further_seconds: float) -> dict[str, Any]:
    """A saving of a job that took `metered_seconds`, less what was spent on it since (an audit)."""
    shares = {
        name: 1 - (metered_seconds + further_seconds) * (1 - saving[name]) / metered_seconds
        for name in ("share", "low", "high")
    }
    return {**saving, **shares, "saved_seconds": saving["saved_seconds"] - further_seconds}


def _without(pairs: Sequence[PairSums], held_share: float, spent: Spent) -> float:
    """Device seconds that the job would have taken target-only, by these pairs."""
    held = ratio(sum(p[0] for p in pairs), sum(p[1] for p in pairs)) or 0.0
    beside = ratio(sum(p[2] for p in pairs), sum(p[3] for p in pairs))
    gain = 0.0 if beside is None else (1 - held / beside) * (1 - held_share)
    return spent.metered_seconds - spent.measuring_seconds + spent.decode_seconds * gain / (1 - gain)
