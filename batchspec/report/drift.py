"""How a run's acceptance compares with what its profile had measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from batchspec.stats import ratio

Counts = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def drift(cells: Iterable[Mapping[str, Any]], acceptance: Mapping[tuple[str, str], Counts]) -> list[dict[str, Any]]:
    """By class and method that the profile knows too: the share of first proposed tokens that held, there and here.

    The first position alone is compared, since how deep a run proposes depends on its load. `cells` are the profile's,
    `acceptance` the run's accepted and rejected tokens by position.
    """
    profiled: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        counts = profiled.setdefault((cell["request_class"], cell["method"]), [0, 0])
        counts[0] += sum(cell["accepted_per_pos"][:1])
        counts[1] += sum(cell["rejections_per_pos"][:1])
    found = []
    for (name, method), (accepted, rejected) in acceptance.items():
        held, refused = profiled.get((name, method), (0, 0))
        if held + refused:
            found.append(
                {
                    "request_class": name,
                    "method": method,
                    "profile_acceptance": ratio(held, held + refused),
                    "measured_acceptance": ratio(int(accepted[0]), int(accepted[0] + rejected[0])),
                }
            )
    return found
