"""How likely each position of a proposal is reached and accepted, by class, as a profile's acceptance says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from batchspec.config import MAX_SPECULATIVE_TOKENS
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.records import AcceptanceCell, Profile
from batchspec.stats import add_per_pos
from batchspec.types import Method

# Conditional acceptance is pulled towards the mean over classes with the weight of this many observations, and then
# lowered by this many standard deviations.
_PRIOR_WEIGHT = 8.0
_DOUBT = 1.0


@dataclass(frozen=True)
class Option:
    """One way of proposing for a class: `share` of its steps propose here, P_1 >= P_2 >= ... by position.

    `per_depth` says whether each position costs a forward of the draft model for the rows that draft so deep.
    """

    share: float
    reach: tuple[float, ...]
    match_tokens: int | None

    @property
    def per_depth(self) -> bool:
        return self.match_tokens is None


@dataclass(frozen=True)
class ClassOptions:
    """What is known of a class: its weight among live rows, its mean sizes, and per method the options that make it up.

    `catch_up` is what a row brings for a draft model to read: prompt tokens per token that it writes.
    """

    request_class: str
    weight: float
    context_tokens: float
    by_method: Mapping[Method, tuple[Option, ...]]
    catch_up: float = 0.0


def class_options(profile: Profile, doubt: float = _DOUBT) -> tuple[ClassOptions, ...]:
    """Probabilities of reaching and accepting each position, by class, method and match length, `doubt` standard
    deviations below their estimate (0 to predict, more to decide)."""
    total_steps = sum(sum(s.output_tokens) for s in profile.samples)
    pooled = _pool(profile.acceptance)
    options = []
    for sample in profile.samples:
        by_method: dict[Method, list[Option]] = {}
        for cell in profile.acceptance:
            if cell.request_class == sample.request_class and cell.num_class_steps:
                share = cell.num_steps / cell.num_class_steps
                reach = _reach(cell, pooled[(cell.method, cell.match_tokens)], doubt)
                by_method.setdefault(Method(cell.method), []).append(Option(share, reach, cell.match_tokens))
        if Method.LOOKUP_THEN_DRAFT in by_method:
            by_method[Method.LOOKUP_THEN_DRAFT] += by_method.get(Method.PROMPT_LOOKUP, [])
        options.append(
            ClassOptions(
                sample.request_class,
                sum(sample.output_tokens) / max(1, total_steps),
                sample.mean_context_tokens,
                {method: tuple(found) for method, found in by_method.items()},
                sum(sample.input_tokens) / max(1, sum(sample.output_tokens)),
            )
        )
    return tuple(options)


def any_class(profile: Profile, doubt: float = _DOUBT) -> ClassOptions:
    """All classes together, for rows of a class that was not measured. Weighs nothing in the usual mix."""
    merged: dict[tuple[str, int | None], AcceptanceCell] = {}
    for cell in profile.acceptance:
        key = (cell.method, cell.match_tokens)
        before = merged.get(key)
        merged[key] = replace(cell, request_class=ANY_CLASS) if before is None else _add(before, cell)
    total_steps = {m: 0 for m, _ in merged}
    for method in total_steps:
        by_class = {c.request_class: c.num_class_steps for c in profile.acceptance if c.method == method}
        total_steps[method] = sum(by_class.values())
    cells = tuple(replace(cell, num_class_steps=total_steps[method]) for (method, _), cell in merged.items())
    samples = [s for s in profile.samples if s.num_rows]
    sample = replace(
        samples[0],
        request_class=ANY_CLASS,
        input_tokens=tuple(n for s in samples for n in s.input_tokens),
        output_tokens=tuple(n for s in samples for n in s.output_tokens),
    )
    pooled = class_options(replace(profile, samples=(sample,), acceptance=cells), doubt)
    return replace(pooled[0], weight=0.0)


def _add(left: AcceptanceCell, right: AcceptanceCell) -> AcceptanceCell:
    return replace(
        left,
        num_steps=left.num_steps + right.num_steps,
        accepted_per_pos=add_per_pos(left.accepted_per_pos, right.accepted_per_pos),
        rejections_per_pos=add_per_pos(left.rejections_per_pos, right.rejections_per_pos),
    )


def _pool(cells: Sequence[AcceptanceCell]) -> dict[tuple[str, int | None], tuple[float, ...]]:
    """Conditional acceptance per position over all classes: what a class with few observations is pulled to."""
    sums: dict[tuple[str, int | None], list[list[float]]] = {}
    for cell in cells:
        table = sums.setdefault((cell.method, cell.match_tokens), [[0.0, 0.0] for _ in range(MAX_SPECULATIVE_TOKENS)])
        for position, (accepted, rejected) in enumerate(_counts(cell)):
            table[position][0] += accepted
            table[position][1] += accepted + rejected
    return {key: tuple(a / n if n else 0.0 for a, n in table) for key, table in sums.items()}


def _counts(cell: AcceptanceCell) -> list[tuple[int, int]]:
    return list(zip(cell.accepted_per_pos, cell.rejections_per_pos, strict=True))


def _reach(cell: AcceptanceCell, pooled: tuple[float, ...], doubt: float) -> tuple[float, ...]:
    """P_1, P_2, ...: running products of the conditional acceptances, each lowered by the doubt in it."""
    reach, product = [], 1.0
    for position, (accepted, rejected) in enumerate(_counts(cell)):
        weight = accepted + rejected + _PRIOR_WEIGHT
        mean = (accepted + _PRIOR_WEIGHT * pooled[position]) / weight
        product *= max(0.0, mean - doubt * sqrt(mean * (1 - mean) / (weight + 1)))
        reach.append(product)
    return tuple(reach)
