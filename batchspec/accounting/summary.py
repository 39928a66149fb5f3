"""The summary of a job: its rows by class and method, beside the metered time and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from batchspec.accounting.cost import Ledger, MeteredTime, cost_usd, usd_per_million
from batchspec.accounting.totals import RowTotals
from batchspec.accounting.usage import Usage
from batchspec.stats import ratio


@dataclass(frozen=True, slots=True)
class AttemptTime:
    """What one attempt at the job took: wall clock, device seconds of all its workers, and its price (USD per
    device-hour). `decode_wall_seconds` runs from the first row admitted to the last row retired."""

    wall_seconds: float
    decode_wall_seconds: float
    metered: MeteredTime
    price_per_hour: float | None = None

    @property
    def cost_usd(self) -> float | None:
        return cost_usd(self.metered.total_seconds, self.price_per_hour)

    def as_json(self) -> dict[str, Any]:
        return {
            "wall_seconds": self.wall_seconds,
            "decode_wall_seconds": self.decode_wall_seconds,
            "device_seconds": self.metered.total_seconds,
            "cost_usd": self.cost_usd,
        }


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The whole job: its rows, and the attempts that made them."""

    rows: RowTotals
    attempts: Sequence[AttemptTime]
    output: str
    batch_invariant: bool | None
    max_batch: int | None
    saving: Mapping[str, Any] | None = None
    usage: Usage = field(default_factory=Usage)
    predicted_tokens_per_target_step: Mapping[str, float] = field(default_factory=dict)

    @property
    def wall_seconds(self) -> float:
        return sum(attempt.wall_seconds for attempt in self.attempts)

    @property
    def decode_wall_seconds(self) -> float:
        return sum(attempt.decode_wall_seconds for attempt in self.attempts)

    @property
    def output_tokens_per_second(self) -> float | None:
        return ratio(self.rows.job.output_tokens, self.decode_wall_seconds)

    @property
    def ledger(self) -> Ledger:
        metered = sum((attempt.metered for attempt in self.attempts), start=MeteredTime())
        return Ledger.balance(metered, self.rows.job.device_seconds)

    @property
    def cost_usd(self) -> float | None:
        """All metered time at the price of its attempt; None where an attempt has no price."""
        costs = [attempt.cost_usd for attempt in self.attempts]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if known and len(known) == len(costs) else None

    @property
    def prices_per_million(self) -> dict[str, float | None]:
        """USD per million tokens: over all metered time, and (`active_`) over the time of rows alone."""
        job = self.rows.job
        tokens = {
            "output": job.output_tokens,
            "input": job.input_tokens,
            "total": job.input_tokens + job.output_tokens,
        }
        active_cost = job.cost_usd if self.cost_usd is not None else None
        return {
            **{f"usd_per_million_{kind}_tokens": usd_per_million(self.cost_usd, n) for kind, n in tokens.items()},
            **{f"active_usd_per_million_{kind}_tokens": usd_per_million(active_cost, n) for kind, n in tokens.items()},
        }

    def as_json(self) -> dict[str, Any]:
        """The summary as strict JSON values: null where something is not known, never NaN."""
        job, ledger = self.rows.job, self.ledger
        groups = self.rows.groups
        return {
            "rows": job.rows,
            "error_rows": job.error_rows,
            "error_types": dict(self.rows.error_types),
            "input_tokens": job.input_tokens,
            "output_tokens": job.output_tokens,
            "wall_seconds": self.wall_seconds,
            "decode_wall_seconds": self.decode_wall_seconds,
            "output_tokens_per_second": self.output_tokens_per_second,
            "max_batch": self.max_batch,
            "saving": None if self.saving is None else dict(self.saving),
            "mean_live_sequences": job.mean_live_sequences,
            **asdict(self.usage),
            "route_events": list(self.usage.route_events),
            "acceptance_rate": job.stats.acceptance_rate,
            "output_tokens_per_device_second": ratio(job.output_tokens, job.device_seconds),
            "tokens_per_target_step": job.stats.tokens_per_target_step(job.output_tokens),
            "device_seconds": ledger.metered_seconds,
            "row_device_seconds": ledger.row_seconds,
            "line_device_seconds": dict(ledger.line_seconds),
            "unattributed_seconds": ledger.unattributed_seconds,
            "unattributed_share": ledger.unattributed_share,
            "price_per_hour": sorted({a.price_per_hour for a in self.attempts if a.price_per_hour is not None}),
            "cost_usd": self.cost_usd,
            **self.prices_per_million,
            "methods": {name: totals.as_json() for name, totals in self.rows.by_method().items()},
            "classes": {
                name: totals.as_json()
                | {"predicted_tokens_per_target_step": self.predicted_tokens_per_target_step.get(name)}
                | {"methods": {method: groups[key, method].as_json() for key, method in groups if key == name}}
                for name, totals in self.rows.by_class().items()
            },
            "batch_invariant": self.batch_invariant,
            "attempts": len(self.attempts),
            "last_attempt": self.attempts[-1].as_json() if self.attempts else None,
            "output": self.output,
        }
