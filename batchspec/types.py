"""One frozen record per stage of a request's life, and the protocols between stages. No torch in here.

Parquet row -> Request -> (engine) -> Completion | RowFailure -> result row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, Protocol

from batchspec.stats import DecodeStats


class Method(StrEnum):
    """How a row's tokens are proposed. A target-only row is a row with an empty proposal."""

    TARGET_ONLY = "target_only"
    PROMPT_LOOKUP = "prompt_lookup"
    DRAFT_MODEL = "draft_model"
    LOOKUP_THEN_DRAFT = "lookup_then_draft"

    @property
    def option_name(self) -> str:
        return self.value.replace("_", "-")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a row asks of decoding. The defaults are greedy and 512 new tokens.

    A temperature below 1e-5 means greedy; top_k 0 and top_p 1 mean off. `stop` strings end the row at their
    earliest match, once `min_new_tokens` are out; the ids keep the token that completes the match, the text
    is cut before it.
    """

    max_new_tokens: int = 512
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1

    def problems(self) -> list[str]:
        """What is wrong with these settings, one line each; empty when they are legal."""
        rules = {
            f"max_new_tokens must be at least 1, got {self.max_new_tokens}": self.max_new_tokens >= 1,
            f"min_new_tokens must be between 0 and max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}": 0
            <= self.min_new_tokens
            <= self.max_new_tokens,
            "stop strings must not be empty": all(self.stop),
            f"temperature must be a finite number >= 0, got {self.temperature}": 0 <= self.temperature < inf,
            f"top_k must be >= 0, got {self.top_k}": self.top_k >= 0,
            f"top_p must be above 0 and at most 1, got {self.top_p}": 0 < self.top_p <= 1,
            f"min_p must be at least 0 and below 1, got {self.min_p}": 0 <= self.min_p < 1,
            f"repetition_penalty must be above 0, got {self.repetition_penalty}": 0 < self.repetition_penalty < inf,
            f"presence_penalty must be between -2 and 2, got {self.presence_penalty}": abs(self.presence_penalty) <= 2,
            f"frequency_penalty must be between -2 and 2, got {self.frequency_penalty}": abs(self.frequency_penalty)
            <= 2,
        }
        return [problem for problem, holds in rules.items() if not holds]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. Exactly one of `prompt` and `messages` is set; `row_index` is its place in the whole input."""

    row_index: int
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    request_id: str | None = None
    request_class: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def row_key(self) -> str:
        """The key of the row's noise stream: its id if given (rows in any order give the same text), else its index."""
        return f"id:{self.request_id}" if self.request_id is not None else f"row:{self.row_index}"


@dataclass(frozen=True, slots=True)
class Route:
    """How a row is decoded in one step, and why. `min_match_tokens` concerns prompt lookup, and so does
    `num_tokens_by_grade`: entry g is how much to propose after a match of grade g, where that depends on it.
    `num_draft_tokens` is how deep the draft model goes under lookup_then_draft, where that is another depth. A draft
    model is not asked where it would first have to read more than `most_lag_per_token` tokens for each that the row may
    still write."""

    method: Method
    num_speculative_tokens: int = 0
    reason: str = ""
    min_match_tokens: int = 2
    num_tokens_by_grade: tuple[int, ...] = ()
    num_draft_tokens: int | None = None
    most_lag_per_token: float | None = None

    def tokens_for_match(self, grade: int) -> int:
        """Most tokens to propose after a match of this grade."""
        return self.num_tokens_by_grade[grade] if self.num_tokens_by_grade else self.num_speculative_tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A row's wall-clock seconds from admission, and its share of metered device time (all in seconds).
    Where an engine drafts within the step that verifies, `draft_seconds` is None and `verify_seconds` holds both."""

    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    e2e_seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float | None = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0

    @property
    def device_seconds(self) -> float:
        return self.prefill_seconds + (self.draft_seconds or 0.0) + self.verify_seconds + self.overhead_seconds


@dataclass(frozen=True, slots=True)
class Completion:
    """An answered row. `token_ids` keep the ending EOS; `text` is the decode of all of them at once, without it."""

    row_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    input_tokens: int
    cached_input_tokens: int
    method: Method
    num_speculative_tokens: int
    num_route_changes: int
    route_reason: str
    mean_live_sequences: float
    stats: DecodeStats
    times: StepTimes

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that could not be answered: the error row of the output. `times` is what it cost all the same."""

    row_index: int
    error_type: str
    error_message: str
    input_tokens: int | None = None
    times: StepTimes = field(default_factory=StepTimes)


