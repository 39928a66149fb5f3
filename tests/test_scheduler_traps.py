"""What schedulers do to commands: pipes that hide exit codes, temporary directories, scripts taken for templates."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.jobs import run_cli
from tests.report.jobs import write_job

ROOT = Path(__file__).parent.parent
COMMAND = f"{sys.executable} -m batchspec"


def bash(script: str, cwd: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, env=environment, timeout=60).returncode


def test_c02_a_pipe_hides_an_exit_code_unless_pipefail_is_set(tmp_path: Path) -> None:
    failing = f"{COMMAND} status nothing-here | tee log"
    assert bash(failing, tmp_path) == 0
    assert bash(f"set -euo pipefail\n{failing}", tmp_path) == 2
    for shown in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        assert not re.search(r"[^|]\|[^|]", shown) or "set -euo pipefail" in shown


def test_c02_the_dag_retries_what_the_readme_says_and_nothing_else() -> None:
    """Read from the file: Airflow is not installed where these tests run."""
    tree = ast.parse((ROOT / "pipelines/airflow_dag.py").read_text())
    [no_retry] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "NO_RETRY"
    ]
    table = dict(re.findall(r"^\| (\d+)\S* \|.*\| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert no_retry == {int(code) for code, advice in table.items() if advice.startswith("no")}


def test_c04_the_dag_starts_no_shell_and_no_command_of_it_ends_in_sh() -> None:
    source = (ROOT / "pipelines/airflow_dag.py").read_text()
    assert not re.search(r"BashOperator|bash_command|\.sh\b", source)


def test_c04_report_takes_relative_paths_without_a_home_or_a_writable_directory(tmp_path: Path) -> None:
    write_job(tmp_path / "jobs/answers")
    elsewhere = tmp_path / "jobs/elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o555)
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    command = [sys.executable, "-m", "batchspec", "report", "../answers", "--html", "../answers.html"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "jobs/answers.html").is_file()


@pytest.mark.parametrize("command", ["verify", "report", "status"])
def test_c04_a_relative_path_is_named_in_full(tmp_path: Path, command: str) -> None:
    done = run_cli(command, "not-there", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}/not-there" in done.stderr
