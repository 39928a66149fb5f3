"""The exactness audit: is every written token the one that the target model itself would have written?

Each sampled row is judged by `engine.reference`, a plain forward of `transformers`. A token that differs is a near-tie
where rounding alone can bring it about (its margin is within the noise of the logits), else a fault.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from batchspec.errors import AuditFault
from batchspec.text import TABLE_WIDTH, columns, number

if TYPE_CHECKING:
    from batchspec.engine.reference import Reference, RowCheck, WrittenRow

ARGMAX, DRAW, SUPPORT = "argmax", "draw", "support"
MAX_NAMED_FAULTS = 10
_HEADINGS = ("class", "method", "check", "rows", "tokens", "equal", "near-ties", "faults", "widest")
_WIDTHS = (18, 17, 7, -6, -9, -9, -9, -7, -7)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A row of the output that is audited: its place, its group, and what the reference is asked about."""

    row_index: int
    request_class: str
    method: str
    written: WrittenRow

    @property
    def check(self) -> str:
        """What its tokens must be: the argmax, the row's own draw, or any token that the target may draw."""
        if self.written.request.sampling.greedy:
            return ARGMAX
        return DRAW if self.written.draws_its_tokens else SUPPORT


@dataclass(frozen=True, slots=True)
class Fault:
    """`output_index` is None where the row as a whole is at fault (its prompt, its end, its text)."""

    row_index: int
    output_index: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Counts:
    """`widest_near_tie_logits` is the largest margin that was still within the noise."""

    rows: int = 0
    tokens: int = 0
    near_ties: int = 0
    faults: int = 0
    widest_near_tie_logits: float = 0.0

    @property
    def equal_tokens(self) -> int:
        return self.tokens - self.near_ties - self.faults

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.near_ties + other.near_ties,
            self.faults + other.faults,
            max(self.widest_near_tie_logits, other.widest_near_tie_logits),
        )


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of an output. `groups` are by class, method and kind of check."""

    output: str
    model: str
    dtype: str
    acceptance_rule: str
    noise_logits: float
    noise_positions: int
    device_seconds: float
    groups: Mapping[tuple[str, str, str], Counts]
    faults: Sequence[Fault] = field(default_factory=tuple)

    @property
    def total(self) -> Counts:
        return sum(self.groups.values(), start=Counts())

    def refuse_faults(self) -> None:
        """Raise AuditFault, naming the first faults, where there is any."""
        if self.faults:
            named = [
                f"row_index {fault.row_index}"
                + (f", output token {fault.output_index}" if fault.output_index is not None else "")
                + f": {fault.message}"
                for fault in self.faults[:MAX_NAMED_FAULTS]
            ]
            more = len(self.faults) - len(named)
            raise AuditFault(
                "\n  ".join([f"{len(self.faults)} faults in {self.output}:", *named])
                + (f"\n  and {more} more" if more else "")
            )

    def as_json(self) -> dict[str, Any]:
        total = self.total
        return {
            "output": self.output,
            "model": self.model,
            "dtype": self.dtype,
            "acceptance_rule": self.acceptance_rule,
            "noise_logits": self.noise_logits,
            "noise_positions": self.noise_positions,
            "device_seconds": self.device_seconds,
            **_counts_as_json(total),
            "groups": [
                {"request_class": name, "method": method, "check": check, **_counts_as_json(counts)}
                for (name, method, check), counts in self.groups.items()
            ],
            "first_faults": [asdict(fault) for fault in self.faults[:MAX_NAMED_FAULTS]],
        }

    def as_text(self) -> str:
        """The verdict, the table by class and method, and what the words mean; at most 100 columns wide."""
        total = self.total
        notes = [
            f"{self._verdict()} {total.tokens:,} tokens of {total.rows:,} rows, {total.near_ties:,} near-ties.",
            *(columns(cells, _WIDTHS) for cells in self._lines()),
            f"Reference: a plain {self.dtype} forward of transformers with eager attention over prompt and output. A "
            f"near-tie is a token that rounding can bring about: another was at most {self.noise_logits:.3g} logits "
            f"ahead, twice the largest effect of {self.dtype} on a difference between logits at "
            f"{self.noise_positions:,} positions of these rows. `widest` is the largest such lead.",
        ]
        if any(check == SUPPORT for _, _, check in self.groups):
            notes.append(
                "Rejection rule: the text of sampled speculative rows depends on the proposals too, so their tokens "
                "(`support`) are checked to be among those that the target may draw, and their acceptance counters "
                "to add up."
            )
        wrapped = [textwrap.fill(n, TABLE_WIDTH) if len(n) > TABLE_WIDTH else n for n in notes]
        return "\n".join([wrapped[0], "", *wrapped[1:]])

    def _verdict(self) -> str:
        return f"{len(self.faults)} FAULTS:" if self.faults else "0 faults: the model itself would have written"

    def _lines(self) -> list[tuple[str, ...]]:
        lines = [(*key, *_cells(counts)) for key, counts in self.groups.items()]
        return [_HEADINGS, *lines, ("all sampled rows", "", "", *_cells(self.total)), ("",) * len(_HEADINGS)]


def judge(
    answer: SampledAnswer, check: RowCheck, noise_logits: float, counter_problem: str | None
) -> tuple[Counts, list[Fault]]:
    """Counts and faults of one row. Faults of the row as a whole count as one."""
    problem = check.problem or counter_problem
    if problem is not None:
        return Counts(rows=1, tokens=check.num_tokens, faults=1), [Fault(answer.row_index, None, problem)]
    near_ties = [d.margin_logits for d in check.differences if d.margin_logits <= noise_logits]
    faults = [
        Fault(
            answer.row_index,
            d.output_index,
            f"{d.written} was written, "
            + (f"{d.expected} is" if d.expected is not None else "others are")
            + f" {d.margin_logits:.3g} logits ahead",
        )
        for d in check.differences
        if d.margin_logits > noise_logits
    ]
    return Counts(1, check.num_tokens, len(near_ties), len(faults), max(near_ties, default=0.0)), faults


def audit_rows(
    answers: Iterable[tuple[SampledAnswer, str | None]], reference: Reference
) -> tuple[dict[tuple[str, str, str], Counts], list[Fault]]:
    """Judge every sampled answer (with what is wrong with its counters, if anything) by the reference."""
    groups: dict[tuple[str, str, str], Counts] = {}
    faults: list[Fault] = []
    for answer, counter_problem in answers:
        counts, found = judge(answer, reference.check(answer.written), reference.noise_logits, counter_problem)
        key = (answer.request_class, answer.method, answer.check)
        groups[key] = groups.get(key, Counts()) + counts
        faults += found
    return dict(sorted(groups.items())), faults


def choose_rows(strata: Mapping[Any, Sequence[Any]], num_rows: int) -> list[Any]:
    """`num_rows` items, taken from the strata in turn, so that a rare class is seen as often as a common one."""
    chosen: list[Any] = []
    rank = 0
    while len(chosen) < num_rows:
        layer = [items[rank] for _, items in sorted(strata.items()) if rank < len(items)]
        if not layer:
            break
        chosen += layer[: num_rows - len(chosen)]
        rank += 1
    return chosen


def _cells(counts: Counts) -> tuple[str, ...]:
    return (
        f"{counts.rows:,}",
        f"{counts.tokens:,}",
        f"{counts.equal_tokens:,}",
        f"{counts.near_ties:,}",
        f"{counts.faults:,}",
        number(counts.widest_near_tie_logits, 3) if counts.near_ties else "-",
    )


def _counts_as_json(counts: Counts) -> dict[str, Any]:
    return {**asdict(counts), "equal_tokens": counts.equal_tokens}
