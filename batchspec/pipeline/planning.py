"""What a job will take and cost, and whether speculating pays, before anything is spent: from a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchspec.accounting.cost import cost_usd
from batchspec.config import AUTO_PROFILE, NO_PROFILE, RunConfig
from batchspec.engine.vllm_routes import engine_key, needs_target_only
from batchspec.errors import CostLimitExceeded, MismatchError, RowError, UsageError
from batchspec.io.inputs import resolve_inputs
from batchspec.pipeline.checks import check_config
from batchspec.pipeline.devices import worker_places
from batchspec.pipeline.measuring import read_rows
from batchspec.pipeline.models import locate_models
from batchspec.pipeline.profiling import check_profile, policy_of, profile_routes, run_fingerprint
from batchspec.profile.policy import ANY_CLASS, StaticPolicy, setting_name
from batchspec.profile.predict import predict_seconds
from batchspec.profile.records import ClassSample, Profile
from batchspec.profile.store import fingerprint_differences, load_profile
from batchspec.types import Method, Request, Route
from batchspec.workload import RequestClassifier

# Rows whose prompts are tokenised and that are stepped through; larger jobs are scaled up.
_TOKENISED_ROWS = 400

# What another engine's profile must share with the run that it is compared for.
_COMPARED = ("target_", "draft_", "device_type", "dtype", "sampling")

# Spread of a prediction where no trial says more: the median error of predictions against runs is below this.
_LEAST_SPREAD = 0.1


@dataclass(frozen=True)
class JobPlan:
    """Times are wall seconds with all workers at work, costs metered cost (load included)."""

    engine: str
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
    answers_cut: bool
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
            f"{self.engine}: {self.seconds:.0f} s ({self.seconds_low:.0f} to {self.seconds_high:.0f}), {cost}",
            f"target-only: {self.target_only_seconds:.0f} s",
            f"answers are taken to be as long as the profile's, at most {self.longest_answer} tokens",
        ]
        if self.answers_cut:
            lines.append("which ended some that this job lets go on: measure with its own --max-new-tokens")
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
    return _plan(config, load_profile(Path(str(config.routes.profile))), inputs.num_rows)


def compare_engines(config: RunConfig, files: Sequence[str]) -> list[JobPlan]:
    """The same job by profiles of other engines, which another environment or machine of this kind measured.

    Models, sampling and kind of device must be the run's; libraries and threads are taken as the profile has them.
    Raises MismatchError.
    """
    config = replace(config, engine=locate_models(config.engine))
    now, num_rows, plans = run_fingerprint(config), resolve_inputs(config.input).num_rows, []
    for file in files:
        profile = load_profile(Path(file).expanduser())
        found = [line for line in fingerprint_differences(profile, now) if line.startswith(_COMPARED)]
        if found:
            raise MismatchError(f"--compare {file} was measured with something else: {'; '.join(found)}")
        engine = replace(config.engine, engine=profile.fingerprint["engine"])
        routes = replace(config.routes, profile=file)
        plans.append(_plan(replace(config, engine=engine, routes=routes), profile, num_rows))
    return plans


def _plan(config: RunConfig, profile: Profile, num_rows: int) -> JobPlan:
    """The plan of `num_rows` rows by a profile that fits."""
    places = worker_places(config)
    samples, scale, shared_tokens = _expected_rows(profile, config, num_rows, -(-num_rows // len(places)))
    batch, plain, in_phases = config.engine.max_batch, Route(Method.TARGET_ONLY), profile.one_route_per_engine
    policy = policy_of(config, profile_routes(config, profile, num_rows))
    if in_phases and needs_target_only(config.sampling):
        policy = StaticPolicy(plain)

    def seconds_of(route_of: Callable[[str, int], Route]) -> float:
        """Of one worker; all share the rows evenly. Every phase loads an engine of its own."""
        phases: dict[object, list[ClassSample]] = defaultdict(list)
        for sample in samples:
            phases[engine_key(route_of(sample.request_class, batch)) if in_phases else None].append(sample)
        copies = max(1.0, scale / len(places))
        decode_seconds = sum(_many_times(profile, phase, route_of, batch, copies) for phase in phases.values())
        decode_seconds -= copies * shared_tokens * profile.step_cost.prefill_per_token
        return len(phases) * profile.load_seconds + decode_seconds

    seconds, target_only = seconds_of(policy.route), seconds_of(lambda label, n: plain)
    spread = max([_LEAST_SPREAD, *(abs(t.seconds / t.predicted_seconds - 1) for t in profile.trials)])
    saving = 1 - seconds / target_only if target_only else 0.0
    price, num_devices = config.run.price_per_hour, sum(place.device_share for place in places)
    low, high = seconds / (1 + spread), seconds * (1 + spread)
    shown = {sample.request_class: setting_name(policy.route(sample.request_class, batch)) for sample in samples}
    return JobPlan(
        engine=config.engine.engine,
        rows=num_rows,
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
        answers_cut=_cuts_answers(profile, config.sampling.max_new_tokens),
        verdict=f"speculating should save {saving:.0%} of the time" if saving > 0.005 else "do not speculate here",
    )


def compared(plans: Sequence[JobPlan]) -> str:
    """Plans of one job beside each other, the fastest named first."""
    fastest = min(plans, key=lambda found: found.seconds)
    lines = [f"fastest: {fastest.engine}"]
    for found in plans:
        cost = "" if found.cost_usd is None else f", {found.cost_usd:.4f} USD"
        lines.append(f"  {found.engine}: {found.seconds:.0f} s{cost}; {found.verdict}")
    return "\n".join(lines)


def refuse_expensive(plan: JobPlan, max_cost_usd: float | None) -> None:
    """Raise CostLimitExceeded where the expected cost is above the limit."""
    if max_cost_usd is None:
        return
    if plan.cost_usd is None:
        raise UsageError("--max-cost-usd needs --price-per-hour")
    if plan.answers_cut:
        raise UsageError(
            f"--max-cost-usd: the profile's answers were cut at {plan.longest_answer} tokens, so that the cost of this "
            "job is not known; measure with its own --max-new-tokens"
        )
    if plan.cost_usd > max_cost_usd:
        raise CostLimitExceeded(
            f"the job is expected to cost {plan.cost_usd:.4f} USD, above --max-cost-usd {max_cost_usd:g}"
        )


def _cuts_answers(profile: Profile, max_new_tokens: int) -> bool:
    """Whether answers would go on where the profile's ended."""
    longest = max((tokens for sample in profile.samples for tokens in sample.output_tokens), default=0)
    return profile.max_new_tokens < max_new_tokens and longest >= profile.max_new_tokens


