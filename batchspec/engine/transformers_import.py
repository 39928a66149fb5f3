"""Importing `transformers` in a worker process."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def import_transformers() -> None:
    """Import `transformers`, which is most of a worker's start, without reading its sources twice.

    To learn what is in them, `transformers` reads the source files of all its models when it is imported, and its
    package `transformers.models` reads them again: a third of a second for names that are known already. Here that
    package is made without running it. It finds its modules itself, and every other name in `transformers`.
    """
    import transformers

    package_name = "transformers.models"
    if package_name in sys.modules or (spec := importlib.util.find_spec(package_name)) is None:
        return
    package = importlib.util.module_from_spec(spec)

    def find(name: str) -> Any:
        module_name = f"{package_name}.{name}"
        is_module = importlib.util.find_spec(module_name) is not None
        return importlib.import_module(module_name) if is_module else getattr(transformers, name)

    vars(package)["__getattr__"] = find
    sys.modules[package_name] = package
