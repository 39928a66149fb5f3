"""Profiles in a job: measured for it with `--profile auto`, taken from the cache, or made by `batchspec profile`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.cli import main
from batchspec.config import InputConfig, ProfileOptions, RouteConfig, RunConfig
from batchspec.pipeline import auto, measuring
from batchspec.pipeline.executors import local
from batchspec.pipeline.measuring import make_profile, readable_rows
from batchspec.report.frame import load_results
from tests.pipeline.threads import ThreadExecutor
from tests.tiny_jobs import PROMPTS, save_tiny_model


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a job of 48 rows with a tiny model; the cache is empty."""
    monkeypatch.setattr(local, "LocalExecutor", ThreadExecutor)
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    save_tiny_model(tmp_path / "model")
    rows = [(c, f"{p} {i}") for i in range(8) for c, p in PROMPTS]
    nulls = pa.nulls(len(rows), pa.string())
    table = pa.table({"prompt": [p for _, p in rows], "request_class": [c for c, _ in rows], "nulls": nulls})
    pq.write_table(table, tmp_path / "in.parquet")
    monkeypatch.chdir(tmp_path)
    return ["in.parquet", "--model", "model", "--max-batch", "4", "--kv-memory", "8M", "--max-new-tokens", "16"]


def summary(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(output, "_SUCCESS").read_text())
    return found


def measure_here(config: RunConfig, path: Path, options: ProfileOptions) -> int:
    """Measure whatever the job's length, in the test's process."""
    make_profile(replace(config, routes=RouteConfig()), path, replace(options, job_rows=None), lambda line: None)
    return 0


def test_auto_measures_once_on_a_line_of_its_own(job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_REPAYS", 4)
    monkeypatch.setattr(auto, "_in_own_process", measure_here)
    assert main(["generate", *job, "-o", "plain", "--profile", "none"]) == 0
    assert main(["generate", *job, "-o", "out", "--profile", "auto"]) == 0
    copy = Path("out", "_batchspec", "profile.json").read_bytes()
    metadata = pq.read_schema("out/part-00000.parquet").metadata
    assert hashlib.sha256(copy).hexdigest() in [value.decode() for value in metadata.values()]
    lines = summary("out")["line_device_seconds"]
    assert lines["profile"] > 0.1
    assert "profile" not in summary("plain")["line_device_seconds"]
    assert load_results("out")["output_text"].tolist() == load_results("plain")["output_text"].tolist()
    assert abs(summary("out")["unattributed_share"]) < 0.01
    # the next attempt at the job follows what this one measured
    Path("out", "_SUCCESS").unlink()
    Path("out", "part-00000.parquet").unlink()
    monkeypatch.setattr(auto, "_in_own_process", lambda *_: pytest.fail("measured twice"))
    assert main(["generate", *job, "-o", "out", "--profile", "auto"]) == 0


def test_a_short_job_is_not_measured(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *job, "-o", "out", "--profile", "auto"]) == 0
    assert "48 rows are too few to repay measuring a profile" in capsys.readouterr().err
    assert not Path("out", "_batchspec", "profile.json").exists()


