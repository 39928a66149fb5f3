"""The DAG under a real Airflow, with the demo model: success, a kill, an asset, a budget, error rows."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import batchspec
from tests.airflow.installation import AIRFLOW, ROOT, Installation
from tests.pipeline.jobs import journaled_rows

pytestmark = pytest.mark.airflow

SAMPLE = ROOT / "data/sample_prompts.parquet"
TASKS = ("profile", "plan", "generate", "verify", "report")
DONE_AT_ONCE = dict.fromkeys(TASKS, ("success", 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two inputs out of the sample: good rows of every class, and some with bad rows among them."""
    folder = tmp_path_factory.mktemp("airflow")
    table = pq.read_table(SAMPLE)
    is_bad = pc.starts_with(table.column("request_id").cast("string"), "bad-")
    good, bad = table.filter(pc.invert(is_bad)), table.filter(is_bad)
    pq.write_table(good.take(list(range(0, good.num_rows, 21))), folder / "prompts.parquet")
    pq.write_table(bad, folder / "bad.parquet")
    return folder


@pytest.fixture(scope="module")
def airflow(folder: Path) -> Iterator[Installation]:
    home = folder / "home"
    home.mkdir()
    defaults = {
        "input": str(folder / "prompts.parquet"),
        "output_root": str(folder / "answers"),
        "price_per_hour": 0.1,
        "max_error_rate": 0,
        "options": "--max-new-tokens 12",
    }
    installation = Installation(home, defaults)
    try:
        installation.start()
        yield installation
    finally:
        installation.stop()


def outputs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "answers").iterdir() if path.is_dir())


def test_the_clock_starts_a_run(airflow: Installation, folder: Path) -> None:
    """The night that has just passed, as soon as the DAG is there."""

    def scheduled_run() -> Any:
        return airflow.query("select run_id from dag_run where run_type = 'scheduled'")

    [[run_id]] = airflow.wait_for(scheduled_run, 240)
    assert airflow.wait_until_ended(run_id) == "success", airflow.logs(run_id, "generate")
    assert airflow.states(run_id) == DONE_AT_ONCE
    [(next_run, max_active)] = airflow.query("select next_dagrun_create_after, max_active_runs from dag")
    assert " 03:00:00" in next_run
    assert max_active == 1
    assert airflow.query("select distinct pool from task_instance") == [("batchspec",)]


def test_a_run_succeeds_and_leaves_answers_summary_and_page(airflow: Installation, folder: Path) -> None:
    airflow.trigger("good")
    assert airflow.wait_until_ended("good") == "success", airflow.logs("good", "generate")
    assert airflow.states("good") == DONE_AT_ONCE
    frame = batchspec.load_results(str(folder / "answers/good"))
    assert len(frame) == pq.read_metadata(folder / "prompts.parquet").num_rows
    assert frame["error_type"].isna().all()
    summary = json.loads((folder / "answers/good.json").read_text())
    assert summary["rows"] == len(frame)
    assert (folder / "answers/good.html").read_text().startswith("<!doctype html>")
    assert airflow.query("select count(*) from xcom where run_id = 'good'") == [(0,)]


def test_a_killed_task_is_retried_and_resumes(airflow: Installation, folder: Path) -> None:
    airflow.trigger("killed", options="--max-new-tokens 64 --max-batch 2")
    output = folder / "answers/killed"
    airflow.wait_for(lambda: journaled_rows(output) >= 4, 1200)
    [command] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(output) in (process.info["cmdline"] or ()) and "generate" in process.info["cmdline"]
    ]
    os.killpg(os.getpgid(command.pid), signal.SIGKILL)
    assert airflow.wait_until_ended("killed") == "success"
    assert airflow.states("killed") == {**DONE_AT_ONCE, "generate": ("success", 2)}
    frame = batchspec.load_results(str(output), ["attempt", "error_type"])
    assert len(frame) == pq.read_metadata(folder / "prompts.parquet").num_rows
    assert (frame["attempt"] == 1).sum() >= 4
    assert {1, 2} == {*frame["attempt"]}
    assert frame["error_type"].isna().all()


def test_an_update_of_the_prompts_starts_a_run(airflow: Installation, folder: Path) -> None:
    airflow.update_asset("batchspec_prompts")

    def asset_run() -> Any:
        return airflow.query("select run_id from dag_run where run_type = 'asset_triggered'")

    [[run_id]] = airflow.wait_for(asset_run, 600)
    assert airflow.wait_until_ended(run_id) == "success"
    assert airflow.states(run_id) == DONE_AT_ONCE
    name = run_id.replace(":", "").replace("+", "_")
    assert name in outputs(folder), "the output's name comes from the run"
    answered = "select count(*) from asset_event e join asset a on a.id = e.asset_id where a.name = ?"
    assert airflow.query(answered, "batchspec_answers")[0][0] >= 1


def test_a_plan_over_budget_stops_before_anything_is_spent(airflow: Installation, folder: Path) -> None:
    airflow.trigger("dear", max_cost_usd=1e-9)
    assert airflow.wait_until_ended("dear") == "failed"
    states = airflow.states("dear")
    assert states["plan"] == ("failed", 1)
    assert {states[task][0] for task in ("generate", "verify", "report")} == {"upstream_failed"}
    assert "dear" not in outputs(folder)
    assert "exit code 6: no retry" in airflow.logs("dear", "plan")


def test_too_many_error_rows_fail_without_a_retry(airflow: Installation, folder: Path) -> None:
    airflow.trigger("bad", input=str(folder / "*.parquet"))
    assert airflow.wait_until_ended("bad") == "failed"
    states = airflow.states("bad")
    assert states["generate"] == ("failed", 1)
    assert states["verify"][0] == states["report"][0] == "upstream_failed"
    assert "exit code 3: no retry" in airflow.logs("bad", "generate")
    assert "more than --max-error-rate 0 allows" in airflow.logs("bad", "generate")


def test_parsing_the_dag_is_quick_and_loads_no_model_library(airflow: Installation) -> None:
    """Beside Airflow's own imports, which a DAG processor has made already."""
    script = (
        "import sys, time, airflow.sdk, airflow.providers.standard.hooks.subprocess, airflow.timetables.assets, "
        "airflow.timetables.trigger\n"
        "started = time.process_time()\n"
        f"sys.path.insert(0, {str(ROOT / 'pipelines')!r})\n"
        "import airflow_dag\n"
        "seconds = time.process_time() - started\n"
        "print(seconds, sorted({'torch', 'batchspec', 'pandas', 'pyarrow'} & sys.modules.keys()))\n"
    )
    python = Path(AIRFLOW).with_name("python")
    done = subprocess.run([python, "-c", script], env=airflow.environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    seconds, loaded = done.stdout.splitlines()[-1].split(" ", 1)
    assert loaded == "[]"
    assert float(seconds) < 1
