"""A few A/B runs on real rows at the intended batch: they check what the profile predicts, they do not replace it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import StaticPolicy
from batchspec.profile.predict import predict_seconds
from batchspec.profile.records import ClassSample, Profile, Trial
from batchspec.profile.scope import Budget, ListSource, Scope
from batchspec.types import Completion, Method, Request, Route, RoutePolicy

if TYPE_CHECKING:
    from batchspec.engine.engine import TorchEngine


def run_trials(
    engine: TorchEngine,
    requests: Sequence[Request],
    samples: Sequence[ClassSample],
    profile: Profile,
    scope: Scope,
    budget: Budget,
    say: Callable[[str], None],
) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    """Target-only against the profile's own routes on the same rows, warm and interleaved, as far as the budget lasts.

    Returns the trials, and what was skipped.
    """
    batch = engine.info.max_batch
    trials: list[Trial] = []
    settings = ["target_only", "routed"]
    for setting in [*settings, *reversed(settings)]:
        policy: RoutePolicy = StaticPolicy(Route(Method.TARGET_ONLY))
        if setting == "routed":
            policy = MeasuredPolicy(profile, scope.methods, batch)
        expected = predict_seconds(profile, samples, policy.route, batch)
        if expected * 1.5 > budget.left:
            return tuple(trials), (f"trial of {setting}: {expected:.0f} s do not fit into what is left",)
        say(f"trial: {setting} at batch {batch}")
        engine.close()  # or the second run would find the prompts of the first
        started, tokens = perf_counter(), 0
        for outcome in engine.run(ListSource(requests), policy):
            tokens += outcome.output_tokens if isinstance(outcome, Completion) else 0
        trials.append(Trial(setting, batch, tokens, perf_counter() - started, expected))
    return tuple(trials), ()
