"""Compiles the C kernels once for this machine, keeps the library in the user's cache, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from batchspec.config import cache_dir
from batchspec.errors import UsageError

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-w")


class KernelsUnavailableError(Exception):
    """The kernels cannot be had here; the message says why and what would mend it."""


@cache
def load() -> ctypes.PyDLL:
    """The kernel library, compiled where the cache has none for this source, compiler and processor (1 to 3 s).

    Its calls hold the interpreter lock, since they share scratch memory. Raises KernelsUnavailableError.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise KernelsUnavailableError(
            f"no C compiler ({compiler[0]}) on PATH; install one (e.g. gcc) for a faster CPU engine"
        )
    sources = sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.c")])
    command = [*compiler, *_FLAGS, str(_SOURCES / "kernels.c"), *_torch_openmp(), "-lm"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    key = hashlib.sha256("\0".join([*command, version, processor()]).encode())
    for source in sources:
        key.update(source.read_bytes())
    library = _cache_directory() / f"kernels-{key.hexdigest()[:20]}.so"
    if not library.exists():
        _compile(command, library)
    try:
        return ctypes.PyDLL(str(library))
    except OSError as error:
        raise KernelsUnavailableError(f"{library} does not load: {error}") from None


def loaded_name() -> str:
    """The name of the library's file, which tells source, compiler, flags and processor apart."""
    return Path(load()._name).name


def _compile(command: list[str], library: Path) -> None:
    """Write `library` whole or not at all: several workers may build it at once."""
    descriptor, temporary = tempfile.mkstemp(dir=library.parent, prefix=library.stem, suffix=".tmp")
    os.close(descriptor)
    try:
        done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise KernelsUnavailableError(f"the C compiler failed: {reason} (command: {shlex.join(command)})")
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _torch_openmp() -> list[str]:
    """Link with the OpenMP runtime that torch brings: two runtimes would each keep a set of spinning threads."""
    import torch

    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ["-Wl,--as-needed", str(bundled[0])] if bundled else []


def processor() -> str:
    """The kind of processor, as `-march=native` sees it: a cache may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    )


def _cache_directory() -> Path:
    """The user's cache, or a folder for this process alone where there is none to write to."""
    try:
        wanted = cache_dir()
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except (OSError, UsageError):
        pass
    return Path(tempfile.mkdtemp(prefix="batchspec-"))
