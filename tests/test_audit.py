"""The audit tells near-ties from faults, on jobs that ran in this process with a tiny model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec.audit import choose_rows
from batchspec.cli import main
from batchspec.engine import attention
from batchspec.errors import AuditFault, MismatchError, UsageError
from batchspec.io.results import load_results
from batchspec.pipeline.verify import AUDIT_NAME, verify_output
from batchspec.types import Method, SamplingParams
from tests.engine.tiny import byte_tokenizer
from tests.pipeline.jobs import run_cli
from tests.tiny_jobs import PROMPTS, run_tiny_job, save_tiny_model, write_input

SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def bf16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("bf16"), torch.bfloat16)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_tiny_job(monkeypatch, model, write_input(folder / "in.parquet"), folder / "out")


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished greedy job, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def run(model: Path, **settings: Any) -> Path:
        return run_tiny_job(monkeypatch, model, write_input(tmp_path / "in.parquet"), tmp_path / "out", **settings)

    return run


def rewrite(output: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change what a finished output says."""
    for part in output.glob("part-*.parquet"):
        table = pq.read_table(part)
        pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), part)


def with_column(name: str, change: Callable[[int, Any], Any]) -> Callable[[pa.Table], pa.Table]:
    def rewritten(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        values = [change(row, value) for row, value in enumerate(table.column(name).to_pylist())]
        return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))

    return rewritten


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        (Method.TARGET_ONLY, SamplingParams(max_new_tokens=40)),
        (Method.PROMPT_LOOKUP, SAMPLED),
        (Method.PROMPT_LOOKUP, SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, max_new_tokens=40)),
        (Method.PROMPT_LOOKUP, SamplingParams(min_new_tokens=20, repetition_penalty=1.3, max_new_tokens=40)),
        (Method.PROMPT_LOOKUP, SamplingParams(stop=("e", "zz"), presence_penalty=0.5, max_new_tokens=40)),
    ],
    ids=["greedy", "sampled", "filtered", "penalty", "stop"],
)
def test_a_healthy_fp32_job_is_equal_token_by_token(
    model: Path, job: Callable[..., Path], method: Method, sampling: SamplingParams
) -> None:
    audit = verify_output(str(job(model, method=method, sampling=sampling)), sample_rows=6)
    assert audit.faults == []
    assert (audit.total.rows, audit.total.near_ties) == (len(PROMPTS), 0)
    assert audit.total.tokens == audit.total.equal_tokens > 0
    assert 0 < audit.noise_logits < 1e-3


@pytest.mark.parametrize("sampling", [SamplingParams(max_new_tokens=40), SAMPLED], ids=["greedy", "sampled"])
def test_d19_in_bf16_differences_are_near_ties_and_never_faults(
    bf16_model: Path, job: Callable[..., Path], sampling: SamplingParams
) -> None:
    audit = verify_output(str(job(bf16_model, sampling=sampling)), sample_rows=6)
    assert audit.faults == []
    assert audit.dtype == "bfloat16"
    assert audit.noise_logits > 1e-3
    assert audit.total.equal_tokens > 0.8 * audit.total.tokens


def test_d19_a_tie_of_two_output_rows_is_a_near_tie_and_not_a_fault(tmp_path: Path, job: Callable[..., Path]) -> None:
    """Twin rows of the output layer tie exactly: the lower id is written, and its twin would have been as good."""
    from transformers import AutoModelForCausalLM

    model = save_tiny_model(tmp_path / "model", torch.bfloat16, tie_word_embeddings=False)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        module.lm_head.weight[128:256] = module.lm_head.weight[:128]
    module.save_pretrained(model)
    output = job(model)
    before = load_results(str(output))["output_token_ids"].to_pylist()
    assert max(token for ids in before for token in ids if token < 256) < 128

    twins = [[*ids[:-1], ids[-1] + 128] if ids[-1] < 128 else ids for ids in before]
    rewrite(output, with_column("output_token_ids", lambda row, _: twins[row]))
    texts = [byte_tokenizer().decode(ids, skip_special_tokens=True) for ids in twins]
    rewrite(output, with_column("output_text", lambda row, _: texts[row]))
    audit = verify_output(str(output), sample_rows=6)
    num_changed = sum(a != b for a, b in zip(before, twins, strict=True))
    assert audit.faults == []
    assert audit.total.near_ties >= num_changed > 0


