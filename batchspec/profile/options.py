"""How likely each position of a proposal is reached and accepted, by class, as a profile's acceptance says. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from batchspec.config import MAX_SPECULATIVE_TOKENS
from batchspec.profile.policy import ANY_CLASS
from batchspec.profile.records import AcceptanceCell, Profile
from batchspec.stats import add_per_pos
from batchspec.types import Method, Route

# Conditional acceptance is pulled towards the mean over classes with the weight of this many observations, and then
# lowered by this many standard deviations: enough that a cell without evidence does not lead.
_PRIOR_WEIGHT = 20.0
_DOUBT = 0.5


# A method, and the least match from which its prompt lookup proposes (0: it has none).
Setting = tuple[Method, int]


@dataclass(frozen=True)
class Option:
    """One way of proposing for a class: `share` of its steps propose here, P_1 >= P_2 >= ... by position. `grade` is
    that of the match that proposes, None for a draft model.

    `per_depth` says whether each position costs a forward of the draft model for the rows that draft so deep.
    """

    share: float
    reach: tuple[float, ...]
    grade: int | None

    @property
    def per_depth(self) -> bool:
        return self.grade is None


@dataclass(frozen=True)
class ClassOptions:
    """What is known of a class: its share of the tokens written, and so of the live rows, its mean sizes, and the
    options of every setting.

    `catch_up` is what a row brings for a draft model to read: prompt tokens per token that it writes.
    """

    request_class: str
    weight: float
    context_tokens: float
    by_setting: Mapping[Setting, tuple[Option, ...]]
    catch_up: float = 0.0

    def of_route(self, route: Route) -> tuple[Option, ...]:
        """The options of the setting measured that is nearest to the route's: its method, the same least match or the
        next lower one."""
        least = [
            least for method, least in self.by_setting if method is route.method and least <= route.min_match_tokens
        ]
        return self.by_setting[route.method, max(least)] if least else ()


def class_options(profile: Profile, doubt: float = _DOUBT) -> tuple[ClassOptions, ...]:
    """Probabilities of reaching and accepting each position, by class, method and match length, `doubt` standard
    deviations below their estimate (0 to predict, more to decide)."""
    weights = profile.token_shares
    pooled = _pool(profile.acceptance)
    options = []
    for sample in profile.samples:
        by_setting: dict[Setting, list[Option]] = {}
        for cell in profile.acceptance:
            if cell.request_class == sample.request_class and cell.num_class_steps:
                share = cell.num_steps / cell.num_class_steps
                reach = _reach(cell, pooled[_kind(cell)], doubt)
                by_setting.setdefault(_setting(cell), []).append(Option(share, reach, cell.grade))
        for method, least in by_setting:
            if method is Method.LOOKUP_THEN_DRAFT:
                by_setting[method, least] += by_setting.get((Method.PROMPT_LOOKUP, least), [])
        options.append(
            ClassOptions(
                sample.request_class,
                weights[sample.request_class],
                sample.mean_context_tokens,
                {setting: tuple(found) for setting, found in by_setting.items()},
                sum(sample.input_tokens) / max(1, sum(sample.output_tokens)),
            )
        )
    return tuple(options)


def any_class(profile: Profile, doubt: float = _DOUBT) -> ClassOptions:
    """All classes together, for rows of a class that was not measured. Weighs nothing in the usual mix."""
    merged: dict[tuple[Setting, int | None], AcceptanceCell] = {}
    steps: dict[Setting, dict[str, int]] = defaultdict(dict)
    for cell in profile.acceptance:
        key = _kind(cell)
        merged[key] = _add(merged[key], cell) if key in merged else replace(cell, request_class=ANY_CLASS)
        steps[_setting(cell)][cell.request_class] = cell.num_class_steps
    cells = tuple(replace(cell, num_class_steps=sum(steps[_setting(cell)].values())) for cell in merged.values())
    samples = [s for s in profile.samples if s.num_rows]
    sample = replace(
        samples[0],
        request_class=ANY_CLASS,
        input_tokens=tuple(n for s in samples for n in s.input_tokens),
        output_tokens=tuple(n for s in samples for n in s.output_tokens),
    )
    pooled = class_options(replace(profile, samples=(sample,), acceptance=cells), doubt)
    return replace(pooled[0], weight=0.0)


def _setting(cell: AcceptanceCell) -> Setting:
    return Method(cell.method), cell.min_match_tokens or 0


def _kind(cell: AcceptanceCell) -> tuple[Setting, int | None]:
    return _setting(cell), cell.grade


def _add(left: AcceptanceCell, right: AcceptanceCell) -> AcceptanceCell:
    return replace(
        left,
        num_steps=left.num_steps + right.num_steps,
        accepted_per_pos=add_per_pos(left.accepted_per_pos, right.accepted_per_pos),
        rejections_per_pos=add_per_pos(left.rejections_per_pos, right.rejections_per_pos),
    )


def _pool(cells: Sequence[AcceptanceCell]) -> dict[tuple[Setting, int | None], tuple[float, ...]]:
    """Conditional acceptance per position over all classes: what a class with few observations is pulled to."""
    sums: dict[tuple[Setting, int | None], list[list[float]]] = {}
    for cell in cells:
        table = sums.setdefault(_kind(cell), [[0.0, 0.0] for _ in range(MAX_SPECULATIVE_TOKENS)])
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
