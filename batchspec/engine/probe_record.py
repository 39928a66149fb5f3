"""What the probe found on this machine is kept, so that a job need not wait for it again.

A verdict holds for everything that decides the bits of a number: the models, the device and its driver, the threads,
the libraries, this engine's own code, and the settings of numeric libraries. Where any of it differs, or the verdict
was not that results are independent of the batch, the probe runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import batchspec
from batchspec.config import cache_dir
from batchspec.engine.cpu import build
from batchspec.engine.model import PackedModel
from batchspec.engine.model_files import model_identity
from batchspec.errors import UsageError

logger = logging.getLogger(__name__)

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

# Variables that numeric libraries read begin so.
_NUMERIC_SETTINGS = (
    *("ATEN_", "BLAS_", "CUBLAS", "CUDA_", "CUDNN", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MKL_", "NVIDIA_"),
    *("OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_"),
)


def probe_once(models: Sequence[PackedModel], probe: Callable[[], str | None], again: bool) -> str | None:
    """What `probe` finds of these models: None where results do not depend on the batch, else what changed them.

    It is not called where it is known to find nothing, unless it is to look `again`.
    """
    facts = _facts(models)
    path = _path(facts)
    if path is not None and not again and (probed_at := _probed_at(path)) is not None:
        logger.info("results do not depend on the batch: probed %s (%s; --require-exact probes again)", probed_at, path)
        return None
    difference = probe()
    if path is not None and difference is None:
        _keep(path, {"probed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "holds_for": facts})
    elif path is not None:
        path.unlink(missing_ok=True)
    return difference


def _path(facts: Mapping[str, Any]) -> Path | None:
    """The verdict's file; None where this user has no cache."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    try:
        return cache_dir() / "probes" / f"{key[:24]}.json"
    except UsageError:
        return None


def _probed_at(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["probed_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, verdict: Mapping[str, Any]) -> None:
    """Whole or not at all: several workers may write it at once."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.info("what the probe found cannot be kept: %s", error)


def _facts(models: Sequence[PackedModel]) -> dict[str, Any]:
    return {
        "models": [
            {"files": model_identity(Path(model.name)), "dtype": str(model.dtype), "device": _device(model.device)}
            for model in models
        ],
        "threads": torch.get_num_threads(),
        "versions": {
            "batchspec": batchspec.__version__,
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "engine_code": _engine_code(),
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_NUMERIC_SETTINGS)},
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"processor": build.processor(), "kernels": _kernels()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multi_processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": _NVIDIA_DRIVER.read_text() if _NVIDIA_DRIVER.exists() else None,
    }


def _kernels() -> str:
    """The kernel library by its name, which tells its source, compiler and flags."""
    try:
        return Path(build.load()._name).name
    except build.KernelsUnavailableError as error:
        return str(error)


@cache
def _engine_code() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
