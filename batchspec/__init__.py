"""batchspec: offline batch generation that speculates only where it is measured to pay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

__version__ = "0.1.0"


def load_results(output: str, columns: Sequence[str] | None = None, allow_partial: bool = False) -> pandas.DataFrame:
    """The rows of a finished output as a pandas frame, in the order of the input (see `report.frame.load_results`).

    Raises UsageError where the job has not finished, unless `allow_partial`.
    """
    from batchspec.report.frame import load_results as load

    return load(output, columns, allow_partial)
