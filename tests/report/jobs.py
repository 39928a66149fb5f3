"""A small finished job, written by hand: every number of its report can be checked on paper."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchspec.accounting.cost import MeteredTime
from batchspec.accounting.summary import AttemptTime, JobSummary
from batchspec.accounting.totals import sum_rows
from batchspec.config import InputConfig
from batchspec.io.schema import ResultRow, ResultSchema
from batchspec.io.store import open_store
from batchspec.io.writer import SUCCESS_NAME, commit_part, part_name
from batchspec.pipeline.attempts import Attempt
from batchspec.pipeline.plan import MANIFEST_NAME, json_line, to_json
from batchspec.pipeline.profiling import PROFILE_COPY_NAME
from batchspec.stats import DecodeStats
from batchspec.types import Completion, FinishReason, Method, Outcome, RowFailure, StepTimes

PRICE = 3.6  # USD per hour: a thousandth of a dollar per device second
LINES = {"load": 10.0, "prefill": 4.0, "verify": 10.0, "overhead": 2.0, "idle": 4.0}

# class, output tokens, accepted per position, rejected per position, (prefill, verify, overhead) seconds
ROWS = [
    ("copy", 6, (2, 1), (1, 1), (1.0, 2.0, 0.5)),
    ("copy", 5, (1, 1), (0, 0), (1.0, 2.0, 0.5)),
    ("chat", 4, (), (), (1.0, 3.0, 0.5)),
    ("chat", 5, (), (), (1.0, 3.0, 0.5)),
]


def answered(index: int, tokens: int, accepted: tuple[int, ...], rejected: tuple[int, ...], times: Any) -> Completion:
    prefill, verify, overhead = times
    num_drafts = (accepted[0] + rejected[0]) if accepted else 0
    return Completion(
        row_index=index,
        token_ids=tuple(range(tokens)),
        text="x",
        finish_reason=FinishReason.LENGTH,
        input_tokens=10,
        cached_input_tokens=0,
        method=Method.PROMPT_LOOKUP if accepted else Method.TARGET_ONLY,
        num_speculative_tokens=2 if accepted else 0,
        num_route_changes=0,
        route_reason="test",
        mean_live_sequences=2.0,
        stats=DecodeStats(
            num_target_steps=tokens - sum(accepted),
            num_drafts=num_drafts,
            num_draft_tokens=2 * num_drafts,
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=accepted,
            num_rejections_per_pos=rejected,
            num_lookup_draft_tokens=2 * num_drafts,
            num_lookup_accepted_tokens=sum(accepted),
        ),
        times=StepTimes(0.1, 1.0 + index, 3.0 + index, prefill, 0.0, verify, overhead),
    )


def write_job(
    output: Path, price: float | None = PRICE, speed: float = 1.0, profile: dict[str, Any] | None = None, **summary: Any
) -> Path:
    """Four answered rows of two classes and one error row; 30 metered seconds (divided by `speed`), 20 tokens."""
    outcomes: list[Outcome] = [
        answered(i, tokens, accepted, rejected, tuple(t / speed for t in times))
        for i, (_, tokens, accepted, rejected, times) in enumerate(ROWS)
    ]
    outcomes.append(RowFailure(4, "empty_prompt", "the prompt holds no text: 0 characters of white space"))
    inputs = pa.table({"prompt": [*["q"] * 4, ""], "request_class": [*(row[0] for row in ROWS), "chat"]})
    schema = ResultSchema(inputs.schema, InputConfig())
    rows = [ResultRow(outcome, worker=0, attempt=1, price_per_hour=price) for outcome in outcomes]
    store = open_store(str(output))
    commit_part(store, 0, schema.arrow, [schema.build_table(inputs, "in.parquet", 0, rows)], {"run_id": "r1"})
    seconds = {line: value / speed for line, value in LINES.items()}
    total = sum(seconds.values())
    with store.open(part_name(0)) as part:
        totals = sum_rows([part])
    time = AttemptTime(total + 1, 16.0 / speed, MeteredTime(total, seconds), price)
    figures = JobSummary(totals, [time], store.root, True, 2).as_json() | summary
    attempt = Attempt(
        attempt=1,
        started_at=0.0,
        refreshed_at=total + 1,
        settings={"max_batch": 2, "routes": {"method": "prompt_lookup"}},
        versions={"batchspec": "0"},
        price_per_hour=price,
        metered_seconds=total,
        line_seconds=seconds,
        engines=[{"model": "/models/m", "dtype": "bfloat16", "max_batch": 2, "batch_invariant": True}],
        end_reason="finished",
        timeline=[(1.0, 0, 0, 2), (3.0, 2, 11, 2), (4.0, 4, 20, 0)],
    )
    columns = {name: name for name in ("prompt", "messages", "request_id", "request_class")}
    manifest = {
        "manifest_version": 1,
        "run_id": "r1",
        "created_at": "2026-01-02T03:04:05+00:00",
        "num_rows": 5,
        "shard_stops": [5],
        "inputs": [],
        "identity": {
            "columns": {**columns, "output_prefix": ""},
            "sampling": {"temperature": 0.0, "max_new_tokens": 6},
            "engine": "torch",
        },
        "versions": {"batchspec": "0", "device_type": "cpu"},
    }
    store.write(MANIFEST_NAME, to_json(manifest).encode())
    attempt.save(store)
    store.write("_batchspec/attempts/0001.json", json.dumps({**_fields(attempt), "refreshed_at": total + 1}).encode())
    if profile is not None:
        store.write(PROFILE_COPY_NAME, to_json(profile).encode())
    store.write(SUCCESS_NAME, json_line(figures).encode())
    return output


def _fields(attempt: Attempt) -> dict[str, Any]:
    return {name: getattr(attempt, name) for name in Attempt.__slots__}
