"""What a model directory holds, told by hashes of its files; torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHOLLY_HASHED_BYTES = 64 * 2**20
SAMPLE_BYTES = 64 * 2**10
NUM_SAMPLES = 256
WEIGHT_ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json")
TOKENIZER_NAMES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece")
TEMPLATE_NAMES = ("chat_template",)


def model_identity(path: Path | None) -> dict[str, str] | None:
    """Hashes of a model directory's weights, tokenizer, template and settings; None for an engine without a model.

    Files above 64 MiB are hashed by their size, both ends and 256 blocks in between.
    """
    if path is None:
        return None
    groups: dict[str, Any] = {name: hashlib.sha256() for name in ("weights", "tokenizer", "template", "config")}
    for file in sorted(path.iterdir()):
        if file.is_file() and (group := _group(file.name)) is not None:
            groups[group].update(file.name.encode())
            for block in _blocks(file):
                groups[group].update(block)
    return {name: digest.hexdigest() for name, digest in groups.items()}


def weight_bytes(path: Path) -> int:
    """The size of a model directory's weights in safetensors files; 0 where they are kept otherwise."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors") if file.is_file())


def stored_dtype(path: Path) -> str:
    """The dtype that a model directory's configuration declares. Raises OSError or ValueError where there is none."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'} is no JSON object")
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _group(name: str) -> str | None:
    if name.endswith(WEIGHT_ENDINGS):
        return "weights"
    if name.startswith(TEMPLATE_NAMES):
        return "template"
    if name.startswith(TOKENIZER_NAMES):
        return "tokenizer"
    return "config" if name in ("config.json", "generation_config.json") else None


def _blocks(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as opened:
        if size <= WHOLLY_HASHED_BYTES:
            while block := opened.read(2**20):
                yield block
            return
        for sample in range(NUM_SAMPLES + 1):
            opened.seek((size - SAMPLE_BYTES) * sample // NUM_SAMPLES)
            yield opened.read(SAMPLE_BYTES)
