"""Real Ray nodes on this machine's loopback, and a look at what runs on them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.pipeline.jobs import wait_for

ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
NODE_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


class Cluster:
    """A head node, and further ones as asked for. Each node's processes are one process group."""

    def __init__(self, folder: Path, num_cpus: float) -> None:
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"127.0.0.1:{free_port()}"
        head = ["--head", f"--port={self.address.split(':')[1]}", "--include-dashboard=false"]
        self.start_node(num_cpus, head)

    def start_node(self, num_cpus: float, arguments: list[str] | None = None) -> subprocess.Popen[bytes]:
        """Start a node that joins the cluster, and return when it has."""
        log = self._folder / f"node{len(self._nodes)}.log"
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--node-ip-address=127.0.0.1"]
        command += [f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
        command += arguments or [f"--address={self.address}"]
        with log.open("wb") as file:
            node = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT}, start_new_session=True
            )
        self._nodes.append(node)
        wait_for(lambda: node.poll() is not None or b"Ray runtime started" in log.read_bytes(), NODE_SECONDS)
        assert node.poll() is None, log.read_text()
        return node

    def kill_node(self, node: subprocess.Popen[bytes]) -> None:
        """All processes of the node end at once, as when its machine is switched off."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()

    def processes(self, node: subprocess.Popen[bytes]) -> list[psutil.Process]:
        try:
            return [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def worker_pids(self) -> list[int]:
        """The worker processes of all jobs, on all nodes."""
        return [process.pid for node in self._nodes for process in self.processes(node) if _is_worker(process)]

    def close(self) -> None:
        for node in reversed(self._nodes):
            if node.poll() is None:
                self.kill_node(node)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "batchspec.pipeline.executors.process" in process.cmdline()
    except psutil.Error:
        return False


def actor_of(worker_pid: int) -> int:
    """The actor's process: the worker's parent."""
    return psutil.Process(worker_pid).ppid()


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
