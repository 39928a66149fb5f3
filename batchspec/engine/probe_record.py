"""What the probe found is kept in the user's cache, so that a job need not wait for it again.

A verdict holds for what decides the bits of a number on a CPU: the models, the kind of processor and its cores, the
kernels, the threads, the libraries, this engine's own code, and the settings of numeric libraries. Where any of it
differs, where the verdict was not that results are independent of the batch, and on GPUs (drivers and libraries choose
their kernels there), the probe runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from batchspec.system import num_cores, write_whole

logger = logging.getLogger(__name__)

# Variables that decide which numeric library is loaded, and how it computes, begin so.
_NUMERIC_SETTINGS = (
    *("ATEN_", "BLAS_", "BLIS_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_"),
    *("OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_"),
)


def probe_once(models: Sequence[PackedModel], probe: Callable[[], str | None], again: bool) -> str | None:
    """What `probe` finds of these models: None where results do not depend on the batch, else what changed them.

    It is not called where it is known to find nothing, unless it is to look `again`.
    """
    if any(model.device.type != "cpu" for model in models):
        return probe()
    facts = _facts(models)
    try:
        path = _path(facts)
    except UsageError:  # this user has no cache
        return probe()
    if not again and (probed_at := _probed_at(path)) is not None:
        logger.info("results do not depend on the batch: probed %s (%s; --require-exact probes again)", probed_at, path)
        return None
    difference = probe()
    if difference is None:
        _keep(path, {"probed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "holds_for": facts})
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return difference


def _path(facts: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "probes" / f"{key[:24]}.json"


def _probed_at(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["probed_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, verdict: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(verdict, indent=2) + "\n")
    except OSError as error:
        logger.info("what the probe found cannot be kept: %s", error)


def _facts(models: Sequence[PackedModel]) -> dict[str, Any]:
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_NUMERIC_SETTINGS)}
    return {
        "models": [{"files": model_identity(Path(model.name)), "dtype": str(model.dtype)} for model in models],
        "processor": build.processor(),
        "kernels": _kernels(),
        "threads": torch.get_num_threads(),
        "cores": num_cores(),
        "versions": {
            "batchspec": batchspec.__version__,
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "engine_code": _engine_code(),
        # as a hash: nobody knows what else is in an environment
        "settings": hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
    }


def _kernels() -> str:
    try:
        return build.loaded_name()
    except build.KernelsUnavailableError as error:
        return str(error)


@cache
def _engine_code() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
