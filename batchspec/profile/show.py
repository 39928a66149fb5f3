"""A profile in words and tables: the verdict first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchspec.profile.marginal import Decision
from batchspec.profile.measured import MeasuredPolicy
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.records import Profile, Trial
from batchspec.types import Method

_SHORT = {Method.PROMPT_LOOKUP: "lookup", Method.DRAFT_MODEL: "draft", Method.LOOKUP_THEN_DRAFT: "both"}


def occupancies(max_batch: int) -> list[int]:
    """1, 2, 4, ... up to the profile's largest batch."""
    found = [2**i for i in range(max_batch.bit_length()) if 2**i <= max_batch]
    return found if found[-1] == max_batch else [*found, max_batch]


def format_profile(profile: Profile, methods: frozenset[Method]) -> str:
    """The verdict, then the routes by class and live rows, then the trials. At most 100 columns for usual labels."""
    policy = MeasuredPolicy(profile, methods, profile.max_batch)
    counts = occupancies(profile.max_batch)
    table = [policy.decisions(count) for count in counts]
    labels = [sample.request_class for sample in profile.samples]
    lines = [verdict(table, counts, labels), ""]
    width = max(len(label) for label in [*labels, "class", "break-even"])
    lines.append(f"{'live rows':<{width}}  " + "".join(f"{count:>14}" for count in counts))
    lines.append(f"{'break-even':<{width}}  " + "".join(f"{row[ANY_CLASS].break_even:>14.2f}" for row in table))
    lines += [f"{label:<{width}}  " + "".join(f"{_cell(row[label]):>14}" for row in table) for label in labels]
    lines += [
        "",
        "cells: method, most tokens proposed, acceptance of the first (- target-only, both lookup_then_draft)",
    ]
    return "\n".join([*lines, *map(_trial, profile.trials)])


def _trial(trial: Trial) -> str:
    setting = f"trial: {trial.method} k={trial.num_speculative_tokens} batch {trial.max_batch}"
    return f"{setting}: {trial.seconds:.1f} s, predicted {trial.predicted_seconds:.1f} s"


def verdict(table: Sequence[Mapping[str, Decision]], counts: Sequence[int], labels: Sequence[str]) -> str:
    """One sentence: how many classes speculate up to how many live rows."""
    speculating = [[label for label in labels if row[label].route.method is not Method.TARGET_ONLY] for row in table]
    if not any(speculating):
        return "Do not speculate here: no class gains at any number of live rows."
    most = max(map(len, speculating))
    upto = max(count for count, found in zip(counts, speculating, strict=True) if len(found) == most)
    last = max(count for count, found in zip(counts, speculating, strict=True) if found)
    tail = f"up to {last} some do" if last < counts[-1] else f"at {last} still {len(speculating[-1])}"
    never = [label for label in labels if not any(label in found for found in speculating)]
    nobody = f"; never: {', '.join(never)}" if never else ""
    return f"{most} of {len(labels)} classes speculate up to {upto} live rows; {tail}{nobody}."


def _cell(decision: Decision) -> str:
    route = decision.route
    if route.method is Method.TARGET_ONLY:
        return f"- {decision.first_position_acceptance:.2f}"
    return f"{_SHORT[route.method]} {route.num_speculative_tokens} {decision.first_position_acceptance:.2f}"