def test_a_job_that_takes_no_time_is_not_measured_for(
    job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measuring process itself finds that 48 rows of a tiny model are over before their steps are timed."""
    monkeypatch.setattr(auto, "_REPAYS", 4)
    assert main(["generate", *job, "-o", "out", "--profile", "auto"]) == 0
    assert "too short to repay measuring" in capsys.readouterr().err
    assert set(load_results("out")["method"]) == {"target_only"}


def test_a_job_goes_on_target_only_where_measuring_fails(
    job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "_REPAYS", 4)
    monkeypatch.setattr(auto, "_in_own_process", lambda *_: 1)
    assert main(["generate", *job, "-o", "out", "--profile", "auto"]) == 0
    assert "measuring a profile failed" in capsys.readouterr().err
    assert set(load_results("out")["method"]) == {"target_only"}


def test_a_profile_from_the_cache_is_followed_unless_a_method_is_asked_for(
    job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *job, "-o", "p.json", "--budget", "60", "--sample-rows", "8"]) == 0
    assert "live rows" in capsys.readouterr().out
    assert main(["generate", *job, "-o", "cached"]) == 0
    assert "routes: by the profile measured" in capsys.readouterr().err
    assert main(["generate", *job, "-o", "asked", "--method", "target-only"]) == 0
    assert main(["generate", *job, "-o", "none", "--profile", "none"]) == 0
    assert main(["generate", *job, "-o", "other", "--temperature", "1"]) == 0
    said = capsys.readouterr().err
    assert "routes: by the profile" not in said
    assert "no profile of this model here: target-only" in said
    assert Path("cached", "_batchspec", "profile.json").is_file()
    assert (load_results("cached")["est_target_only_device_seconds"] > 0).all()
    assert load_results("none")["est_target_only_device_seconds"].isna().all()
    for output in ("asked", "none", "other"):
        assert not Path(output, "_batchspec", "profile.json").exists()
        assert set(load_results(output)["method"]) == {"target_only"}
    assert load_results("cached")["output_text"].tolist() == load_results("none")["output_text"].tolist()
    assert main(["plan", *job]) == 0


def test_a_fresh_profile_is_kept_with_if_stale(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["profile", *job, "-o", "new/p.json", "--sample-rows", "4", "--if-stale", "--methods", "prompt-lookup"]
    assert main(command) == 0
    Path("p.json").symlink_to("new/p.json")
    before = Path("p.json").read_bytes()
    capsys.readouterr()
    assert main([*command, "--trace", "t.json", "--trace-cell", "target-only:0:2"]) == 0
    assert "still fits: nothing measured" in capsys.readouterr().err
    assert Path("p.json").read_bytes() == before
    assert main([*command, "--max-batch", "8"]) == 0
    assert "still fits" not in capsys.readouterr().err
    Path("p.json").write_text("{}")
    assert main(command) == 0
    assert Path("p.json").read_text() != "{}"


def test_a_trace_and_an_image_are_written(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["profile", *job, "-o", "p.json", "--sample-rows", "6", "--trace", "t.json"]
    assert main([*command, "--trace-cell", "prompt-lookup:4:2:copy"]) == 0
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert any(event.get("name") == "batchspec: forward" for event in events)
    assert main(["profile", "show", "p.json", "--image", "curves.png"]) == 0
    assert Path("curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "guess"], "--methods guess: not among"),
        (["--methods", "draft-model"], "needs --draft-model"),
        (["--trace", "t", "--trace-cell", "prompt-lookup:4"], "give METHOD:K:LIVE_ROWS"),
        (["--trace", "t", "--trace-cell", "guess:4:4"], "give METHOD:K:LIVE_ROWS"),
        (["--trace", "t", "--trace-cell", "prompt-lookup:99:4"], "give METHOD:K:LIVE_ROWS"),
        (["--trace", "t", "--trace-cell", "prompt-lookup:4:0"], "give METHOD:K:LIVE_ROWS"),
        (["--trace", "t"], "8 live rows are more than --max-batch 4"),
        (["--trace", "t", "--trace-cell", "draft-model:4:2"], "draft-model needs --draft-model"),
        (["--trace", "t", "--trace-cell", "prompt-lookup:4:2:none"], "no row of class none"),
        (["--trace", "in.parquet/t"], "in.parquet/t: its folder cannot be made"),
        (["--trace", "model"], "model: is a folder; name the file to write"),
        (["--least-matches", "0,2"], "--least-matches 0,2: give numbers from 1 to"),
        (["--prompt-column", "nulls"], "no row that could be answered"),
        (["--kv-memory", "100K"], "the KV cache is too small to time a full batch"),
        (["--draft-device", "cpu"], "--draft-device needs --draft-model"),
        (["--max-depth", "0"], "max-depth"),
        (["--engine", "fake"], "measures --engine torch"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    job: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *job, *options, "-o", "p.json"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("p.json").exists()


def test_auto_needs_this_machine_and_this_engine(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "in.parquet", "--engine", "fake", "--profile", "auto", "-o", "o"]) == 2
    assert "--profile auto measures --engine torch on this machine" in capsys.readouterr().err
    assert main(["plan", *job, "--profile", "auto"]) == 2


def test_an_image_of_an_unknown_kind_is_refused(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *job, "-o", "p.json", "--sample-rows", "4"]) == 0
    assert main(["profile", "show", "p.json", "--image", "curves.txt"]) == 2
    assert ".png, .svg, .pdf" in capsys.readouterr().err


def test_under_the_rejection_rule_the_route_is_the_classs_for_ever(job: list[str]) -> None:
    """The text depends on the route there: neither the batch nor another profile may change it unseen."""
    rejection = [*job, "--acceptance-rule", "rejection", "--temperature", "1"]
    assert main(["profile", *rejection, "-o", "p.json", "--sample-rows", "8"]) == 0
    run = ["generate", *rejection, "--profile", "p.json"]
    assert main([*run, "-o", "a"]) == 0
    assert main([*run, "-o", "b", "--max-batch", "1"]) == 0
    assert load_results("a")["output_text"].tolist() == load_results("b")["output_text"].tolist()
    assert load_results("a")["num_route_changes"].max() == 0
    changed = json.loads(Path("p.json").read_text())
    Path("p.json").write_text(json.dumps({**changed, "created_at": "2026-01-01T00:00:00+00:00"}))
    assert main([*run, "-o", "a", "--retry-errors"]) == 2
    assert main([*run, "-o", "c", "--holdout", "0.1"]) == 2
    assert main(["generate", *rejection, "-o", "d", "--profile", "auto"]) == 2


def test_a_long_input_is_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_MOST_ROWS_READ", 200)
    monkeypatch.setattr(measuring, "_WINDOW_ROWS", 10)
    for number in range(3):
        classes = [f"c{number}"] * 400
        table = pa.table({"prompt": [f"{i}" for i in range(400)], "request_class": classes})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    rows = readable_rows(RunConfig(input=InputConfig(inputs=(str(tmp_path),))))
    assert len(rows) == 200
    assert [sum(row.request_class == f"c{n}" for row in rows) for n in range(3)] == [70, 70, 60]
    assert len({row.row_index for row in rows}) == 200
    assert all(row.prompt == str(row.row_index % 400) for row in rows)


def test_a_profile_and_routes_of_ones_own_exclude_each_other(
    job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *job, "-o", "out", "--profile", "auto", "--method", "prompt-lookup"]) == 2
    assert "--profile auto routes every class itself: drop it or --method" in capsys.readouterr().err


def test_a_folder_in_the_profiles_place_is_refused_before_measuring(
    job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("answers").mkdir()
    assert main(["profile", *job, "-o", "answers"]) == 2
    assert "is a folder; name the file to write" in capsys.readouterr().err


@pytest.mark.parametrize("profile", ["none", "auto"])
def test_a_job_ends_though_the_profile_of_an_earlier_attempt_cannot_be_read(
    job: list[str], profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out", "_batchspec").mkdir(parents=True)
    assert main(["generate", *job, "-o", "out", "--profile", profile]) == 0
    Path("out", "_batchspec", "profile.json").write_text('{"profile_version": 1}')
    Path("out", "_SUCCESS").unlink()
    Path("out", "part-00000.parquet").unlink()
    assert main(["generate", *job, "-o", "out", "--profile", profile]) == 0
    assert Path("out", "_SUCCESS").is_file()
    assert "not a profile" in capsys.readouterr().err


def test_without_a_place_for_profiles_auto_goes_on_target_only(
    job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "_REPAYS", 4)
    Path("file").write_text("")
    monkeypatch.setenv("BATCHSPEC_CACHE", str(Path("file").absolute()))
    assert main(["generate", *job, "-o", "out", "--profile", "auto"]) == 0
    assert "no place to keep a profile" in capsys.readouterr().err


def test_a_holdout_measures_the_saving_and_the_summary_says_it(
    job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", *job, "-o", "out", "--method", "prompt-lookup", "--holdout", "0.5", "--max-batch", "1"]
    assert main(command) == 0
    assert "Saved: " in capsys.readouterr().err
    saving = summary("out")["saving"]
    assert saving["pairs"] >= 3
    assert saving["low"] <= saving["share"] <= saving["high"]
    assert (load_results("out")["num_route_changes"] > 0).any()
