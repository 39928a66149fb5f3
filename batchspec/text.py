"""Text for terminals: columns of a fixed width, whatever characters they hold."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

TABLE_WIDTH = 100


def columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line of a table; a cell goes to the left of its column, or, where the width is negative, to the right."""
    placed = [
        f"{cell:>{-width}}" if width < 0 else fit(printable(cell), width)
        for cell, width in zip(cells, widths, strict=True)
    ]
    return " ".join(placed).rstrip()


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def printable(text: str) -> str:
    """Labels come from the input: keep control characters away from the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def fit(text: str, width: int) -> str:
    """`text` in exactly `width` columns; wide characters take two of them."""
    total = sum(_columns(char) for char in text)
    if total <= width:
        return text + " " * (width - total)
    kept, used = "", 0
    for char in text:
        if used + _columns(char) > width - 1:
            break
        kept, used = kept + char, used + _columns(char)
    return kept + "…" + " " * (width - used - 1)


def _columns(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
