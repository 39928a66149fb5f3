"""What a job will take and cost, and whether speculating pays, before anything is spent: from a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchspec.accounting.cost import cost_usd
from batchspec.config import AUTO_PROFILE, NO_PROFILE, RunConfig
from batchspec.errors import CostLimitExceeded, RowError, UsageError
from batchspec.io.inputs import resolve_inputs
from batchspec.pipeline.checks import check_config
from batchspec.pipeline.devices import worker_places
from batchspec.pipeline.measuring import readable_rows
from batchspec.pipeline.models import locate_models
from batchspec.pipeline.profiling import available_methods, check_profile
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.predict import predict_seconds
from batchspec.profile.records import ClassSample, Profile
from batchspec.profile.store import load_profile
from batchspec.types import Method, Request, Route
from batchspec.workload import RequestClassifier

# Rows whose prompts are tokenised and that are stepped through; larger jobs are scaled up.
_TOKENISED_ROWS = 400

# Spread of a prediction where no trial says more: the median error of predictions against runs is below this.
_LEAST_SPREAD = 0.1


@dataclass(frozen=True)
class JobPlan:
    """Times are wall seconds with all workers at work, costs metered cost (load included)."""

    rows: int
    input_tokens: int
    output_tokens: int
    seconds: float
    seconds_low: float
    seconds_high: float
    cost_usd_low: float | None
    cost_usd: float | None
    cost_usd_high: float | None
    target_only_seconds: float
    expected_saving: float
    routes: dict[str, str]
    rows_by_class: dict[str, int]
    longest_answer: int
    verdict: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        cost = "no price given"
        if self.cost_usd is not None:
            cost = f"{self.cost_usd:.4f} USD metered ({self.cost_usd_low:.4f} to {self.cost_usd_high:.4f})"
        lines = [
            self.verdict,
            f"{self.rows} rows, about {self.input_tokens} tokens in and {self.output_tokens} out",
            f"{self.seconds:.0f} s ({self.seconds_low:.0f} to {self.seconds_high:.0f}), {cost}",
            f"target-only: {self.target_only_seconds:.0f} s",
            f"answers are taken to be as long as the profile's, at most {self.longest_answer} tokens",
        ]
        routes = [f"  {label}, {self.rows_by_class[label]} rows: {route}" for label, route in self.routes.items()]
        return "\n".join([*lines, *routes])


def plan_job(config: RunConfig) -> JobPlan:
    """Plan the job of `config`, whose profile must fit this machine. Loads the tokenizer, never weights."""
    check_config(config)
    if config.routes.profile in (NO_PROFILE, AUTO_PROFILE):
        raise UsageError("batchspec plan needs --profile FILE; make one with `batchspec profile INPUT -o FILE`")
    given = config.routes.profile is not None
    inputs = resolve_inputs(config.input)
    config = check_profile(replace(config, engine=locate_models(config.engine)))
    if config.routes.profile == NO_PROFILE:
        raise UsageError(
            "the profile does not fit this machine, so it cannot tell what the job will take"
            if given
            else "no profile of this model on this machine: make one with `batchspec profile INPUT -o FILE`"
        )
    profile = load_profile(Path(str(config.routes.profile)))
    rows = readable_rows(config)
    samples, scale = _expected_rows(profile, rows, config, inputs.num_rows)
    policy = MeasuredPolicy(profile, available_methods(config), config.engine.max_batch)
    plain = Route(Method.TARGET_ONLY)
    places = worker_places(config)
    batch = config.engine.max_batch

    def seconds_of(route_of: Callable[[str, int], Route]) -> float:
        decode_seconds = predict_seconds(profile, samples, route_of, batch)
        return profile.load_seconds + decode_seconds * scale / len(places)  # workers share the rows evenly

    seconds, target_only = seconds_of(policy.route), seconds_of(lambda label, n: plain)
    spread = max([_LEAST_SPREAD, *(abs(t.seconds / t.predicted_seconds - 1) for t in profile.trials)])
    saving = 1 - seconds / target_only
    price, num_devices = config.run.price_per_hour, sum(place.device_share for place in places)
    low, high = seconds / (1 + spread), seconds * (1 + spread)
    shown = {sample.request_class: _named(policy.route(sample.request_class, batch)) for sample in samples}
    return JobPlan(
        rows=inputs.num_rows,
        input_tokens=round(scale * sum(sum(s.input_tokens) for s in samples)),
        output_tokens=round(scale * sum(sum(s.output_tokens) for s in samples)),
        seconds=round(seconds, 1),
        seconds_low=round(low, 1),
        seconds_high=round(high, 1),
        cost_usd_low=cost_usd(low * num_devices, price),
        cost_usd=cost_usd(seconds * num_devices, price),
        cost_usd_high=cost_usd(high * num_devices, price),
        target_only_seconds=round(target_only, 1),
        expected_saving=round(saving, 4),
        routes=shown,
        rows_by_class={sample.request_class: round(sample.num_rows * scale) for sample in samples},
        longest_answer=profile.max_new_tokens,
        verdict=f"speculating should save {saving:.0%} of the time" if saving > 0.005 else "do not speculate here",
    )


def refuse_expensive(plan: JobPlan, max_cost_usd: float | None) -> None:
    """Raise CostLimitExceeded where the expected cost is above the limit."""
    if max_cost_usd is None:
        return
    if plan.cost_usd is None:
        raise UsageError("--max-cost-usd needs --price-per-hour")
    if plan.cost_usd > max_cost_usd:
        raise CostLimitExceeded(
            f"the job is expected to cost {plan.cost_usd:.4f} USD, above --max-cost-usd {max_cost_usd:g}"
        )


def _named(route: Route) -> str:
    k = route.num_speculative_tokens
    return f"{route.method.value} k={k}" if k else route.method.value


def _expected_rows(
    profile: Profile, rows: Sequence[Request], config: RunConfig, num_rows: int
) -> tuple[list[ClassSample], float]:
    """Rows to step through, by class, with tokenised prompts and the profile's answers; and how many each stands for.

    A class that the profile does not know writes like all classes together.
    """
    from batchspec.engine.prompts import PromptEncoder, load_tokenizer

    encoder = PromptEncoder(load_tokenizer(Path(config.engine.model)), 2**31, config.engine.neutralize_special_tokens)
    stride = max(1, len(rows) // _TOKENISED_ROWS)
    known = {sample.request_class: sample for sample in profile.samples}
    everything = [tokens for sample in profile.samples for tokens in sample.output_tokens]
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for request in rows[::stride]:
        label = RequestClassifier().label(request.request_class)
        answers = known[label].output_tokens if label in known else everything
        try:
            num_input_tokens = len(encoder.encode(request))
        except RowError:
            continue
        of_class = found[label if label in known else ANY_CLASS]
        output_tokens = min(answers[len(of_class) % len(answers)], request.sampling.max_new_tokens)
        of_class.append((num_input_tokens, output_tokens))
    samples = [
        ClassSample(label, tuple(i for i, _ in pairs), tuple(o for _, o in pairs)) for label, pairs in found.items()
    ]
    counted = sum(sample.num_rows for sample in samples)
    return samples, num_rows / max(1, counted)
