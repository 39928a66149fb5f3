"""A real Airflow: its own environment, SQLite, scheduler, DAG processor and API server as processes of the test."""

import json
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DAG_ID = "batchspec"
# Where `make test-airflow` puts it; another one may be named.
AIRFLOW = os.environ.get("AIRFLOW", str(ROOT / ".venv-airflow/bin/airflow"))
BATCHSPEC = os.environ.get("BATCHSPEC", str(Path(sys.executable).with_name("batchspec")))
ENDED = ("success", "failed")
LOOK_SECONDS = 0.5


class Installation:
    """`home` holds everything. `defaults` are the parameters of runs by the clock and by assets."""

    def __init__(self, home: Path, defaults: dict[str, Any]) -> None:
        self.home = home
        self._port = _free_port()
        dags = home / "dags"
        dags.mkdir()
        (dags / "airflow_dag.py").write_text((ROOT / "pipelines/airflow_dag.py").read_text())
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "3",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://localhost:{self._port}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__API_AUTH__JWT_EXPIRATION_TIME": "86400",
            "AIRFLOW__EXECUTION_API__JWT_EXPIRATION_TIME": "86400",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "3600",
            "BATCHSPEC": BATCHSPEC,
            "BATCHSPEC_DEFAULTS": json.dumps(defaults),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._token = ""

    def start(self) -> None:
        self.run("db", "migrate")
        self.run("pools", "set", "batchspec", "1", "devices for batchspec")
        for arguments in (("api-server", "--port", str(self._port)), ("scheduler",), ("dag-processor",)):
            with (self.home / f"{arguments[0]}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [AIRFLOW, *arguments], env=self.environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        self.wait_for(self._log_in, 240)
        self.wait_for(lambda: self.query("select 1 from dag where dag_id = ?", DAG_ID), 240)

    def stop(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, *arguments: str) -> str:
        """Run one `airflow` command; its standard output."""
        done = subprocess.run([AIRFLOW, *arguments], env=self.environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def trigger(self, run_id: str, **params: Any) -> None:
        self._post(f"/api/v2/dags/{DAG_ID}/dagRuns", {"dag_run_id": run_id, "logical_date": None, "conf": params})

    def update_asset(self, name: str) -> None:
        [[asset_id]] = self.query("select id from asset where name = ?", name)
        self._post("/api/v2/assets/events", {"asset_id": asset_id})

    def states(self, run_id: str) -> dict[str, tuple[str | None, int]]:
        """State and number of tries of every task of a run."""
        rows = self.query("select task_id, state, try_number from task_instance where run_id = ?", run_id)
        return {task: (state, tries) for task, state, tries in rows}

    def wait_until_ended(self, run_id: str, seconds: float = 1200) -> str:
        def ended() -> Any:
            rows = self.query("select state from dag_run where run_id = ?", run_id)
            return rows and rows[0][0] in ENDED and rows[0][0]

        return str(self.wait_for(ended, seconds))

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> Any:
        """What `condition` returns, once it is true. Looks are counted, not seconds: a paused machine is no failure."""
        for _ in range(int(seconds / LOOK_SECONDS)):
            if found := condition():
                return found
            ended = [process.args for process in self._processes if process.poll() is not None]
            assert not ended, f"{ended} ended; see {self.home}"
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"it never came to pass; see {self.home}")

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Read Airflow's own database."""
        with sqlite3.connect(f"file:{self.home}/airflow.db?mode=ro", uri=True, timeout=30) as connection:
            rows: list[tuple[Any, ...]] = connection.execute(sql, values).fetchall()
        connection.close()
        return rows

    def logs(self, run_id: str, task: str) -> str:
        folder = self.home / "logs" / f"dag_id={DAG_ID}" / f"run_id={run_id}" / f"task_id={task}"
        return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))

    def _log_in(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://localhost:{self._port}/auth/token", timeout=10) as answer:
                self._token = json.load(answer)["access_token"]
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"http://localhost:{self._port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
        )
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
