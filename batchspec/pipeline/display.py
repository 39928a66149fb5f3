"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm

from batchspec.accounting.cost import MeteredTime, cost_usd
from batchspec.pipeline.messages import Counters
from batchspec.stats import ratio

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0


class Display:
    """Shows rows, output tokens per second, tokens per target step, and money so far."""

    def __init__(self, num_rows: int, rows_before: int, price_per_hour: float | None) -> None:
        self._num_rows = num_rows
        self._rows_before = rows_before
        self._price_per_hour = price_per_hour
        self._started_at = self._shown_at = time.monotonic()
        self._bar = (
            tqdm(total=num_rows, initial=rows_before, unit="row", file=sys.stderr, dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def show(self, counters: Counters, metered: MeteredTime) -> None:
        """Call as often as you like."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._rows_before + counters.rows - self._bar.n)
            self._bar.set_postfix_str(self._figures(counters, metered, now))
        elif now - self._shown_at >= LINE_SECONDS:
            self._shown_at = now
            rows = f"{self._rows_before + counters.rows}/{self._num_rows} rows"
            logger.info("%s, %s", rows, self._figures(counters, metered, now))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _figures(self, counters: Counters, metered: MeteredTime, now: float) -> str:
        per_second = counters.output_tokens / max(now - self._started_at, 1e-9)
        per_step = ratio(counters.output_tokens, counters.target_steps)
        cost = cost_usd(metered.total_seconds, self._price_per_hour)
        figures = [
            f"{counters.error_rows} errors" if counters.error_rows else None,
            f"{per_second:.0f} tokens/s",
            None if per_step is None else f"{per_step:.2f} tokens/step",
            None if cost is None else f"{cost:.4f} USD",
        ]
        return ", ".join(figure for figure in figures if figure)
