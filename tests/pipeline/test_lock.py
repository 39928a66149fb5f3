"""One run per output."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchspec.errors import OutputLocked
from batchspec.io.store import LocalStore
from batchspec.pipeline.lock import LOCK_NAME, STALE_SECONDS, OutputLock, read_lock
from tests.pipeline.jobs import WritePrompts, finished_rows, run_cli, start_cli, wait_for


def rewrite(store: LocalStore, **values: Any) -> None:
    store.write(LOCK_NAME, json.dumps(json.loads(store.read(LOCK_NAME)) | values).encode())


def test_a_second_run_is_exit_4_and_does_not_disturb_the_first(write_prompts: WritePrompts, tmp_path: Path) -> None:
    path, output = write_prompts(2000), tmp_path / "out"
    first = start_cli("generate", path, "-o", output, "--engine", "fake", "--fake-tokens-per-second", "200")
    wait_for(lambda: finished_rows(output) > 0)
    second = run_cli("generate", path, "-o", output, "--engine", "fake")
    third = run_cli("generate", path, "-o", output, "--engine", "fake", "--overwrite")
    assert (second.returncode, third.returncode) == (4, 4), second.stderr
    assert f"process {first.pid}" in second.stderr
    status = json.loads(run_cli("status", output, "--json").stdout)
    assert status["state"] == "running"
    assert status["heartbeat_age_seconds"] < 10
    assert 0 < status["rows_done"] < status["rows"] == 2000
    first.terminate()
    _, stderr = first.communicate(timeout=30)
    assert first.returncode == 143, stderr


def test_a_lock_is_held_and_given_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with OutputLock(store) as lock:
        lock.check()
        with pytest.raises(OutputLocked, match="in use by process"), OutputLock(store):
            pass
    assert read_lock(store) is None


def test_the_lock_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    code = "import sys, os\nfrom pathlib import Path\nfrom batchspec.io.store import LocalStore\n"
    code += "from batchspec.pipeline.lock import OutputLock\n"
    code += "OutputLock(LocalStore(Path(sys.argv[1]))).__enter__()\nos._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    found = read_lock(store)
    assert found is not None
    assert found.stale
    with OutputLock(store) as lock:
        lock.check()


@pytest.mark.parametrize(
    ("values", "stale"),
    [
        ({}, False),
        ({"process_started": "1"}, True),
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "heartbeat_at": 0}, True),
        ({"pid_namespace": "pid:[1]", "pid": 2**22 + 1}, False),
        ({"boot_id": "other", "heartbeat_at": time.time() - STALE_SECONDS - 1}, True),
    ],
)
def test_an_owner_is_gone_when_its_process_is_or_else_when_its_heartbeat_stops(
    tmp_path: Path, values: dict[str, Any], stale: bool
) -> None:
    store = LocalStore(tmp_path)
    with OutputLock(store, heartbeat_seconds=3600):
        rewrite(store, **values)
        found = read_lock(store)
        assert found is not None
        assert found.stale is stale


def test_a_run_that_was_taken_for_dead_finds_out_and_leaves_the_new_lock_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with OutputLock(store, heartbeat_seconds=0.02) as sleeper:
        rewrite(store, owner="somebody else")
        with pytest.raises(OutputLocked, match="took the output over"):
            wait_for(sleeper.check, seconds=5)
    assert json.loads(store.read(LOCK_NAME))["owner"] == "somebody else"


def test_a_damaged_lock_is_stale(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write(LOCK_NAME, b"{")
    with OutputLock(store) as lock:
        lock.check()


def test_of_many_that_take_a_stale_lock_over_one_wins(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with OutputLock(store, heartbeat_seconds=3600):
        rewrite(store, process_started="gone")
        seen = store.read(LOCK_NAME)
        winners = [number for number in range(5) if store.replace_if(LOCK_NAME, seen, b"%d" % number)]
        assert winners == [0]
        assert store.read(LOCK_NAME) == b"0"
    assert os.listdir(tmp_path / "_batchspec" / "tmp") == []
