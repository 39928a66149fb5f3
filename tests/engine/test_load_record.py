"""What checks and probe found of a model is kept, and holds for nothing else."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig
from batchspec.engine import checks, load, load_record
from batchspec.engine import model as model_module
from batchspec.engine.cpu import modules
from batchspec.engine.load_record import Findings, LoadRecord
from batchspec.engine.model import PackedModel, wrap_model
from batchspec.engine.packed import Segment
from batchspec.errors import MissingDependencyError, UsageError
from tests.engine.tiny import ARCHITECTURES, build_module
from tests.tiny_jobs import save_tiny_model

FOUND = Findings(("model.layers.1",), batch_invariant=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", head_dim=16)  # which the kernels serve


@pytest.mark.parametrize("found", [FOUND, Findings((), batch_invariant=False)])
def test_what_was_found_is_known_from_then_on(model: Path, cache: Path, found: Findings) -> None:
    assert LoadRecord(model, "auto", "cpu").known is None
    LoadRecord(model, "auto", "cpu").keep(found)
    assert LoadRecord(model, "auto", "cpu").known == found
    assert LoadRecord(model, "float32", "cpu").known == found  # as it is stored
    (kept,) = (cache / "checked").iterdir()
    assert json.loads(kept.read_text())["holds_for"]["threads"] == torch.get_num_threads()


def test_what_is_found_again_takes_the_place_of_what_was_known(model: Path) -> None:
    LoadRecord(model, "auto", "cpu").keep(FOUND)
    record = LoadRecord(model, "auto", "cpu", again=True)
    assert record.known is None
    record.keep(Findings((), batch_invariant=False))
    assert LoadRecord(model, "auto", "cpu").known == Findings((), batch_invariant=False)


Change = Callable[[Path, pytest.MonkeyPatch], object]


def other_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)


def other_setting(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")


def other_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_record.transformers, "__version__", "99")


def other_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_record, "_kernels", lambda: "kernels-other.so")


def other_code(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_record, "_engine_code", lambda: "other")


def other_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")


def other_index(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "model.safetensors.index.json").write_text("{}")


def other_config(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


def quantized_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))


def an_adapter(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    "change",
    [
        other_threads,
        other_setting,
        other_library,
        other_kernels,
        other_code,
        other_weights,
        other_index,
        other_config,
        quantized_weights,
        an_adapter,
    ],
)
def test_it_holds_for_what_was_looked_at_alone(model: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    LoadRecord(model, "auto", "cpu").keep(FOUND)
    change(model, monkeypatch)
    assert LoadRecord(model, "auto", "cpu").known is None


def test_it_holds_for_one_dtype(model: Path) -> None:
    LoadRecord(model, "auto", "cpu").keep(FOUND)
    assert LoadRecord(model, "bfloat16", "cpu").known is None


def test_nothing_is_kept_of_a_gpu(model: Path, cache: Path) -> None:
    LoadRecord(model, "auto", "cuda:0").keep(FOUND)
    assert LoadRecord(model, "auto", "cuda:0").known is None
    assert not cache.exists()


def test_no_setting_is_written_down(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SECRET", "a-secret")
    LoadRecord(model, "auto", "cpu").keep(FOUND)
    (kept,) = (cache / "checked").iterdir()
    assert "a-secret" not in kept.read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", "no json", '{"refused_layers": 1}'])
def test_a_damaged_record_is_none(model: Path, cache: Path, content: str) -> None:
    LoadRecord(model, "auto", "cpu").keep(FOUND)
    (kept,) = (cache / "checked").iterdir()
    kept.write_text(content)
    assert LoadRecord(model, "auto", "cpu").known is None


def test_where_nothing_can_be_kept_nothing_is_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "file"))
    LoadRecord(model, "auto", "cpu").keep(FOUND)
    assert LoadRecord(model, "auto", "cpu").known is None


def test_a_model_that_is_not_there_is_for_the_loading_to_refuse(tmp_path: Path) -> None:
    assert LoadRecord(tmp_path / "none", "auto", "cpu").known is None


# the record in use


class Loads:
    """Loads engines of a model, and counts what is done; `probe_findings` are the probe's in turn."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model = str(model)
        self.num_checks = 0
        self.probed: list[PackedModel] = []
        self.probe_findings: list[str | None] = []
        check = checks.prepare_and_check

        def counted(module: Any) -> Any:
            self.num_checks += 1
            return check(module)

        def probe(model: PackedModel, sampler: Any) -> str | None:
            self.probed.append(model)
            return self.probe_findings.pop(0) if self.probe_findings else None

        monkeypatch.setattr(checks, "prepare_and_check", counted)
        monkeypatch.setattr(load, "probe_engine", probe)

    def __call__(self, **settings: Any) -> load.TorchEngine:
        config = EngineConfig(model=self._model, max_batch=4, kv_memory_bytes=2**24, **settings)
        return load.load_torch_engine(config, "cpu", 2, 1.0, StepAttributionRule())


