"""P12 in a whole job: what the chat template refuses is a row, what it cannot do at all is one error."""

import copy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.cli import main
from batchspec.pipeline.executors import local
from batchspec.report.frame import load_results
from tests.engine.tiny import byte_tokenizer
from tests.pipeline.threads import ThreadExecutor
from tests.tiny_jobs import save_tiny_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == m.role %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
CONVERSATIONS = [
    [("user", "hello")],
    [("system", "be brief"), ("user", "hello")],
    [("user", "one"), ("user", "two")],
    [("user", "and now"), ("assistant", "you")],
    [("user", "what?")],
]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(local, "LocalExecutor", ThreadExecutor)
    save_tiny_model(tmp_path / "model")
    messages = [[{"role": role, "content": text} for role, text in turns] for turns in CONVERSATIONS]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "in.parquet")
    monkeypatch.chdir(tmp_path)
    arguments = ["in.parquet", "-o", "out", "--model", "model", "--max-new-tokens", "4", "--kv-memory", "4M"]
    return ["generate", *arguments, "--max-batch", "2", "--max-error-rate", "0.5", "--profile", "none"]


def test_p12_rows_that_the_template_refuses_are_error_rows_among_good_ones(command: list[str]) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("model")
    assert main(command) == 0
    rows = load_results("out")
    assert rows["error_type"].fillna("").tolist() == ["", "template_error", "template_error", "", ""]
    assert "no system role" in rows["error_message"][1]
    assert "roles must alternate" in rows["error_message"][2]
    assert rows["output_tokens"].dropna().tolist() == [4, 4, 4]


def test_p12_a_model_without_a_template_is_one_error_for_the_job(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert capsys.readouterr().err.count("has no chat template") == 1
    assert not Path("out", "_SUCCESS").exists()
