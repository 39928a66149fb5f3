"""What a profile holds: measured counters and seconds, from which routes and predictions are derived. No torch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields

from batchspec.ngrams import grade_of

PROFILE_VERSION = 2

_DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)

# Enough for curves of some 20 points.
_CONVEX_ROUNDS = 2000


@dataclass(frozen=True)
class ClassSample:
    """The rows of one class that were decoded to measure: what they brought and what they wrote, in tokens.

    Classes are sampled about equally; `input_share` is the class's share of the input's rows (None: the sample's).
    """

    request_class: str
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    input_share: float | None = None

    @property
    def num_rows(self) -> int:
        return len(self.input_tokens)

    @property
    def mean_output_tokens(self) -> float:
        return sum(self.output_tokens) / max(1, self.num_rows)

    @property
    def mean_context_tokens(self) -> float:
        """Mean context over a row's life in decode: its prompt and half its answer."""
        return sum(self.input_tokens) / max(1, self.num_rows) + self.mean_output_tokens / 2


@dataclass(frozen=True)
class AcceptanceCell:
    """How proposals of one method fared in one class: replayed over exact outputs, or, where an engine drafts out of
    sight, as it counted them.

    `match_tokens` and `match_support` (batchspec.ngrams.Support) tell prompt lookup's cells apart (None for a draft
    model). Steps depend on what is proposed in those before: every least match, `min_match_tokens`, has cells of its
    own (None for a draft model alone). `num_steps` of the class's `num_class_steps` target steps proposed something in
    this cell; `accepted_per_pos` and `rejections_per_pos` count judged positions. A draft model's cell of method
    lookup_then_draft holds the steps in which lookup found nothing.
    """

    request_class: str
    method: str
    min_match_tokens: int | None
    match_tokens: int | None
    match_support: int | None
    num_class_steps: int
    num_steps: int
    accepted_per_pos: tuple[int, ...]
    rejections_per_pos: tuple[int, ...]

    @property
    def grade(self) -> int | None:
        """The grade of the match that proposed; None for a draft model."""
        return None if self.match_tokens is None else grade_of(self.match_tokens, self.match_support or 0)


@dataclass(frozen=True)
class Curve:
    """Seconds over a count, measured at some counts, a straight line in between and beyond."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, count: float) -> float:
        left = min(max(bisect_right(self.counts, count) - 1, 0), len(self.counts) - 2)
        x0, x1 = self.counts[left], self.counts[left + 1]
        y0, y1 = self.seconds[left], self.seconds[left + 1]
        return max(0.0, y0 + (y1 - y0) * (count - x0) / (x1 - x0))

    def scaled(self, factor: float) -> Curve:
        return Curve(self.counts, tuple(factor * seconds for seconds in self.seconds))

    def convex(self) -> Curve:
        """The curve nearest by relative error (least squares) whose slope is never negative and never falls: a forward
        waits for memory first, then for its arithmetic, and noise that says otherwise moves the slope, which routes.

        Method: Hildreth, "Point estimates of ordinates of concave functions" (1954).
        """
        y = list(self.seconds)
        variance = [s * s for s in y]
        rows: list[dict[int, float]] = [{0: -1.0, 1: 1.0}]  # each times y must not be negative
        for i in range(1, len(y) - 1):
            before, after = 1 / (self.counts[i] - self.counts[i - 1]), 1 / (self.counts[i + 1] - self.counts[i])
            rows.append({i - 1: before, i: -before - after, i + 1: after})
        multipliers = [0.0] * len(rows)
        for _ in range(_CONVEX_ROUNDS):
            for number, row in enumerate(rows):
                norm = sum(a * a * variance[i] for i, a in row.items())
                step = min(multipliers[number], sum(a * y[i] for i, a in row.items()) / norm)
                multipliers[number] -= step
                for i, a in row.items():
                    y[i] -= step * variance[i] * a
        return Curve(self.counts, tuple(y))._minorant()  # the rounds come near, and no nearer

    def _minorant(self) -> Curve:
        """The largest curve nowhere above this one whose slope is never negative and never falls."""
        corners: list[int] = []
        for i in range(len(self.counts)):
            while corners and self._slope(corners[-1], i) <= 0:
                corners.pop()  # what lies before is no lower
            while len(corners) > 1 and self._slope(corners[-2], corners[-1]) >= self._slope(corners[-1], i):
                corners.pop()
            corners.append(i)
        hull = [(0, self.seconds[corners[0]]), *((self.counts[i], self.seconds[i]) for i in corners)]
        minorant = Curve(tuple(count for count, _ in hull), tuple(seconds for _, seconds in hull))
        return Curve(self.counts, tuple(minorant.at(count) for count in self.counts))

    def _slope(self, i: int, j: int) -> float:
        return (self.seconds[j] - self.seconds[i]) / (self.counts[j] - self.counts[i])


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step on this machine with these models.

    `target` and `draft` are forwards over the number of positions in the pack at no context, `per_kv_token` what each
    token of context adds per sequence (it is read) and `per_position_kv_token` per position beyond a sequence's first
    (it is attended again), `per_sequence` the engine's own work on a row in a step, `per_lookup` what
    asking prompt lookup costs a row, `prefill_per_token` the intake of prompts; the same for the draft.
    """

    target: Curve
    per_kv_token: float
    per_position_kv_token: float
    per_sequence: float
    per_lookup: float
    prefill_per_token: float
    draft: Curve | None = None
    draft_prefill_per_token: float = 0.0
    draft_per_kv_token: float = 0.0

    def forward_seconds(self, num_sequences: float, num_positions: float, context_tokens: float) -> float:
        """A forward of the target over this many rows and positions at a mean context per row."""
        more_positions = max(0.0, num_positions - num_sequences)
        for_context = num_sequences * self.per_kv_token + more_positions * self.per_position_kv_token
        return self.target.at(num_positions) + for_context * context_tokens

    def step_seconds(self, num_sequences: float, num_positions: float, context_tokens: float) -> float:
        """A step: the forward, and the engine's own work on its rows."""
        forward = self.forward_seconds(num_sequences, num_positions, context_tokens)
        return forward + num_sequences * self.per_sequence

    def scaled(self, factor: float) -> StepCost:
        """What a machine takes that is slower by this factor in all it does."""
        draft = None if self.draft is None else self.draft.scaled(factor)
        seconds = {
            field.name: factor * getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("target", "draft")
        }
        return StepCost(self.target.scaled(factor), draft=draft, **seconds)

    def draft_step_seconds(self, num_rows: float, context_tokens: float) -> float:
        """A forward of the draft model, one position a row; 0 without a draft model."""
        if self.draft is None:
            return 0.0
        return self.draft.at(num_rows) + num_rows * self.draft_per_kv_token * context_tokens


@dataclass(frozen=True)
class Trial:
    """One run of an A/B on real rows (target_only, routed, or the route of an engine), beside what the profile predicts
    for it."""

    setting: str
    max_batch: int
    output_tokens: int
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class Profile:
    """Acceptance (of this traffic) and step cost (of this machine), with what they are valid for."""

    created_at: str
    fingerprint: dict[str, str]
    sampling: dict[str, float | str]
    max_batch: int
    max_new_tokens: int
    samples: tuple[ClassSample, ...]
    acceptance: tuple[AcceptanceCell, ...]
    step_cost: StepCost
    trials: tuple[Trial, ...] = ()
    skipped: tuple[str, ...] = ()
    memory_bytes: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    measuring_seconds: float = 0.0
    profile_version: int = PROFILE_VERSION

    @property
    def row_shares(self) -> dict[str, float]:
        """Each class's share of the input's rows."""
        found = {s.request_class: s.num_rows if s.input_share is None else s.input_share for s in self.samples}
        return {label: share / max(1e-9, sum(found.values())) for label, share in found.items()}

    @property
    def token_shares(self) -> dict[str, float]:
        """Each class's share of the tokens that the input's rows write."""
        rows = self.row_shares
        found = {s.request_class: rows[s.request_class] * s.mean_output_tokens for s in self.samples}
        return {label: share / max(1e-9, sum(found.values())) for label, share in found.items()}

    def draft_lengths(self, method: str) -> tuple[int, ...]:
        """The usual draft lengths, as far as the method was measured."""
        deepest = max((len(cell.accepted_per_pos) for cell in self.acceptance if cell.method == method), default=0)
        return tuple(length for length in _DRAFT_LENGTHS if length <= deepest)

    @property
    def one_route_per_engine(self) -> bool:
        """Whether its engine serves one route, and another route needs another engine (vLLM)."""
        return self.fingerprint.get("engine") == "vllm"