@pytest.fixture
def loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(model, monkeypatch)


def test_a_second_engine_is_neither_checked_nor_probed(loads: Loads) -> None:
    assert [loads().info.batch_invariant for _ in range(2)] == [True, True]
    assert (loads.num_checks, len(loads.probed)) == (1, 1)


def test_that_results_depend_on_the_batch_is_found_every_time(loads: Loads) -> None:
    loads.probe_findings = ["a step of 7 rows"] * 2
    assert [loads().info.batch_invariant for _ in range(2)] == [False, False]
    assert (loads.num_checks, len(loads.probed)) == (1, 2)


def test_layers_that_are_refused_stay_refused(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, True])
    monkeypatch.setattr(modules, "_adds_the_same", lambda *_: next(answers))
    models = [loads(dtype="bfloat16").parts.model for _ in range(2)]
    assert loads.num_checks == 1
    assert [model.refused_layers for model in models] == [("model.layers.1",)] * 2
    kinds = [[type(layer) for layer in model.module.model.layers] for model in models]
    assert kinds[0] == kinds[1]
    assert kinds[0][1] is not modules.FusedLayers


def test_a_draft_has_a_record_of_its_own(loads: Loads, model: Path, tmp_path: Path) -> None:
    loads()
    draft = str(save_tiny_model(tmp_path / "draft", num_hidden_layers=2))
    loads(draft_model=draft)
    loads(draft_model=draft)
    assert (loads.num_checks, len(loads.probed)) == (2, 1)


def test_a_draft_that_takes_part_in_the_text_is_probed(loads: Loads, tmp_path: Path) -> None:
    draft = str(save_tiny_model(tmp_path / "draft", num_hidden_layers=2))
    loads(draft_model=draft)
    loads.probe_findings = ["a step of 7 rows"]
    notes = loads(draft_model=draft, acceptance_rule="rejection").info.notes
    assert [model.name for model in loads.probed[1:]] == [draft]
    assert "batch_invariant is false: the draft model: a step of 7 rows changed the bits of a row" in notes


def test_require_exact_checks_again_and_corrects_what_no_longer_holds(loads: Loads) -> None:
    loads()
    loads.probe_findings = ["a step of 7 rows"]
    with pytest.raises(UsageError, match="depend on its batch"):
        loads(require_exact=True)
    assert (loads.num_checks, len(loads.probed)) == (2, 2)
    loads()
    assert (loads.num_checks, len(loads.probed)) == (2, 3)


def test_require_exact_checks_again_where_the_record_cannot_be_corrected(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads()

    def read_only(*_: Any) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(load_record, "write_whole", read_only)
    loads.probe_findings = ["a step of 7 rows"]
    with pytest.raises(UsageError, match="depend on its batch"):
        loads(require_exact=True)
    assert (loads.num_checks, len(loads.probed)) == (2, 2)


def logits(model: PackedModel) -> torch.Tensor:
    kv = model.new_cache(8, 2)
    segments = []
    for length in (40, 7):
        slot = kv.acquire_slot()
        kv.reserve(slot, length)
        segments.append(Segment(slot, list(range(1, 1 + length)), 0, True, range(length)))
    return model.forward(segments, kv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_made_without_checks_answers_bit_for_bit_as_what_was_checked(name: str, dtype: torch.dtype) -> None:
    module = build_module(name, dtype=dtype, head_dim=16)
    checked = wrap_model(name, copy.deepcopy(module))
    unchecked = wrap_model(name, module, checked.refused_layers)
    assert checked.layers == unchecked.layers
    kinds = [[(name, type(part)) for name, part in each.module.named_modules()] for each in (checked, unchecked)]
    assert kinds[0] == kinds[1]
    assert torch.equal(logits(checked), logits(unchecked))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("FP8 requires accelerate", r"FP8 requires accelerate; pip install 'batchspec\[quantized\]' brings"),
        ("AWQ requires gptqmodel: pip install gptqmodel", "pip install gptqmodel$"),
    ],
)
def test_weights_that_another_package_has_to_read_say_so(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, said: str, expected: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError(said)

    monkeypatch.setattr(model_module.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(MissingDependencyError, match=expected):
        loads()
