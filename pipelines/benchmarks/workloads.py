"""The files that the engine is timed on, made from a model's tokenizer and one file of real prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = (
    "the of a to in order report number river winter market answer letter window garden silver station between morning "
    "music people water question system paper early small great north light engine table summer field road"
)


@dataclass(frozen=True)
class Workload:
    """`batch` rows live at most; `stride` takes every so manyth row of the file."""

    name: str
    batch: int
    max_new_tokens: int
    stride: int = 1


WORKLOADS = {
    "batch-32": Workload("batch-32", 32, 128),
    "batch-8": Workload("batch-8", 8, 128),
    "batch-1": Workload("batch-1", 1, 128, stride=6),
    "long-prompts": Workload("long-prompts", 16, 64),
    "shared-prefix": Workload("shared-prefix", 32, 32),
    "shared-prefix-100": Workload("shared-prefix-100", 32, 32),  # short enough to run with reuse off, too
    "tiny-rows": Workload("tiny-rows", 32, 8),
    "tiny-rows-1000": Workload("tiny-rows-1000", 32, 8),  # short enough to run three times beside a peer
}


def write_workload(workload: Workload, real_prompts: str, tokenizer: Any, folder: Path) -> Path:
    """The workload's rows as Parquet with a `messages` column; the real prompts themselves for the `batch-` ones."""
    texts = {
        "long-prompts": lambda: [text_of(tokenizer, 3900, seed) for seed in range(16)],
        "shared-prefix": lambda: shared_prefix(tokenizer, 1000),
        "shared-prefix-100": lambda: shared_prefix(tokenizer, 100),
        "tiny-rows": lambda: [text_of(tokenizer, 10, seed) for seed in range(10_000)],
        "tiny-rows-1000": lambda: [text_of(tokenizer, 10, seed) for seed in range(1000)],
    }
    path = folder / f"{workload.name}.parquet"
    if workload.name in texts:
        messages = [[{"role": "user", "content": text}] for text in texts[workload.name]()]
    else:
        messages = pq.read_table(real_prompts, columns=["messages"])["messages"].to_pylist()
    pq.write_table(pa.table({"messages": messages[:: workload.stride]}), path)
    return path


def shared_prefix(tokenizer: Any, num_rows: int) -> list[str]:
    prefix = text_of(tokenizer, 1000, 0)
    return [f"{prefix}\n{text_of(tokenizer, 25, 1 + row)}" for row in range(num_rows)]


def text_of(tokenizer: Any, num_tokens: int, seed: int) -> str:
    """Words that make up about this many tokens."""
    chooser = random.Random(seed)
    text = " ".join(chooser.choices(WORDS.split(), k=num_tokens))
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:num_tokens]))
