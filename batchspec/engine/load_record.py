"""What checks and probe found of a model is kept in the user's cache, so that a job need not wait for them again.

It holds for what decides the bits of a number on a CPU: the model, the kind of processor and its cores, the kernels,
the threads, the libraries, this engine's own code, and the settings of numeric libraries. Where any of it differs, and
on GPUs (drivers and libraries choose their kernels there), models are checked and probed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import batchspec
from batchspec.config import cache_dir
from batchspec.engine.cpu import build
from batchspec.engine.model_files import model_identity, stored_dtype
from batchspec.errors import UsageError
from batchspec.system import num_cores, write_whole

logger = logging.getLogger(__name__)

# Variables that decide which numeric library is loaded, and how it computes, begin so.
_NUMERIC_SETTINGS = (
    *("ATEN_", "BLAS_", "BLIS_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_"),
    *("OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_"),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What checks and probe found of a model. `refused_layers` are those whose fused form answers otherwise than they
    do; it is `batch_invariant` where the probe found nothing that makes a row depend on its batch, and False where it
    has not looked yet."""

    refused_layers: tuple[str, ...]
    batch_invariant: bool


class LoadRecord:
    """What is known of a model as it is loaded here, and kept for the next time. Made once torch has its threads.

    `known` is None where nothing is, or where it is to be found `again`.
    """

    def __init__(self, path: Path, dtype: str, device: str, again: bool = False) -> None:
        self._path: Path | None = None
        with suppress(UsageError, OSError, ValueError):  # no cache, or no such model: loading says so
            if device == "cpu" and _decides_alone(path):
                self._facts = _facts(path, dtype)
                key = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
                self._path = cache_dir() / "checked" / f"{key[:24]}.json"
        self.known = None if again else self._read()

    def keep(self, findings: Findings) -> None:
        if self._path is None or findings == self.known:
            return
        found_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            record = {"found_at": found_at, **asdict(findings), "holds_for": self._facts}
            write_whole(self._path, json.dumps(record, indent=2) + "\n")
        except OSError as error:
            logger.info("what was found of the model cannot be kept: %s", error)

    def _read(self) -> Findings | None:
        if self._path is None:
            return None
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            known = Findings(tuple(record["refused_layers"]), record["batch_invariant"] is True)
            logger.info("checked %s (%s; --require-exact checks again)", record["found_at"], self._path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return known


def _decides_alone(path: Path) -> bool:
    """Whether a directory's files decide what the weights are. An adapter's base model lies elsewhere, and it takes
    further libraries to read what is stored quantized."""
    config = (path / "config.json").read_text(encoding="utf-8")
    return "quantization_config" not in config and not (path / "adapter_config.json").exists()


def _facts(path: Path, dtype: str) -> dict[str, Any]:
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_NUMERIC_SETTINGS)}
    return {
        "model": model_identity(path),
        "dtype": stored_dtype(path) if dtype == "auto" else dtype,
        "processor": build.processor(),
        "kernels": _kernels(),
        "threads": torch.get_num_threads(),
        "cores": num_cores(),
        "versions": {
            "batchspec": batchspec.__version__,
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "torch_build": torch.__config__.show(),
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
    except build.KernelsUnavailableError:
        return "unavailable"


@cache
def _engine_code() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
