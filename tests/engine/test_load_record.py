"""That models passed their checks and the probe is kept where they did, and holds for nothing else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine import checks, load, load_record
from batchspec.engine.cpu import modules
from batchspec.engine.load_record import LoadRecord
from batchspec.errors import UsageError
from tests.tiny_jobs import save_tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    model = save_tiny_model(tmp_path / "model", head_dim=16)  # which the kernels serve
    return EngineConfig(model=str(model), max_batch=4, kv_memory_bytes=2**22)


def test_what_passed_is_known_from_then_on(config: EngineConfig, cache: Path) -> None:
    assert not LoadRecord(config, "cpu").passed()
    LoadRecord(config, "cpu").keep()
    assert LoadRecord(config, "cpu").passed()
    (kept,) = (cache / "checked").iterdir()
    assert json.loads(kept.read_text())["holds_for"]["threads"] == torch.get_num_threads()


def test_it_can_be_taken_back(config: EngineConfig, cache: Path) -> None:
    record = LoadRecord(config, "cpu")
    record.take_back()
    record.keep()
    record.take_back()
    assert not LoadRecord(config, "cpu").passed()
    assert not list((cache / "checked").iterdir())


Change = Callable[[EngineConfig, pytest.MonkeyPatch], EngineConfig]


def other_threads(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    return config


def other_setting(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    return config


def other_library(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(load_record.transformers, "__version__", "99")
    return config


def other_kernels(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(load_record, "_kernels", lambda: "kernels-other.so")
    return config


def other_code(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(load_record, "_engine_code", lambda: "other")
    return config


def other_weights(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    weights = Path(config.model) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    return config


def other_dtype(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    return replace(config, dtype="bfloat16")


def a_draft(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    return replace(config, draft_model=config.model)


@pytest.mark.parametrize(
    "changed",
    [other_threads, other_setting, other_library, other_kernels, other_code, other_weights, other_dtype, a_draft],
)
def test_it_holds_for_what_passed_alone(config: EngineConfig, monkeypatch: pytest.MonkeyPatch, changed: Change) -> None:
    LoadRecord(config, "cpu").keep()
    assert not LoadRecord(changed(config, monkeypatch), "cpu").passed()


def test_a_draft_that_takes_part_in_the_text_has_to_pass_more(config: EngineConfig) -> None:
    coupled = replace(config, draft_model=config.model)
    LoadRecord(coupled, "cpu").keep()
    assert LoadRecord(coupled, "cpu").passed()
    assert not LoadRecord(replace(coupled, acceptance_rule="rejection"), "cpu").passed()


@pytest.mark.parametrize(("device", "draft_device"), [("cuda:0", None), ("cpu", "cuda:0")])
def test_nothing_is_kept_of_a_gpu(config: EngineConfig, cache: Path, device: str, draft_device: str | None) -> None:
    record = LoadRecord(replace(config, draft_model=config.model, draft_device=draft_device), device)
    record.keep()
    assert not record.passed()
    assert not cache.exists()


def test_no_setting_is_written_down(config: EngineConfig, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SECRET", "a-secret")
    LoadRecord(config, "cpu").keep()
    (kept,) = (cache / "checked").iterdir()
    assert "a-secret" not in kept.read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", "no json"])
def test_a_damaged_record_is_none(config: EngineConfig, cache: Path, content: str) -> None:
    LoadRecord(config, "cpu").keep()
    (kept,) = (cache / "checked").iterdir()
    kept.write_text(content)
    assert not LoadRecord(config, "cpu").passed()


def test_where_nothing_can_be_kept_nothing_is_known(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "file"))
    record = LoadRecord(config, "cpu")
    record.keep()
    assert not record.passed()
    record.take_back()


def test_a_model_that_is_not_there_is_for_the_loading_to_refuse(config: EngineConfig, tmp_path: Path) -> None:
    assert not LoadRecord(replace(config, model=str(tmp_path / "none")), "cpu").passed()


# the record in use


class Loads:
    """Loads a configuration over and over, and counts what is done; `probe_findings` are the probe's in turn."""

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._config = config
        self.num_checks = self.num_probes = 0
        self.probe_findings: list[str | None] = []
        check = checks.prepare_and_check

        def counted(module: Any) -> Any:
            self.num_checks += 1
            return check(module)

        def probe(models: Any, sampler: Any) -> str | None:
            self.num_probes += 1
            return self.probe_findings.pop(0) if self.probe_findings else None

        monkeypatch.setattr(checks, "prepare_and_check", counted)
        monkeypatch.setattr(load, "probe_engine", probe)

    def __call__(self, **changes: Any) -> load.TorchEngine:
        return load.load_torch_engine(replace(self._config, **changes), "cpu", 2, 1.0, StepAttributionRule())


@pytest.fixture
def loads(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(config, monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_engine_is_made_without_checks_as_the_first_was_with_them(loads: Loads, dtype: str) -> None:
    engines = [loads(dtype=dtype) for _ in range(2)]
    assert (loads.num_checks, loads.num_probes) == (1, 1)
    assert [engine.info.batch_invariant for engine in engines] == [True, True]
    first, second = (engine.parts.model for engine in engines)
    assert first.layers == second.layers
    names = [[(name, type(module)) for name, module in model.module.named_modules()] for model in (first, second)]
    assert names[0] == names[1]
    assert any(kind is modules.FusedLayers for _, kind in names[1])
    weights = [dict(model.module.named_parameters()) for model in (first, second)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_that_results_depend_on_the_batch_is_found_every_time(loads: Loads) -> None:
    loads.probe_findings = ["a step of 7 rows"] * 2
    assert [loads().info.batch_invariant for _ in range(2)] == [False, False]
    assert loads.num_checks == 2


def test_layers_that_are_refused_are_refused_every_time(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_adds_the_same", lambda *_: False)
    refused = [loads(dtype="bfloat16").parts.model.refused_layers for _ in range(2)]
    assert refused[0] == refused[1] != ()
    assert loads.num_checks == 2


def test_require_exact_checks_again_and_takes_back_what_no_longer_holds(loads: Loads) -> None:
    loads()
    loads.probe_findings = ["a step of 7 rows"]
    with pytest.raises(UsageError, match="depend on its batch"):
        loads(require_exact=True)
    assert (loads.num_checks, loads.num_probes) == (2, 2)
    loads()
    assert (loads.num_checks, loads.num_probes) == (3, 3)
