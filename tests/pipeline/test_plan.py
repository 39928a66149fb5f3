"""How rows are cut into shards, what a job must agree with, and where workers go."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.config import EngineConfig, OutputConfig, RunConfig, RunOptions
from batchspec.engine.model_files import WHOLLY_HASHED_BYTES, model_identity
from batchspec.errors import UsageError
from batchspec.io.inputs import InputFile, InputSet
from batchspec.io.store import LocalStore
from batchspec.pipeline import devices
from batchspec.pipeline.devices import Place, device_type, worker_places
from batchspec.pipeline.identity import differences
from batchspec.pipeline.plan import load_manifest, plan, save_manifest
from batchspec.pipeline.shards import segments


def input_set(*sizes: tuple[int, int]) -> InputSet:
    """Files of so many rows and bytes."""
    files, first = [], 0
    for number, (num_rows, num_bytes) in enumerate(sizes):
        files.append(InputFile(f"/{number}", f"/{number}", num_rows, num_bytes, num_bytes, first, (), str(number)))
        first += num_rows
    return InputSet(tuple(files), pa.schema([("prompt", pa.string())]))


@pytest.mark.parametrize(
    ("sizes", "shard_rows", "shard_bytes", "stops"),
    [
        ([(0, 0)], 2000, 10**9, (0,)),
        ([(5, 50)], 2000, 10**9, (5,)),
        ([(40, 400)], 2000, 10**9, (16, 32, 40)),
        ([(96, 960)], 2000, 10**9, (16, 32, 48, 64, 80, 96)),
        ([(10, 100)], 4, 10**9, (4, 8, 10)),
        ([(3, 30), (0, 0), (5, 50), (2, 20)], 4, 10**9, (4, 8, 10)),
        ([(4, 4000)], 2000, 1500, (1, 2, 3, 4)),
        ([(10, 10)], 2000, 4, (4, 8, 10)),
        ([(64_000, 64_000)], 2000, 10**9, tuple(range(2000, 64_001, 2000))),
    ],
)
def test_shards_are_capped_in_rows_and_bytes_and_small_jobs_are_cut_finer(
    sizes: list[tuple[int, int]], shard_rows: int, shard_bytes: int, stops: tuple[int, ...]
) -> None:
    config = OutputConfig(shard_rows=shard_rows, shard_bytes=shard_bytes)
    assert plan(input_set(*sizes), config, {}, {}).shard_stops == stops


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 10**6)), min_size=1, max_size=8),
    shard_rows=st.integers(1, 100),
    shard_bytes=st.integers(1, 10**6),
)
def test_every_row_is_in_one_shard_and_in_one_segment(
    sizes: list[tuple[int, int]], shard_rows: int, shard_bytes: int
) -> None:
    inputs = input_set(*sizes)
    manifest = plan(inputs, OutputConfig(shard_rows=shard_rows, shard_bytes=shard_bytes), {}, {})
    rows = []
    for shard in manifest.shards:
        assert shard.num_rows <= shard_rows
        for segment in segments(inputs, shard):
            file = inputs.files[segment.file_index]
            assert segment.start_row + segment.num_rows <= file.num_rows
            assert segment.first_row_index == file.first_row_index + segment.start_row
            rows += range(segment.first_row_index, segment.first_row_index + segment.num_rows)
    assert rows == list(range(inputs.num_rows))


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert load_manifest(store) is None
    manifest = plan(input_set((40, 400)), OutputConfig(), {"sampling": {"stop": ["\n"]}}, {"torch": "2.13.0"})
    save_manifest(store, manifest)
    assert load_manifest(store) == manifest


def test_differences_are_named_by_their_place() -> None:
    old = {"dtype": "auto", "sampling": {"seed": 0, "stop": ["a"]}, "gone": 1}
    new = {"dtype": "auto", "sampling": {"seed": 1, "stop": ["a"]}, "added": 2}
    assert differences(old, new) == [
        "added: None there, 2 now",
        "gone: 1 there, None now",
        "sampling.seed: 0 there, 1 now",
    ]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "template"),
        ("generation_config.json", "config"),
        ("README.md", None),
    ],
)
def test_r05_a_changed_model_file_changes_its_part_of_the_identity(
    tmp_path: Path, name: str, group: str | None
) -> None:
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"):
        (tmp_path / file).write_bytes(b"{}")
    before = model_identity(tmp_path) or {}
    (tmp_path / name).write_bytes(b"[]")
    after = model_identity(tmp_path) or {}
    assert {key for key in before if before[key] != after[key]} == ({group} if group else set())


def test_r05_large_weights_are_told_apart_by_size_and_samples(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(WHOLLY_HASHED_BYTES + 2**20)
    before = model_identity(tmp_path)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert model_identity(tmp_path) != before


GPUS = "0, GPU-aaa, NVIDIA H100\n1, GPU-bbb, NVIDIA H100\n2, GPU-ccc, NVIDIA A10\n"


@pytest.mark.parametrize(
    ("visible", "options", "places", "kind"),
    [
        (None, {}, ["cuda:0", "cuda:1", "cuda:2"], "NVIDIA A10, NVIDIA H100"),
        ("1", {}, ["cuda:0"], "NVIDIA H100"),
        ("GPU-ccc,0", {}, ["cuda:0", "cuda:1"], "NVIDIA A10, NVIDIA H100"),
        ("", {}, ["cpu"], "cpu"),
        ("-1", {"workers": 2}, ["cpu", "cpu"], "cpu"),
        (None, {"devices": ("cuda:1",), "workers": 2}, ["cuda:1", "cuda:1"], "NVIDIA H100"),
        (None, {"devices": ("cpu",), "workers": 3}, ["cpu"] * 3, "cpu"),
    ],
)
def test_workers_go_to_the_devices_that_are_there(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, options: dict[str, Any], places: list[str], kind: str
) -> None:
    def listed(*arguments: object, **named: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, GPUS)

    monkeypatch.setattr(devices.subprocess, "run", listed)
    monkeypatch.setattr(devices.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = worker_places(RunConfig(run=RunOptions(**options)))
    assert [place.device for place in found] == places
    assert {place.threads for place in found} == {8 // len(places)}
    for device in set(places):
        assert sum(place.device_share for place in found if place.device == device) == pytest.approx(1)
    assert device_type(found) == kind


def test_threads_are_as_asked_and_a_wrong_device_is_refused() -> None:
    config = RunConfig(engine=EngineConfig(engine="fake"), run=RunOptions(workers=2, threads=7))
    assert worker_places(config) == (Place("cpu", 7, 0.5),) * 2
    with pytest.raises(UsageError, match="--devices cuda"):
        worker_places(RunConfig(run=RunOptions(devices=("cuda",))))


@pytest.mark.parametrize(
    ("named", "size", "message"),
    [
        (("auto",), 8, "there are 4 GPUs here"),
        (("cuda:0", "cuda:1"), 2, "name the first of every 2 GPUs"),
        (("cuda:3",), 2, "name the first of every 2 GPUs"),
        (("cuda:4",), 1, "torch sees 4 GPUs here"),
    ],
)
def test_groups_of_gpus_that_are_not_there_are_refused(
    named: tuple[str, ...], size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_gpu_names", lambda: ["NVIDIA H100"] * 4)
    monkeypatch.setattr(devices, "_torch_is_cpu_only", lambda: False)
    engine = EngineConfig(engine="vllm", tensor_parallel_size=size)
    with pytest.raises(UsageError, match=message):
        worker_places(RunConfig(engine=engine, run=RunOptions(devices=named)))
    pairs = replace(engine, tensor_parallel_size=2)
    found = worker_places(RunConfig(engine=pairs, run=RunOptions(devices=("cuda:0", "cuda:2"))))
    assert [(place.device, place.device_share) for place in found] == [("cuda:0", 2), ("cuda:2", 2)]
