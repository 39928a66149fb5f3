"""What speculation saved, from the blocks of steps that ran without it beside those that ran with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from batchspec.stats import ratio

_RESAMPLES = 1000
_LEAST_PAIRS = 3

# held tokens, held seconds, tokens beside, seconds beside
PairSums = tuple[int, float, int, float]


def measured_saving(pairs: Sequence[PairSums], held_share: float) -> dict[str, Any] | None:
    """The share of decode device time saved, with a 90 % interval from resampled pairs; None below three pairs.

    Rates are sums over sums. Net of the holdout itself: `held_share` of the time nothing was saved. `classes` is
    empty, since rows of all classes share every step.
    """
    if len(pairs) < _LEAST_PAIRS:
        return None
    chooser = random.Random(0)
    resampled = sorted(_share(chooser.choices(pairs, k=len(pairs)), held_share) for _ in range(_RESAMPLES))
    return {
        "share": _share(pairs, held_share),
        "low": resampled[_RESAMPLES // 20],
        "high": resampled[-_RESAMPLES // 20],
        "pairs": len(pairs),
        "classes": {},
    }


def _share(pairs: Sequence[PairSums], held_share: float) -> float:
    held = ratio(sum(p[0] for p in pairs), sum(p[1] for p in pairs)) or 0.0
    beside = ratio(sum(p[2] for p in pairs), sum(p[3] for p in pairs))
    return 0.0 if beside is None else (1 - held / beside) * (1 - held_share)
