"""The rows that a profile is measured on: drawn evenly from all classes, decoded once. Pure; no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchspec.profile.acceptance import DecodedRow
from batchspec.profile.records import ClassSample
from batchspec.types import Completion, Outcome, Request
from batchspec.workload import RequestClassifier


@dataclass(frozen=True)
class SampledCompletion:
    """A sampled row with the ids of its prompt and its exact output."""

    request: Request
    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def decoded(self) -> DecodedRow:
        label = RequestClassifier().label(self.request.request_class)
        return DecodedRow(label, self.token_ids, self.num_prompt_tokens)


def sampled_completions(
    requests: Sequence[Request], outcomes: Iterable[Outcome], encode: Callable[[Request], Sequence[int]]
) -> list[SampledCompletion]:
    """Those of the requests that were answered, with the ids that `encode` gives their prompts."""
    request_of = {request.row_index: request for request in requests}
    found = []
    for completion in outcomes:
        if isinstance(completion, Completion):
            request = request_of[completion.row_index]
            prompt = encode(request)
            found.append(SampledCompletion(request, (*prompt, *completion.token_ids), len(prompt)))
    return found


def stratified(requests: Sequence[Request], num_rows: int) -> list[Request]:
    """At most `num_rows` rows, but one of every class: classes as equal as their rows allow, those of each spread over
    the input, classes interleaved."""
    by_class: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_class[RequestClassifier().label(request.request_class)].append(request)
    count_of, left = dict[str, int](), num_rows
    for rank, label in enumerate(sorted(by_class, key=lambda label: len(by_class[label]))):
        # what a small class leaves goes to larger ones
        count_of[label] = min(len(by_class[label]), max(1, left // (len(by_class) - rank)))
        left -= count_of[label]
    picked = [[rows[i * len(rows) // count_of[c]] for i in range(count_of[c])] for c, rows in by_class.items()]
    return [rows[i] for i in range(max(map(len, picked), default=0)) for rows in picked if i < len(rows)]


def row_shares(requests: Sequence[Request]) -> dict[str, float]:
    """Each class's share of these rows."""
    counts = Counter(RequestClassifier().label(request.request_class) for request in requests)
    return {label: count / len(requests) for label, count in counts.items()}


def class_samples(
    completions: Sequence[SampledCompletion], shares: Mapping[str, float] | None = None
) -> tuple[ClassSample, ...]:
    """Prompt and output lengths by class; `shares` are the classes' shares of the input's rows."""
    by_class: dict[str, list[DecodedRow]] = defaultdict(list)
    for completion in completions:
        row = completion.decoded
        by_class[row.request_class].append(row)
    return tuple(
        ClassSample(
            label,
            tuple(row.num_prompt_tokens for row in found),
            tuple(len(row.token_ids) - row.num_prompt_tokens for row in found),
            (shares or {}).get(label),
        )
        for label, found in sorted(by_class.items())
    )
