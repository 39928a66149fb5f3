"""Whole jobs on the fake engine: every row once, in order, whatever the shards and workers."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from batchspec.errors import MismatchError, TooManyErrorRows, UsageError
from batchspec.io.results import load_results
from batchspec.pipeline.finish import refuse_too_many_errors
from batchspec.pipeline.runner import generate
from batchspec.types import Method
from tests.pipeline.jobs import WritePrompts, answers, fake_config, with_parts
from tests.pipeline.threads import generate_in_threads


def test_r01_bad_rows_become_error_rows_and_the_others_are_answered(
    write_prompts: WritePrompts, tmp_path: Path
) -> None:
    messages = [[{"role": "user", "content": "hi"}]] + [None] * 8 + [[{"role": "wizard", "content": "hi"}]]
    prompts = ["a", "b", None, "x " * 40_000, *"efghij"]
    messages[9] = [{"role": None, "content": None}]
    chat = pa.array(messages, pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})))
    output = tmp_path / "out"
    summary = generate_in_threads(fake_config(write_prompts(prompts, messages=chat), output, shard_rows=3))
    rows = load_results(str(output)).to_pylist()
    assert [row["row_index"] for row in rows] == list(range(10))
    assert {row["row_index"]: row["error_type"] for row in rows if row["error_type"]} == {
        2: "null_prompt",
        3: "context_overflow",
        9: "bad_messages",
    }
    assert all((row["output_text"] is None) == (row["error_type"] is not None) for row in rows)
    assert len({pq.read_schema(part).remove_metadata() for part in output.glob("part-*.parquet")}) == 1
    refuse_too_many_errors(summary, 0.3)
    with pytest.raises(TooManyErrorRows, match="3 of 10 rows"):
        refuse_too_many_errors(summary, 0.29)


def test_r05_a_job_with_other_settings_is_refused_naming_old_and_new(
    write_prompts: WritePrompts, tmp_path: Path
) -> None:
    path = write_prompts(20)
    config = fake_config(path, tmp_path / "out")
    generate_in_threads(config)
    before = answers(tmp_path / "out")
    with pytest.raises(MismatchError) as caught:
        generate_in_threads(with_parts(config, sampling={"max_new_tokens": 3, "temperature": 0.5}))
    message = str(caught.value)
    assert "sampling.max_new_tokens: 512 there, 3 now" in message
    assert "sampling.temperature: 0.0 there, 0.5 now" in message
    assert "--output" in message
    assert "--overwrite" in message
    write_prompts(["other"] * 20)
    with pytest.raises(MismatchError, match=r"input\.content"):
        generate_in_threads(config)
    assert answers(tmp_path / "out") == before
    generate_in_threads(with_parts(config, output={"overwrite": True}))
    assert answers(tmp_path / "out") != before


def test_r05_versions_must_match_unless_allowed(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = fake_config(write_prompts(5), output)
    generate_in_threads(config)
    manifest_path = output / "_batchspec" / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest["versions"]["batchspec"] = "0.0.1"
    manifest_path.write_text(json.dumps(manifest))
    with pytest.raises(MismatchError, match=r"batchspec: '0\.0\.1' there.*(?s:.)*--allow-version-change"):
        generate_in_threads(config)
    generate_in_threads(with_parts(config, run={"allow_version_change": True}))


def test_operational_settings_may_change_between_attempts(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = fake_config(write_prompts(20), output, price_per_hour=1.0)
    generate_in_threads(config)
    (output / "_SUCCESS").unlink()
    (output / "part-00001.parquet").unlink()
    changed = with_parts(
        config,
        run={"workers": 2, "price_per_hour": 3.0, "max_error_rate": 0.5},
        engine={"max_batch": 3},
        routes={"method": Method.PROMPT_LOOKUP},
        output={"shard_rows": 7},
    )
    summary = generate_in_threads(changed)
    assert summary.as_json()["price_per_hour"] == [1.0, 3.0]
    rows = load_results(str(output), ["row_index", "attempt", "method"]).to_pylist()
    assert [row["attempt"] for row in rows] == [1] * 16 + [2] * 4
    assert {row["method"] for row in rows if row["attempt"] == 1} == {"target_only"}


@pytest.mark.parametrize(("workers", "shard_rows", "max_batch"), [(1, 2000, 8), (3, 7, 3)])
def test_r10_answers_are_joined_by_row_and_read_back_in_input_order(
    write_prompts: WritePrompts, tmp_path: Path, workers: int, shard_rows: int, max_batch: int
) -> None:
    # Every third row is bad and lengths differ widely, so that rows end in another order than they began.
    prompts = [None if i % 3 == 0 else f"question {i} " + "x" * (i * 37 % 900) for i in range(100)]
    config = fake_config(write_prompts(prompts), tmp_path / "out", workers=workers, shard_rows=shard_rows)
    generate(with_parts(config, engine={"max_batch": max_batch}))
    rows = load_results(str(tmp_path / "out"), ["prompt", "row_index", "source_row", "input_tokens"]).to_pylist()
    assert [row["row_index"] for row in rows] == [row["source_row"] for row in rows] == list(range(100))
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["input_tokens"] == 1 + len(row["prompt"]) // 4 for row in rows if row["prompt"])


def test_answers_do_not_depend_on_workers_shards_or_batch(write_prompts: WritePrompts, tmp_path: Path) -> None:
    path = write_prompts(60)
    sampled = {"temperature": 1.0, "seed": 5}
    one, other = tmp_path / "one", tmp_path / "other"
    generate(with_parts(fake_config(path, one), sampling=sampled, engine={"max_batch": 1}))
    generate(with_parts(fake_config(path, other, workers=2, shard_rows=7), sampling=sampled))
    assert answers(one) == answers(other)


def test_p13_no_rows_at_all_give_an_output_with_the_whole_schema(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    summary = generate_in_threads(fake_config(write_prompts(0), output))
    figures = summary.as_json()
    assert (figures["rows"], figures["output_tokens_per_second"], figures["usd_per_million_output_tokens"]) == (
        0,
        None,
        None,
    )
    refuse_too_many_errors(summary, 0.0)
    table = ds.dataset(output).to_table()
    assert table.num_rows == 0
    assert table.schema.field("output_token_ids").type == pa.list_(pa.int32())


def test_p13_an_empty_row_group_and_an_empty_file_lose_nothing(write_prompts: WritePrompts, tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"]})
    path = write_prompts(0, "d/1.parquet").parent / "2.parquet"
    with pq.ParquetWriter(path, table.schema) as writer:
        for piece in (table, table.slice(0, 0), table):
            writer.write_table(piece)
    generate_in_threads(fake_config(path.parent, tmp_path / "out"))
    assert [row["row_index"] for row in answers(tmp_path / "out")] == [0, 1, 2, 3]


def test_p17_rows_of_one_id_are_both_answered_and_ids_pass_through(write_prompts: WritePrompts, tmp_path: Path) -> None:
    path = write_prompts(["one", "two", "three"], request_id=pa.array(["same", "same", None]))
    output = tmp_path / "out"
    config = fake_config(path, output, shard_rows=1)
    generate_in_threads(config)
    whole = load_results(str(output), ["request_id", "prompt", "output_text"]).to_pylist()
    assert [row["request_id"] for row in whole] == ["same", "same", None]
    assert len({row["output_text"] for row in whole}) == 3
    (output / "_SUCCESS").unlink()
    (output / "part-00001.parquet").unlink()
    generate_in_threads(config)
    assert load_results(str(output), ["request_id", "prompt", "output_text"]).to_pylist() == whole


def test_the_seconds_of_rows_and_lines_are_those_metered(write_prompts: WritePrompts, tmp_path: Path) -> None:
    config = fake_config(write_prompts(40), tmp_path / "out", workers=2, price_per_hour=3.6)
    figures = generate(with_parts(config, engine={"fake_tokens_per_second": 300.0})).as_json()
    total = figures["row_device_seconds"] + sum(figures["line_device_seconds"].values())
    assert total + figures["unattributed_seconds"] == pytest.approx(figures["device_seconds"])
    assert abs(figures["unattributed_share"]) <= 0.01
    assert figures["device_seconds"] == pytest.approx(figures["wall_seconds"], rel=0.01)
    assert figures["cost_usd"] == pytest.approx(figures["device_seconds"] * 0.001)
    assert {"startup", "load", "idle", "output", "finalize"} <= figures["line_device_seconds"].keys()


def test_the_output_holds_nothing_else_that_a_reader_would_pick_up(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    generate_in_threads(fake_config(write_prompts(20), output))
    assert {path.name for path in output.iterdir()} == {
        "part-00000.parquet",
        "part-00001.parquet",
        "_SUCCESS",
        "_batchspec",
    }
    assert list(output.rglob("*.parquet")) == list(output.glob("part-*.parquet"))
    metadata = pq.read_schema(output / "part-00000.parquet").metadata
    names = {name.decode().removeprefix("batchspec.") for name in metadata if name.startswith(b"batchspec.")}
    assert names >= {"run_id", "shard", "identity", "manifest_sha256", "config_sha256", "engine", "attribution_rule"}
    assert json.loads((output / "_SUCCESS").read_text())["rows"] == 20


def test_results_of_an_unfinished_job_are_refused_unless_asked_for(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    generate_in_threads(fake_config(write_prompts(20), output))
    (output / "_SUCCESS").unlink()
    with pytest.raises(UsageError, match="has not finished"):
        load_results(str(output))
    assert load_results(str(output), allow_partial=True).num_rows == 20
