"""That models passed the checks and the probe is kept in the user's cache, so that a job need not wait for them again.

It holds for what decides the bits of a number on a CPU: the models, the kind of processor and its cores, the kernels,
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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import batchspec
from batchspec.config import EngineConfig, cache_dir
from batchspec.engine.cpu import build
from batchspec.engine.model_files import model_identity
from batchspec.errors import UsageError
from batchspec.system import num_cores, write_whole

logger = logging.getLogger(__name__)

# Variables that decide which numeric library is loaded, and how it computes, begin so.
_NUMERIC_SETTINGS = (
    *("ATEN_", "BLAS_", "BLIS_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_"),
    *("OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_"),
)


class LoadRecord:
    """Whether the models of a configuration, loaded here, passed before. Made once torch has its threads."""

    def __init__(self, config: EngineConfig, device: str) -> None:
        self._path: Path | None = None
        if device != "cpu" or (config.draft_device or device) != "cpu":
            return
        with suppress(UsageError, OSError):  # this user has no cache, or there is no such model: loading says so
            self._facts = _facts(config)
            key = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
            self._path = cache_dir() / "checked" / f"{key[:24]}.json"

    def passed(self) -> bool:
        """Whether they have passed all of it."""
        if self._path is None:
            return False
        try:
            passed_at = json.loads(self._path.read_text(encoding="utf-8"))["passed_at"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        logger.info("checked and probed %s (%s; --require-exact does it again)", passed_at, self._path)
        return True

    def keep(self) -> None:
        """They passed."""
        if self._path is None:
            return
        record = {"passed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "holds_for": self._facts}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(record, indent=2) + "\n")
        except OSError as error:
            logger.info("that the models passed their checks cannot be kept: %s", error)

    def take_back(self) -> None:
        """Whatever is known of them is to be found again."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def _facts(config: EngineConfig) -> dict[str, Any]:
    models = [config.model, *filter(None, [config.draft_model])]
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_NUMERIC_SETTINGS)}
    return {
        "models": [model_identity(Path(model)) for model in models],
        "dtype": config.dtype,
        # under the rejection rule a draft has a part in the text, and is probed
        "acceptance_rule": config.acceptance_rule if config.draft_model else None,
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