def _many_times(
    profile: Profile, rows: Sequence[ClassSample], route_of: Callable[[str, int], Route], batch: int, copies: float
) -> float:
    """Seconds of these rows so many times over: what comes between the first and the last time meets a full batch, and
    only the last drains it."""
    once = predict_seconds(profile, rows, route_of, batch)
    if copies == 1:
        return once
    doubled = [replace(s, input_tokens=s.input_tokens * 2, output_tokens=s.output_tokens * 2) for s in rows]
    return once + (copies - 1) * (predict_seconds(profile, doubled, route_of, batch) - once)


def _expected_rows(
    profile: Profile, config: RunConfig, num_rows: int, rows_per_worker: int
) -> tuple[list[ClassSample], float, int]:
    """Rows to step through, by class, with tokenised prompts and the profile's answers; how many each stands for; and
    how many of their prompt tokens need not be read since they begin like an earlier row.

    A class that the profile does not know writes like all classes together. Rows that cannot be answered take no time.
    """
    from batchspec.engine.prompts import PromptEncoder, load_tokenizer

    encoder = PromptEncoder(load_tokenizer(Path(config.engine.model)), 2**31, config.engine.neutralize_special_tokens)
    rows, num_read = read_rows(config)
    rows.sort(key=_label)  # else a stride could skip whole classes
    taken = rows[:: max(1, len(rows) // min(_TOKENISED_ROWS, max(1, rows_per_worker)))]
    known = {sample.request_class: sample for sample in profile.samples}
    everything = [tokens for sample in profile.samples for tokens in sample.output_tokens]
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    prompts: list[list[int]] = []
    for request in taken:
        label = _label(request)
        answers = known[label].output_tokens if label in known else everything
        try:
            prompt = encoder.encode(request)
        except RowError:
            continue
        prompts.append(prompt)
        of_class = found[label if label in known else ANY_CLASS]
        output_tokens = min(answers[len(of_class) % len(answers)], request.sampling.max_new_tokens)
        of_class.append((len(prompt), output_tokens))
    samples = [
        ClassSample(label, tuple(i for i, _ in pairs), tuple(o for _, o in pairs)) for label, pairs in found.items()
    ]
    answerable = len(rows) / max(1, num_read)
    engine = config.engine
    shared = 0 if engine.no_shared_prefixes else _shared_tokens(prompts, engine.prefill_chunk_tokens)
    return samples, num_rows * answerable / max(1, len(taken)), shared


def _label(request: Request) -> str:
    return RequestClassifier().label(request.request_class)


def _shared_tokens(prompts: Sequence[Sequence[int]], grain: int) -> int:
    """Tokens in whole chunks at the start of a prompt which an earlier one starts with, too."""
    seen, shared = set[int](), 0
    for prompt in prompts:
        start = 0
        for end in range(grain, len(prompt), grain):
            start = hash((start, *prompt[end - grain : end]))
            shared += grain * (start in seen)
            seen.add(start)
    return shared