Outcome = Completion | RowFailure


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded, and what the run may rely on. Goes to part metadata, attempts and the summary.

    `memory_bytes` names what was measured: target_weights, target_kv, draft_weights, draft_kv, ...
    `max_batch` is what the memory really allowed.
    """

    engine: str
    model: str
    dtype: str
    device: str
    max_batch: int
    batch_invariant: bool | None
    draft_model: str | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a policy may learn of one step: `tokens` committed over all rows in `decode_seconds` of the device (prefill
    left out); rows pre-empted since the engine was loaded; `drafts` (request class, proposed, accepted) of the rows
    that proposed; `retired` (request class, prompt + output ids, prompt tokens) of the rows that ended. Where no prompt
    was read and the engine can tell: wall seconds of the target's forward, and tokens of context over all rows."""

    num_live: int
    tokens: int
    decode_seconds: float
    forward_seconds: float | None = None
    context_tokens: int = 0
    num_preemptions: int = 0
    drafts: Sequence[tuple[str, int, int]] = ()
    retired: Sequence[tuple[str, Sequence[int], int]] = ()


class RoutePolicy(Protocol):
    """Says how a class is decoded at a given number of live sequences; asked for every row in every step."""

    def route(self, request_class: str | None, occupancy: int) -> Route: ...

    def observe(self, step: StepReport) -> None:
        """Called after every step. Static policies learn nothing."""


class StepAttribution(Protocol):
    """Splits the seconds of one step among the rows that shared it. Pure."""

    @property
    def rule(self) -> str:
        """The rule's name and coefficients, as written to part metadata."""

    def shares(self, num_positions: Sequence[int], kv_tokens: Sequence[int]) -> list[float]:
        """One share per row, summing to 1: row i computed `num_positions[i]` over `kv_tokens[i]` of context."""


class RequestSource(Protocol):
    """Where an engine takes its next request from."""

    def take(self, wait: bool) -> Request | None:
        """The next request. None means: nothing at hand yet (`wait=False`), or no more will ever come (`wait=True`).

        An engine waits only when it holds no row and has handed every outcome over.
        """


class Engine(Protocol):
    """Decodes requests. One engine lives in one worker and owns its device."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def metered_seconds(self) -> Mapping[str, float]:
        """Device seconds so far by line: compile, load, warmup, prefill, draft, verify, overhead, idle. Only grows.

        The lines cover every second since loading began; the time in which the caller handles an outcome counts as
        idle, since the device waits for it. The mapping is the caller's to keep; another thread may ask for it.
        """

    def run(self, source: RequestSource, policy: RoutePolicy) -> Iterator[Outcome]:
        """Decode until the source says that no more will come. Yields each row once, as it ends, in any order.

        A bad row is a RowFailure; an exception means that the engine cannot go on.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row as a drafter sees it. `token_ids` are prompt + committed output (the live list: do not keep or change it);
    at most `num_tokens` may be proposed; `sampling` and `row_key` let a draft model draw with the row's own noise."""

    row_index: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_tokens: int
    route: Route
    sampling: SamplingParams
    row_key: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens proposed for one row in one step. `num_draft_steps` counts draft-model forwards spent on it."""

    token_ids: tuple[int, ...] = ()
    from_lookup: bool = False
    num_draft_steps: int = 0
    probabilities: Any = None


NO_PROPOSAL = Proposal()


class Drafter(Protocol):
    """Proposes tokens for rows. State is per row and may be forgotten at any time without changing any text."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """One proposal per row, in order, of at most `row.num_tokens` tokens; NO_PROPOSAL declines."""

    def forget(self, row_index: int) -> None:
        """The row has ended or was pre-empted: drop its state, if there is any."""
