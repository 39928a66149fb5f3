"""Which class a row is of: its label, and the cell (label x prompt length x output budget) that routing looks up."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CELL_BUCKETS = re.compile(r"/p\d+-\d+/o\d+-\d+$")

DEFAULT_LABEL = "default"


@dataclass(frozen=True, slots=True)
class RequestClass:
    """`label` is what people and summaries group by; `cell` adds the two buckets, finer, for routing."""

    label: str
    prompt_bucket: str
    output_bucket: str

    @property
    def cell(self) -> str:
        return f"{self.label}/p{self.prompt_bucket}/o{self.output_bucket}"


class RequestClassifier:
    """Pure: the same row always gives the same class."""

    def label(self, request_class: str | None) -> str:
        """The row's own label, `default` where it has none."""
        return request_class or DEFAULT_LABEL

    def classify(self, request_class: str | None, num_prompt_tokens: int, max_new_tokens: int) -> RequestClass:
        """The class of a row, from its label (None: it has none), prompt length and output budget in tokens."""
        return RequestClass(self.label(request_class), _bucket(num_prompt_tokens), _bucket(max_new_tokens))


def _bucket(num_tokens: int) -> str:
    """The power-of-four range that holds `num_tokens`, lower end in, upper end out: 300 -> `256-1024`."""
    low = 1
    while low * 4 <= num_tokens:
        low *= 4
    return f"{low if num_tokens else 0}-{low * 4}"


def label_of(cell: str | None) -> str:
    """The label of a cell (or of a bare label), `default` where there is none."""
    return _CELL_BUCKETS.sub("", cell) if cell else DEFAULT_LABEL
