"""What device time costs, how a step's seconds are split among its rows, and the ledger in which they add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batchspec.stats import ratio

ROW_LINES = ("prefill", "draft", "verify", "overhead")
"""The metered lines whose seconds the engine hands on to rows; every other line stands for itself."""

MAX_UNATTRIBUTED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class StepAttributionRule:
    """Splits a step by what each row adds to a model of its cost; the part that all share is split equally.

    seconds = per_step + sum over rows (per_sequence + per_position * positions + per_kv_token * KV tokens read)

    The defaults were fitted to a 135M-parameter model on two CPU cores: 27 ms + 0.85 ms per position + 0.35 ms per
    sequence at 128 tokens of context, of which 0.27 ms are the reading of its KV. Only their proportions matter.
    It is an allocation, fair to long contexts and long proposals; it does not say what leaving a row out would save.
    """

    seconds_per_step: float = 27e-3
    seconds_per_sequence: float = 0.08e-3
    seconds_per_position: float = 0.85e-3
    seconds_per_kv_token: float = 2.1e-6

    def __post_init__(self) -> None:
        coefficients = (
            self.seconds_per_step,
            self.seconds_per_sequence,
            self.seconds_per_position,
            self.seconds_per_kv_token,
        )
        if not all(0 <= c < math.inf for c in coefficients) or self.seconds_per_step + self.seconds_per_sequence == 0:
            raise ValueError(f"step costs must be finite and not negative, and a sequence must cost time: {self}")

    @property
    def rule(self) -> str:
        return (
            f"step_cost(per_step={self.seconds_per_step!r}s, per_sequence={self.seconds_per_sequence!r}s, "
            f"per_position={self.seconds_per_position!r}s, per_kv_token={self.seconds_per_kv_token!r}s)"
        )

    def shares(self, num_positions: Sequence[int], kv_tokens: Sequence[int]) -> list[float]:
        """One share per row, summing to 1: row i computed `num_positions[i]` over `kv_tokens[i]` of context."""
        if not num_positions:
            return []
        per_row = self.seconds_per_step / len(num_positions) + self.seconds_per_sequence
        per_position, per_kv_token = self.seconds_per_position, self.seconds_per_kv_token
        weights = [
            per_row + per_position * positions + per_kv_token * context
            for positions, context in zip(num_positions, kv_tokens, strict=True)
        ]
        total = sum(weights)
        return [weight / total for weight in weights]


def cost_usd(device_seconds: float, price_per_hour: float | None) -> float | None:
    """USD for this many device seconds at a price in USD per device-hour; None where the price is not known."""
    return None if price_per_hour is None else device_seconds / 3600 * price_per_hour


def usd_per_million(cost: float | None, num_tokens: int) -> float | None:
    """USD per 1,000,000 tokens; None without a cost or without tokens."""
    return None if cost is None else ratio(cost * 1e6, num_tokens)


@dataclass(frozen=True, slots=True)
class MeteredTime:
    """Device seconds of a worker, an attempt or a job: all of them, and by line.

    `total_seconds` is a clock of its own (wall clock times the part of the device held), not the sum of the lines.
    """

    total_seconds: float = 0.0
    line_seconds: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: MeteredTime) -> MeteredTime:
        names = [*self.line_seconds, *(name for name in other.line_seconds if name not in self.line_seconds)]
        lines = {name: self.line_seconds.get(name, 0.0) + other.line_seconds.get(name, 0.0) for name in names}
        return MeteredTime(self.total_seconds + other.total_seconds, lines)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the metered time went: rows, named lines, and the rest. The three add up to `metered_seconds`."""

    metered_seconds: float
    row_seconds: float
    line_seconds: Mapping[str, float]

    @classmethod
    def balance(cls, metered: MeteredTime, row_seconds: float) -> Ledger:
        """`row_seconds` is the device time of all rows in the output, error rows among them.

        Time that the engine spent on rows and that no row of the output carries (a killed worker's rows in flight,
        decoded again later) becomes the line `repeated`.
        """
        lines = {name: seconds for name, seconds in metered.line_seconds.items() if name not in ROW_LINES}
        spent_on_rows = sum(metered.line_seconds.get(name, 0.0) for name in ROW_LINES)
        lines["repeated"] = max(0.0, spent_on_rows - row_seconds)
        return cls(metered.total_seconds, row_seconds, lines)

    @property
    def unattributed_seconds(self) -> float:
        """Metered seconds that neither a row nor a line explains."""
        return self.metered_seconds - self.row_seconds - sum(self.line_seconds.values())

    @property
    def unattributed_share(self) -> float | None:
        return ratio(self.unattributed_seconds, self.metered_seconds)

    def check(self, max_share: float = MAX_UNATTRIBUTED_SHARE) -> None:
        """Raise ValueError, with the numbers, where more than `max_share` of the metered time is unexplained."""
        if abs(self.unattributed_seconds) > max_share * self.metered_seconds:
            raise ValueError(
                f"{self.unattributed_seconds:.3f} of {self.metered_seconds:.3f} metered device seconds are neither on "
                f"rows ({self.row_seconds:.3f}) nor on lines ({dict(self.line_seconds)}); at most {max_share:.0%}"
            )
