"""What a profile's records derive: a curve of step costs made convex."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.profile.records import Curve

COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 64)


def slopes(curve: Curve) -> list[float]:
    points = list(zip(curve.counts, curve.seconds, strict=True))
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param((1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0), id="flat, then rising: as it is"),
        pytest.param((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), id="a straight line: as it is"),
        # level v of the least sum of ((v - y) / y)^2: (1/2 + 1/3 + 1/2) / (1/4 + 1/9 + 1/4)
        pytest.param((2.0, 3.0, 2.0), (24 / 11,) * 3, id="a bump is shared among its neighbours"),
        pytest.param((2.0, 1.0), (1.2, 1.2), id="more work never takes less time"),
    ],
)
def test_the_nearest_convex_curve(seconds: tuple[float, ...], expected: tuple[float, ...]) -> None:
    found = Curve(tuple(range(1, len(seconds) + 1)), seconds).convex()
    assert found.seconds == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.7, 1.4), min_size=len(COUNTS), max_size=len(COUNTS)))
def test_slopes_never_fall_whatever_the_noise_and_a_convex_curve_stays(noise: list[float]) -> None:
    seconds = [max(0.01, 0.001 * count) * factor for count, factor in zip(COUNTS, noise, strict=True)]
    curve = Curve(COUNTS, tuple(seconds)).convex()
    steps = [0.0, *slopes(curve)]
    assert all(b >= a - 1e-12 for a, b in pairwise(steps))
    assert min(curve.seconds) > 0
    assert curve.convex().seconds == pytest.approx(curve.seconds, rel=1e-9)
