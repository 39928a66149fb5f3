"""Where workers run: devices found without loading torch, CPU threads and devices shared out."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise

from batchspec.config import RunConfig
from batchspec.errors import UsageError
from batchspec.system import num_cores

CPU = "cpu"
_DEVICE_NAME = re.compile(r"cpu|cuda:\d+")


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place. The shares of the places on one device sum to 1. A place of several GPUs (tensor parallel) is
    named by its first, and its share is their number."""

    device: str
    threads: int
    device_share: float


def worker_places(config: RunConfig) -> tuple[Place, ...]:
    """One place per worker: every device or group of them gets one at least, more workers share devices in turn.

    CPU cores are divided among the workers, unless `threads` says how many each may use. Ray has places of its own.
    """
    if config.run.executor == "ray":
        from batchspec.pipeline.executors.ray import ray_places

        return ray_places(config)
    devices = _devices(config)
    num_workers = max(config.run.workers, len(devices))
    on_device = [devices[i % len(devices)] for i in range(num_workers)]
    threads = config.run.threads or max(1, num_cores() // num_workers)
    return tuple(
        Place(device, threads, (1 if device == CPU else config.engine.tensor_parallel_size) / on_device.count(device))
        for device in on_device
    )


def device_type(places: tuple[Place, ...]) -> str:
    """The kind of device, as results may depend on it: `cpu`, or the names of the GPUs."""
    names = _gpu_names()
    used = {place.device for place in places}
    kinds = {CPU if d == CPU else names[int(d[5:])] if int(d[5:]) < len(names) else "cuda" for d in used}
    return ", ".join(sorted(kinds))


def _devices(config: RunConfig) -> list[str]:
    named, group = list(dict.fromkeys(config.run.devices)), config.engine.tensor_parallel_size
    if named == ["auto"]:
        num_gpus = 0 if config.engine.engine == "fake" or _torch_is_cpu_only() else len(_gpu_names())
        if 0 < num_gpus < group:
            raise UsageError(f"--tensor-parallel-size {group}: there are {num_gpus} GPUs here")
        return [f"cuda:{i}" for i in range(0, num_gpus - group + 1, group)] or [CPU]
    wrong = [name for name in named if not _DEVICE_NAME.fullmatch(name)]
    if wrong or not named:
        raise UsageError(f"--devices {', '.join(wrong) or '(empty)'}: name auto, or cpu and cuda:0, cuda:1, ...")
    num_gpus = 0 if _torch_is_cpu_only() else len(_gpu_names())
    absent = [name for name in named if name != CPU and int(name[5:]) >= num_gpus]
    if absent:
        raise UsageError(f"--devices {', '.join(absent)}: torch sees {num_gpus} GPUs here; name auto or cpu")
    first = sorted(int(name[5:]) for name in named if name != CPU)
    if any(b < a + group for a, b in pairwise([*first, num_gpus])):
        raise UsageError(
            f"--devices {', '.join(named)}: with --tensor-parallel-size {group} name the first of every {group} GPUs"
        )
    return named


def _gpu_names() -> list[str]:
    """The names of the CUDA devices that a worker would see, in its order; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [[cell.strip() for cell in line.split(",", 2)] for line in listed.splitlines() if line.count(",") >= 2]
    if visible is None:
        return [name for _, _, name in gpus]
    names: list[str] = []
    for wanted in visible.split(","):
        found = [name for index, uuid, name in gpus if wanted and (wanted == index or uuid.startswith(wanted))]
        if not found:  # as CUDA does: the first unknown one ends the list
            break
        names += found[:1]
    return names


def _torch_is_cpu_only() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True
