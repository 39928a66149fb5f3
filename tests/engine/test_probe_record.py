"""The probe's verdict is kept where it is that results do not depend on the batch, and holds for nothing else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine import load, probe_record
from batchspec.engine.model import PackedModel, load_model
from batchspec.engine.probe_record import probe_once
from batchspec.errors import UsageError
from tests.tiny_jobs import save_tiny_model


class CountedProbe:
    def __init__(self, finding: str | None = None) -> None:
        self.finding, self.calls = finding, 0

    def __call__(self) -> str | None:
        self.calls += 1
        return self.finding


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    return load_model(save_tiny_model(tmp_path / "model"), "auto", torch.device("cpu"))


def test_a_verdict_is_asked_for_once(model: PackedModel, cache: Path) -> None:
    probe = CountedProbe()
    assert [probe_once([model], probe, again=False) for _ in range(3)] == [None] * 3
    assert probe.calls == 1
    (kept,) = (cache / "probes").iterdir()
    assert json.loads(kept.read_text())["holds_for"]["threads"] == torch.get_num_threads()


def test_require_exact_probes_again_and_takes_the_old_verdict_back(model: PackedModel, cache: Path) -> None:
    probe_once([model], CountedProbe(), again=False)
    assert probe_once([model], CountedProbe("a step of 7 rows"), again=True) == "a step of 7 rows"
    assert not list((cache / "probes").iterdir())


def test_that_results_depend_on_the_batch_is_not_kept(model: PackedModel) -> None:
    probe = CountedProbe("a step of 7 rows")
    assert [probe_once([model], probe, again=False) for _ in range(2)] == ["a step of 7 rows"] * 2
    assert probe.calls == 2


def other_threads(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    return [model]


def other_setting(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    return [model]


def other_library(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    monkeypatch.setattr(probe_record.transformers, "__version__", "99")
    return [model]


def other_kernels(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    monkeypatch.setattr(probe_record, "_kernels", lambda: "kernels-other.so")
    return [model]


def other_code(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    monkeypatch.setattr(probe_record, "_engine_code", lambda: "other")
    return [model]


def other_weights(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    weights = Path(model.name) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    return [model]


def other_dtype(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    return [replace(model, dtype=torch.bfloat16)]


def a_draft_with_a_part_in_the_text(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> list[PackedModel]:
    return [model, model]


@pytest.mark.parametrize(
    "changed",
    [
        other_threads,
        other_setting,
        other_library,
        other_kernels,
        other_code,
        other_weights,
        other_dtype,
        a_draft_with_a_part_in_the_text,
    ],
)
def test_a_verdict_holds_for_what_was_probed_alone(
    model: PackedModel,
    monkeypatch: pytest.MonkeyPatch,
    changed: Callable[[PackedModel, pytest.MonkeyPatch], list[PackedModel]],
) -> None:
    probe = CountedProbe()
    probe_once([model], probe, again=False)
    models = changed(model, monkeypatch)
    probe_once(models, probe, again=False)
    assert probe.calls == 2


def test_on_a_gpu_the_probe_runs_every_time(model: PackedModel, cache: Path) -> None:
    probe = CountedProbe()
    on_gpu = replace(model, device=torch.device("cuda:0"))
    assert [probe_once([on_gpu], probe, again=False) for _ in range(2)] == [None] * 2
    assert probe.calls == 2
    assert not cache.exists()


def test_no_setting_is_written_down(model: PackedModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SECRET", "a-secret")
    probe_once([model], CountedProbe(), again=False)
    (kept,) = (cache / "probes").iterdir()
    assert "a-secret" not in kept.read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", "no json"])
def test_a_damaged_verdict_is_none(model: PackedModel, cache: Path, content: str) -> None:
    probe = CountedProbe()
    probe_once([model], probe, again=False)
    (kept,) = (cache / "probes").iterdir()
    kept.write_text(content)
    probe_once([model], probe, again=False)
    assert probe.calls == 2


@pytest.mark.parametrize("finding", [None, "a step of 7 rows"])
def test_where_nothing_can_be_kept_the_probe_runs(
    model: PackedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finding: str | None
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "file"))
    probe = CountedProbe(finding)
    assert [probe_once([model], probe, again=False) for _ in range(2)] == [finding] * 2
    assert probe.calls == 2


def test_a_second_engine_of_the_same_model_is_not_probed_unless_it_must_be_exact(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings: list[str | None] = [None, "a step of 7 rows"]
    monkeypatch.setattr(load, "probe_engine", lambda models, sampler: findings.pop(0))

    def batch_invariant(require_exact: bool) -> bool | None:
        config = EngineConfig(model=model.name, max_batch=4, kv_memory_bytes=2**22, require_exact=require_exact)
        return load.load_torch_engine(config, "cpu", 2, 1.0, StepAttributionRule()).info.batch_invariant

    assert batch_invariant(False) is True
    assert batch_invariant(False) is True
    with pytest.raises(UsageError, match="depend on its batch"):
        batch_invariant(True)
    assert not findings
