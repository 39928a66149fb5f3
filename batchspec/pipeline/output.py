"""Where a job writes to."""

from __future__ import annotations

import os
from pathlib import Path

from batchspec.config import InputConfig, OutputConfig
from batchspec.errors import UsageError

GENERATED_SUFFIX = ".generated"


def resolve_output(inputs: InputConfig, output: OutputConfig) -> str:
    """The absolute path or the address of the output directory.

    Without `--output` it lies beside the one local input file. Raises UsageError for a file, and for a place inside an
    input directory, whose readers would take the answers for input.
    """
    if output.output is None:
        return _beside_input(inputs)
    if "://" in output.output:
        return output.output.rstrip("/")
    path = Path(output.output).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise UsageError(f"--output {path} is a file: name a directory")
    for name in inputs.inputs:
        directory = Path(name).expanduser()
        if "://" not in name and directory.is_dir() and _is_within(path, directory):
            raise UsageError(f"--output {path} lies inside the input directory {directory}: choose a place outside")
    return str(path)


def _beside_input(inputs: InputConfig) -> str:
    only = Path(inputs.inputs[0]).expanduser() if len(inputs.inputs) == 1 else None
    if only is None or not only.is_file():
        raise UsageError("name the output directory with --output: it may be left out for one local input file alone")
    return str((only.parent / f"{only.stem}{GENERATED_SUFFIX}").resolve())


def _is_within(path: Path, directory: Path) -> bool:
    """Links resolved, so that another name of the same place is seen through."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))
