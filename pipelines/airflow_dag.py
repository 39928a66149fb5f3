"""Nightly batch generation under Airflow 3: profile -> plan -> generate -> verify -> report.

Put this file into the DAG folder. Airflow calls the `batchspec` command of an environment of its own: set BATCHSPEC to
its path in the environment of the workers. Make the pool once, with one slot per set of devices:

    airflow pools set batchspec 1 "devices for batchspec"

Results go through files, not XCom: next to the output directory of a run lie its summary (.json) and its page (.html).
The output's name comes from the run, so that a retry goes on where the last try ended. Runs are started by the clock,
by an update of the asset `batchspec_prompts`, or by hand with other parameters; a good run updates `batchspec_answers`.
"""

from __future__ import annotations

import json
import os
import shlex
from datetime import datetime
from functools import cached_property
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, Asset, BaseOperator, Param
from airflow.sdk.exceptions import AirflowFailException
from airflow.timetables.assets import AssetOrTimeSchedule
from airflow.timetables.trigger import CronTriggerTimetable

BATCHSPEC = os.environ.get("BATCHSPEC", "batchspec")

# What runs by the clock and by an asset take. Paths must be absolute: a task runs in a temporary directory. An
# installation sets its own values here, or as JSON in the environment.
DEFAULTS: dict[str, Any] = {
    "input": "/data/prompts",
    "output_root": "/data/answers",
    "model": "demo",
    "price_per_hour": 3.0,
    "max_cost_usd": 100.0,
    "max_error_rate": 0.01,
    "options": "",
} | json.loads(os.environ.get("BATCHSPEC_DEFAULTS", "{}"))

# Usage, input or mismatch; too many error rows; an audit fault; over budget: the same command would end the same way.
# Everything else (1: storage, device, worker; 4: output in use; signals) is worth another try, which resumes.
NO_RETRY = {2, 3, 5, 6}

OUTPUT = "{{ params.output_root }}/{{ dag_run.run_id | replace(':', '') | replace('+', '_') }}"
PROFILE = "{{ params.output_root }}/profile.json"


class BatchspecOperator(BaseOperator):
    """Runs one batchspec command without a shell. `options` is split like a command line."""

    template_fields = ("arguments", "options")

    def __init__(self, *, arguments: list[str], options: str = "", **settings: Any) -> None:
        super().__init__(do_xcom_push=False, pool="batchspec", **settings)
        self.arguments = arguments
        self.options = options

    @cached_property
    def hook(self) -> SubprocessHook:
        return SubprocessHook()

    def execute(self, context: Any) -> None:
        command = [BATCHSPEC, *self.arguments, *shlex.split(self.options)]
        self.log.info("%s", shlex.join(command))
        exit_code = self.hook.run_command(command).exit_code
        if exit_code in NO_RETRY:
            raise AirflowFailException(f"batchspec {self.arguments[0]} ended with exit code {exit_code}: no retry")
        if exit_code:
            raise RuntimeError(f"batchspec {self.arguments[0]} ended with exit code {exit_code}: to be retried")

    def on_kill(self) -> None:
        # batchspec takes SIGTERM as: finish the rows in flight, keep everything, exit
        self.hook.send_sigterm()


with DAG(
    dag_id="batchspec",
    description="Answer last night's prompts with a language model",
    schedule=AssetOrTimeSchedule(
        timetable=CronTriggerTimetable("0 3 * * *", timezone="UTC"), assets=[Asset("batchspec_prompts")]
    ),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3},
    params={
        "input": Param(DEFAULTS["input"], type="string", description="Parquet files, a directory, a glob"),
        "output_root": Param(DEFAULTS["output_root"], type="string", description="every run gets a directory here"),
        "model": Param(DEFAULTS["model"], type="string", description="a directory, or hf://org/name"),
        "price_per_hour": Param(DEFAULTS["price_per_hour"], type="number", description="USD per device-hour"),
        "max_cost_usd": Param(DEFAULTS["max_cost_usd"], type="number", description="more than this is not started"),
        "max_error_rate": Param(DEFAULTS["max_error_rate"], type="number", minimum=0, maximum=1),
        "options": Param(DEFAULTS["options"], type="string", description="more options, as on a command line"),
    },
    doc_md=__doc__,
) as dag:
    job = ["{{ params.input }}", "--model", "{{ params.model }}", "--price-per-hour", "{{ params.price_per_hour }}"]
    options = "{{ params.options }}"
    profile = BatchspecOperator(
        task_id="profile",
        arguments=["profile", "{{ params.input }}", "--model", "{{ params.model }}", "--if-stale", "-o", PROFILE],
        options=options,
    )
    plan = BatchspecOperator(
        task_id="plan",
        arguments=["plan", *job, "--profile", PROFILE, "--max-cost-usd", "{{ params.max_cost_usd }}"],
        options=options,
    )
    generate = BatchspecOperator(
        task_id="generate",
        arguments=[
            "generate",
            *job,
            *("--profile", PROFILE, "--holdout", "0.02"),
            *("--max-error-rate", "{{ params.max_error_rate }}"),
            *("-o", OUTPUT, "--summary-file", f"{OUTPUT}.json"),
        ],
        options=options,
    )
    verify = BatchspecOperator(task_id="verify", arguments=["verify", OUTPUT], outlets=[Asset("batchspec_answers")])
    report = BatchspecOperator(task_id="report", arguments=["report", OUTPUT, "--html", f"{OUTPUT}.html"])

    profile >> plan >> generate >> verify >> report
