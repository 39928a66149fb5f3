"""How much memory there is to take, and what happens when a device has none left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.engine import memory
from batchspec.types import Method
from tests.engine.test_exactness import answers, output_ids, random_prompts
from tests.engine.test_sampling import draft_engine, noisy_copy
from tests.engine.tiny import FixedRoute, build_module, make_engine, requests_for, run

MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n"
GIB = 2**30


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({}, 4 * GIB),
        ({"proc/meminfo": MEMINFO}, 8_192_000_000),
        (
            {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5"},
            8_192_000_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/work.slice/job.scope\n",
                "sys/fs/cgroup/work.slice/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/work.slice/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/work.slice/job.scope/memory.max": "max\n",
                "sys/fs/cgroup/work.slice/job.scope/memory.current": f"{GIB}\n",
            },
            GIB,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}\n",
            },
            0,
        ),
    ],
)
def test_a_containers_limit_counts_where_it_is_less_than_the_machine_has(
    contents: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert memory.free_bytes(files(tmp_path, contents)) == expected


def test_a_kernel_without_huge_pages_serves_tensors_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(memory.mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    assert memory.zeros((70, 2**20), torch.uint8).sum() == 0


@pytest.mark.parametrize("where", ["forward", "accept"])
@pytest.mark.parametrize("method", [Method.TARGET_ONLY, Method.PROMPT_LOOKUP, Method.DRAFT_MODEL])
def test_a_batch_that_the_device_cannot_hold_shrinks_and_says_so(
    method: Method, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, prompts = build_module("llama"), [f"a start that all rows share: {end}" for end in random_prompts(3, 9)]
    engine = draft_engine(module, noisy_copy(module, 0.1), chunk=16)
    most_rows: list[int] = []

    def with_three_rows_at_most(call: Any, slots_of: Any) -> Any:
        def limited(*arguments: Any) -> Any:
            found = call(*arguments)  # what was written until memory ended is not taken back
            most_rows.append(len(slots_of(*arguments)))
            if most_rows[-1] > 3:
                most_rows.pop()
                raise torch.OutOfMemoryError("out of memory")
            return found

        return limited

    if where == "forward":
        forward = with_three_rows_at_most(engine.parts.model.forward, lambda segments, kv: {s.slot for s in segments})
        object.__setattr__(engine.parts.model, "forward", forward)
    else:
        rule = engine.parts.rule
        rule.blocks = with_three_rows_at_most(rule.blocks, lambda logits, rows: rows)
    with caplog.at_level(logging.WARNING):
        outcomes = run(engine, requests_for(prompts, max_new_tokens=24), FixedRoute(method, 3))
    assert output_ids(outcomes) == answers(module, prompts, 24)
    assert max(most_rows) == 3
    assert "rows are live from here" in caplog.text


def test_a_row_that_does_not_fit_alone_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(build_module("llama"), max_batch=2)

    def none(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(type(engine.parts.model), "forward", none)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, requests_for(["abc", "xyz"], max_new_tokens=4))
