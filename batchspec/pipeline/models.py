"""Finds a model's directory before any worker starts, without loading it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchspec.config import DEMO_MAX_ROWS, DEMO_MODEL, EngineConfig
from batchspec.engine.demo_model import demo_model_at_hand, demo_model_dir
from batchspec.errors import UsageError

HUB_PREFIX = "hf://"


def model_at_hand(model: str) -> Path | None:
    """The local directory of a model, where nothing need be fetched or made for it."""
    path = demo_model_at_hand() if model == DEMO_MODEL else _as_path(model)
    return path if path is not None and path.is_dir() else None


def locate_model(config: EngineConfig) -> Path | None:
    """The local directory of `config.model`, fetched where it is a hub name; None for an engine without a model.

    Local paths win over hub names. Raises UsageError where there is no such model.
    """
    if config.engine == "fake":
        return None
    if config.model == DEMO_MODEL:
        return demo_model_dir()
    path = _as_path(config.model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {config.model}: the directory has no config.json, so it is no model")
        return path.absolute()
    return _fetch_from_hub(config.model)


def locate_models(config: EngineConfig) -> EngineConfig:
    """The configuration with both models as local directories."""
    model = locate_model(config)
    if model is None:
        return config
    draft = config.draft_model and str(locate_model(replace(config, model=config.draft_model)))
    return replace(config, model=str(model), draft_model=draft)


def refuse_large_demo(config: EngineConfig, num_rows: int) -> None:
    """The demo model is the default; nobody should fill a table with it by mistake."""
    if config.engine != "fake" and config.model == DEMO_MODEL and num_rows > DEMO_MAX_ROWS:
        raise UsageError(
            f"the input has {num_rows} rows and --model is the demo model, which answers at most {DEMO_MAX_ROWS}: "
            "name the model that you want with --model, or try a part with --limit"
        )


def _as_path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise UsageError(f"--model {model}: {error}") from None


def _fetch_from_hub(name: str) -> Path:
    """A snapshot of a Hugging Face model. The import is late: `huggingface_hub` is not light."""
    from huggingface_hub import errors, snapshot_download

    hub_name = name.removeprefix(HUB_PREFIX)
    try:
        return Path(snapshot_download(hub_name))
    except errors.HFValidationError as error:
        raise UsageError(
            f"--model {name}: neither a directory nor a Hugging Face name such as hf://org/name"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"--model {name}: there is no such directory, and no such model on Hugging Face") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise UsageError(
            f"--model {name}: there is no such directory, and Hugging Face cannot be reached ({type(error).__name__})"
        ) from error