def test_a_corrupted_kernel_is_found(model: Path, job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention loses the context's first block once a row is longer than the checks at the start look."""
    healthy = attention.batchspec_attention

    def corrupted(module: Any, query: Any, key: Any, value: Any, mask: Any, **keywords: Any) -> Any:
        mixed, weights = healthy(module, query, key, value, mask, **keywords)
        late = (keywords["batchspec_step"].positions >= 64)[0][:, None, None]
        return torch.where(late, mixed.roll(1, dims=2), mixed), weights

    monkeypatch.setattr(attention, "batchspec_attention", corrupted)
    output = job(model)
    with pytest.raises(
        AuditFault, match=r"faults in (?s:.*)row_index \d+, output token \d+: \d+ was written"
    ) as raised:
        verify_output(str(output), sample_rows=6).refuse_faults()
    assert raised.value.exit_code == 5
    audit = json.loads((output / AUDIT_NAME).read_text())
    assert audit["faults"] > 0
    assert {fault["row_index"] for fault in audit["first_faults"]} <= {0, 3, 5}  # the rows longer than 64 tokens


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("output_token_ids", lambda row, ids: [*ids[:-1], (ids[-1] + 1) % 250], "its text is not the decode"),
        ("output_token_ids", lambda row, ids: ids[:-1], "output_tokens is not the number|should have ended"),
        ("output_text", lambda row, text: text + "!", "its text is not the decode"),
        ("finish_reason", lambda row, reason: "stop" if reason == "length" else "length", "its finish_reason is"),
        ("prompt", lambda row, prompt: prompt + "?", "its prompt has"),
        ("prompt", lambda row, prompt: prompt[:-1] + "#", "was written"),
        ("num_target_steps", lambda row, steps: steps + 1, "counter identity broken"),
    ],
)
def test_whatever_is_changed_in_an_output_is_found(
    output: Path, column: str, change: Callable[[int, Any], Any], message: str
) -> None:
    rewrite(output, with_column(column, change))
    with pytest.raises(AuditFault, match=message):
        verify_output(str(output), sample_rows=6).refuse_faults()


def test_under_the_rejection_rule_the_table_says_what_is_checked(model: Path, job: Callable[..., Path]) -> None:
    output = job(model, sampling=SAMPLED, engine={"acceptance_rule": "rejection"})
    audit = verify_output(str(output), sample_rows=6)
    assert audit.faults == []
    assert {check for _, method, check in audit.groups if method != "target_only"} == {"support"}
    assert "Rejection rule: " in audit.as_text()


def test_the_command_prints_a_table_of_at_most_100_columns(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(output), "--sample-rows", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("0 faults: the model itself would have written 160 tokens of 4 rows, 0 near-ties.")
    assert max(map(len, printed.splitlines())) <= 100
    assert main(["verify", str(output), "--json"]) == 0
    audit = json.loads(capsys.readouterr().out)
    assert audit == json.loads((output / AUDIT_NAME).read_text())
    assert sum(group["tokens"] for group in audit["groups"]) == audit["tokens"] == 240


def test_another_model_is_refused(model: Path, bf16_model: Path, output: Path) -> None:
    with pytest.raises(MismatchError, match=r"model\.weights"):
        verify_output(str(output), sample_rows=4, model=str(bf16_model))
    assert verify_output(str(output), sample_rows=4, model=str(model)).faults == []


def test_what_cannot_be_audited_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no manifest"):
        verify_output(str(tmp_path), sample_rows=4)
    done = run_cli("generate", write_input(tmp_path / "in.parquet"), "--engine", "fake", "-o", tmp_path / "fake")
    assert done.returncode == 0
    with pytest.raises(UsageError, match="fake engine"):
        verify_output(str(tmp_path / "fake"), sample_rows=4)


def test_rows_are_chosen_from_every_stratum_in_turn() -> None:
    strata = {("b", "x"): [10, 11, 12], ("a", "x"): [1], ("a", "y"): []}
    assert choose_rows(strata, 3) == [1, 10, 11]
    assert choose_rows(strata, 9) == [1, 10, 11, 12]
