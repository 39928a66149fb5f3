"""A batch never dies of memory: it shrinks, says so, and writes the same text."""

import json
from pathlib import Path

import pytest
import torch

from batchspec.accounting.usage import Usage, combine
from batchspec.report.frame import load_results
from batchspec.types import Method, SamplingParams
from tests.tiny_jobs import run_tiny_job, save_tiny_model, write_input


def summary_of(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "_SUCCESS").read_text())
    return found


def test_d18_a_draft_model_leaves_room_for_fewer_rows_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    draft = save_tiny_model(tmp_path / "draft", num_hidden_layers=2)
    data = write_input(tmp_path / "in.parquet")
    sampling = SamplingParams(max_new_tokens=100)
    bytes_per_token = 2 * 2 * 8 * torch.float32.itemsize  # K and V, heads, dimensions: of one tiny layer
    blocks = 12 * 32 * bytes_per_token * 3  # twelve blocks of 32 tokens of the three-layer target

    def job(name: str, kv_memory_bytes: int, draft_model: str | None) -> tuple[list[str], dict[str, object]]:
        engine = {"kv_memory_bytes": kv_memory_bytes, "draft_model": draft_model, "max_batch": 6}
        method = Method.DRAFT_MODEL if draft_model else Method.TARGET_ONLY
        output = run_tiny_job(
            monkeypatch, model, data, tmp_path / name, method=method, sampling=sampling, engine=engine
        )
        return load_results(str(output))["output_text"].tolist(), summary_of(output)

    roomy, of_roomy = job("roomy", 2**26, str(draft))
    assert "the KV cache holds" not in capsys.readouterr().err
    plain, of_plain = job("plain", blocks, None)
    assert "in the draft's" not in capsys.readouterr().err
    tight, of_tight = job("tight", blocks, str(draft))
    assert roomy == plain == tight
    assert of_roomy["peak_live_sequences"] == 6
    assert of_roomy["num_preemptions"] == 0
    assert (of_tight["peak_live_sequences"], of_tight["num_preemptions"]) != (6, 0)
    assert float(str(of_tight["mean_live_sequences"])) < float(str(of_plain["mean_live_sequences"]))
    assert "in the draft's" in capsys.readouterr().err


def test_the_fullest_worker_counts_and_preemptions_add_up() -> None:
    parts = [Usage(3, 2, 100, ("a",)), Usage(None, 1, None, ("b",)), Usage(5, 0, 70)]
    assert combine(parts) == Usage(5, 3, 100, ("a", "b"))
    assert combine([]) == Usage()
