"""What a resumed job must agree with: identity always, versions unless told otherwise; the rest may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import batchspec
from batchspec.config import RunConfig
from batchspec.engine.model_files import model_identity
from batchspec.engine.versions import vllm_version
from batchspec.errors import MismatchError
from batchspec.io.inputs import InputSet
from batchspec.io.schema import SCHEMA_VERSION


def job_identity(config: RunConfig, inputs: InputSet, model_path: Path | None) -> dict[str, Any]:
    """Everything that decides the ids and the text of the rows."""
    engine = config.engine
    identity: dict[str, Any] = {
        "input": {"content": inputs.content_hash, "rows": inputs.num_rows},
        "columns": {
            "prompt": config.input.prompt_column,
            "messages": config.input.messages_column,
            "request_id": config.input.request_id_column,
            "request_class": config.input.request_class_column,
            "output_prefix": config.output.output_prefix,
        },
        "engine": engine.engine,
        "dtype": engine.dtype,
        "prefill_chunk_tokens": engine.prefill_chunk_tokens,
        "neutralize_special_tokens": engine.neutralize_special_tokens,
        "acceptance_rule": engine.acceptance_rule,
        "sampling": _as_json(asdict(config.sampling)),
        "model": model_identity(model_path),
        "result_schema_version": SCHEMA_VERSION,
    }
    if engine.engine == "vllm":
        identity["vllm_arg"] = list(engine.vllm_arg)
    if samples_by_rejection(config):
        identity["routes"] = _as_json(asdict(config.routes))
        identity["draft_model"] = model_identity(Path(engine.draft_model)) if engine.draft_model else None
    return identity


def samples_by_rejection(config: RunConfig) -> bool:
    """Whether a row's text depends on its route: then that is settled by its class, and by nothing that a run sees."""
    samples_in_vllm = config.engine.engine == "vllm" and not config.sampling.greedy
    return config.engine.acceptance_rule == "rejection" or samples_in_vllm


def job_versions(config: RunConfig, device_type: str) -> dict[str, str]:
    """The software and the kind of device, which may shift the last bits of a number."""
    versions = {"batchspec": batchspec.__version__, "device_type": device_type}
    if config.engine.engine != "fake":
        versions |= {name: metadata.version(name) for name in ("torch", "transformers")}
    if config.engine.engine == "vllm":
        versions["vllm"] = vllm_version()
    return versions


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each value that differs, by its dotted name."""
    lines: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            lines += differences(before, now, f"{prefix}{name}.")
        elif before != now:
            lines.append(f"{prefix}{name}: {before!r} there, {now!r} now")
    return lines


def refuse_mismatch(
    output: str,
    old_identity: Mapping[str, Any],
    identity: Mapping[str, Any],
    old_versions: Mapping[str, Any],
    versions: Mapping[str, Any],
    allow_version_change: bool,
) -> None:
    """Raise MismatchError where a run does not fit what an output holds; the message lists every difference."""
    lines = differences(old_identity, identity)
    version_lines = [] if allow_version_change else differences(old_versions, versions)
    if not lines and not version_lines:
        return
    ways_out = "Write to another --output, or discard what is there with --overwrite."
    if not lines:
        ways_out += " Or go on with what is here: --allow-version-change."
    raise MismatchError("\n  ".join([f"{output} holds another job:", *lines, *version_lines]) + f"\n{ways_out}")


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from a JSON file: tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
