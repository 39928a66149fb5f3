"""Datasets of the Hugging Face Hub, brought to disk as Parquet."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchspec.config import cache_dir
from batchspec.errors import BatchspecError, InputError

if TYPE_CHECKING:
    from datasets import Dataset


def fetch_dataset(address: str) -> Path:
    """The Parquet file of `hf://org/name[:split]`, made in the user's cache on the first call for each revision.

    Without a split the dataset must have just one. Raises InputError where there is no such dataset or split,
    BatchspecError where the Hub cannot be reached.
    """
    name, _, split = address.removeprefix("hf://").partition(":")
    dataset = _load(address, name, split or None)
    key = hashlib.sha256(repr([dataset.cache_files, dataset.split]).encode()).hexdigest()[:16]
    path = cache_dir() / "datasets" / f"{name.replace('/', '--')}-{dataset.split}-{key}.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        dataset.to_parquet(str(temporary))
        temporary.replace(path)
    return path


def _load(address: str, name: str, split: str | None) -> Dataset:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name, split=split)
    except (ConnectionError, TimeoutError) as error:
        raise BatchspecError(f"cannot reach the Hub for {address}: {error}") from error
    except Exception as error:  # the library raises many kinds for what a user may mistype
        raise InputError(f"cannot load {address}: {type(error).__name__}: {error}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if len(loaded) != 1:
        raise InputError(f"{address} has several splits; choose one: {', '.join(f'{address}:{s}' for s in loaded)}")
    return next(iter(loaded.values()))
