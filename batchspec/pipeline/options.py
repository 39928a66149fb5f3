"""Command-line options made from the fields of the configuration, which alone know types and defaults."""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from batchspec.config import (
    MAX_SPECULATIVE_TOKENS,
    NO_PROFILE,
    ProfileOptions,
    RouteConfig,
    RunConfig,
    RunOptions,
)
from batchspec.types import Method

NAMES = {
    "output": ("--output", "-o"),
    "kv_memory_bytes": ("--kv-memory",),
    "routes_file": ("--routes",),
}
NOT_OPTIONS = ("inputs", "logit_bias")
HELP = {
    "prompt_column": "Input column with plain prompts.",
    "messages_column": "Input column with chat messages (role, content).",
    "request_id_column": "Input column with ids; passed through, and the key of a row's noise.",
    "request_class_column": "Input column with request classes.",
    "limit": "Answer only the first rows of the input.",
    "output": "Output directory. May be left out for one local file: its name without the ending, plus .generated.",
    "output_prefix": "Put before the name of every result column.",
    "overwrite": "Discard what the output directory holds of a former job.",
    "summary_file": "Write the JSON summary to this file as well.",
    "shard_rows": "Most input rows in one part.",
    "shard_bytes": "Most input bytes in one part.",
    "engine": "torch, vllm, or fake (canned answers without a model).",
    "model": "A directory, a Hugging Face name (hf://org/name), or demo.",
    "draft_model": "The model that drafts, with the same token ids as the model.",
    "draft_device": "Where the draft model runs.",
    "dtype": "auto (as stored), bfloat16, float16 or float32.",
    "max_batch": "Most rows decoded at once by a worker.",
    "kv_memory_bytes": "Memory for the KV cache of a worker, such as 4GiB.",
    "prefill_chunk_tokens": "Prompt tokens taken in at once, and the grain at which rows share prefixes.",
    "no_shared_prefixes": "Compute every prompt anew, also where rows begin with the same tokens.",
    "acceptance_rule": "How sampled drafts are accepted: coupled or rejection.",
    "require_exact": "Check and probe the model anew, and refuse to run where results depend on the batch.",
    "neutralize_special_tokens": "Read control tokens spelled out in a prompt as plain text.",
    "tensor_parallel_size": "GPUs that one worker's model is split over (vllm).",
    "vllm_arg": "A further argument of vLLM, name=value; may be repeated, such as max_model_len=8192.",
    "fake_tokens_per_second": "Pace of the fake engine (0: no pause).",
    "fake_acceptance": "Chance that a proposal of the fake engine holds.",
    "max_new_tokens": "Most tokens to write per row.",
    "min_new_tokens": "Tokens to write before a row may end.",
    "stop": "End a row at this text; may be repeated. On the command line \\n, \\t and \\\\ are escapes.",
    "temperature": "0 is greedy.",
    "top_k": "Sample from this many tokens (0: off).",
    "top_p": "Sample from the likeliest tokens that hold this mass (1: off).",
    "min_p": "Drop tokens less likely than this share of the likeliest (0: off).",
    "repetition_penalty": "Divide the logits of tokens seen in prompt or output (1: off).",
    "presence_penalty": "Lower the logits of tokens in the output (0: off).",
    "frequency_penalty": "Lower the logits of tokens in the output, per occurrence (0: off).",
    "seed": "Seed of sampling.",
    "method": "How tokens are proposed where no routes file says otherwise.",
    "num_speculative_tokens": "Most tokens proposed per step (0: target-only).",
    "min_match_tokens": "Tokens that must match before prompt lookup proposes.",
    "routes_file": "TOML file that maps request classes to methods.",
    "holdout": "Share of steps to run target-only, at random, to measure what speculation saves.",
    "profile": "A file made by `batchspec profile`, which routes every class by measurement; auto measures one for "
    "this job if it is long enough; none. By default one that fits is taken from the cache.",
    "accept_stale_profile": "With a profile of something else, run target-only instead of refusing.",
    "executor": "Where workers run: local, or ray (actors on a Ray cluster).",
    "workers": "Worker processes; every GPU gets at least one.",
    "devices": "auto, cpu, or GPUs such as cuda:0,cuda:1.",
    "threads": "CPU threads of each worker; by default the cores are shared out.",
    "ray_address": "Address of the Ray cluster; by default $RAY_ADDRESS, else a running one, else a new one.",
    "ray_num_cpus": "CPUs that Ray sets aside for each worker.",
    "ray_num_gpus": "GPUs that Ray sets aside for each worker; by default --tensor-parallel-size where there are any.",
    "price_per_hour": "USD per device-hour; without it costs are null.",
    "max_error_rate": "Share of error rows up to which the job counts as a success.",
    "retry_errors": "Decode the error rows of a former attempt again.",
    "allow_version_change": "Go on with a job that other library versions or another device type began.",
    "grace_seconds": "What a signal leaves for rows in flight.",
    "step_timeout": "Seconds after which a step is taken for hung and its worker replaced.",
    "max_worker_deaths": "Worker deaths after which the job ends.",
}
PROFILE_HELP = {
    "budget": "Most seconds to measure.",
    "sample_rows": "Rows to decode, over all classes.",
    "methods": "Methods to measure, comma-separated; all that are possible by default.",
    "max_depth": "Most tokens proposed per step.",
    "least_matches": "Least matches of prompt lookup to measure, in tokens, comma-separated.",
    "if_stale": "Keep a profile that still fits this machine and these models.",
    "trace": "Write one step as a Chrome trace to this file.",
    "trace_cell": "The step to trace: METHOD:K:LIVE_ROWS[:CLASS].",
}
_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[str, ...]: "a text or a list of texts",
}
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}
_PROFILE_RANGES = {
    "budget": click.FloatRange(min=1),
    "sample_rows": click.IntRange(min=1),
    "max_depth": click.IntRange(min=1, max=MAX_SPECULATIVE_TOKENS),
}
_SIZE = re.compile(r"(\d+)\s*(?:([KMGT])i?)?B?", re.IGNORECASE)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every option of RunConfig, and `--config`."""
    for _, field, kind in reversed(list(option_fields())):
        command = _option(field, kind)(command)
    config_help = "TOML file of options (keys are option names); options given here win over it."
    return click.option("--config", is_eager=True, expose_value=False, callback=_read_config, help=config_help)(command)


def profile_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every option of ProfileOptions."""
    kinds = typing.get_type_hints(ProfileOptions)
    for field in reversed(fields(ProfileOptions)):
        if field.name not in PROFILE_HELP:
            continue
        flag = "--" + field.name.replace("_", "-")
        kind, shown = _without_none(kinds[field.name]), field.default not in (None, "", False)
        common: dict[str, Any] = {"help": PROFILE_HELP[field.name], "default": field.default, "show_default": shown}
        common |= {"is_flag": True} if kind is bool else {"type": _PROFILE_RANGES.get(field.name, kind)}
        command = click.option(flag, field.name, **common)(command)
    return command


def profile_config(context: click.Context) -> ProfileOptions:
    """The ProfileOptions that the options of `context` make up."""
    return ProfileOptions(**{name: context.params[name] for name in PROFILE_HELP})


def run_config(context: click.Context, inputs: tuple[str, ...]) -> RunConfig:
    """The configuration that the options of `context` make up."""
    values: dict[str, dict[str, Any]] = {part.name: {} for part in fields(RunConfig)}
    for part_name, field, _ in option_fields():
        values[part_name][field.name] = context.params[field.name]
    values["input"]["inputs"] = inputs
    if context.get_parameter_source("method") is not ParameterSource.DEFAULT and context.params["profile"] is None:
        values["routes"]["profile"] = NO_PROFILE  # a method that somebody asked for, be it target-only
    if context.get_parameter_source("stop") is ParameterSource.COMMANDLINE:
        values["sampling"]["stop"] = tuple(_unescape(stop) for stop in values["sampling"]["stop"])
    hints = typing.get_type_hints(RunConfig)
    return RunConfig(**{name: hints[name](**part) for name, part in values.items()})


def option_fields() -> Iterator[tuple[str, Field[Any], Any]]:
    """The part of RunConfig, the field and the type (None taken off) of every option."""
    for part_name, part in typing.get_type_hints(RunConfig).items():
        kinds = typing.get_type_hints(part)
        for field in fields(part):
            if field.name not in NOT_OPTIONS:
                yield part_name, field, _without_none(kinds[field.name])


def option_names(field_name: str) -> tuple[str, ...]:
    return NAMES.get(field_name, ("--" + field_name.replace("_", "-"),))


def _option(field: Field[Any], kind: Any) -> Callable[[Any], Any]:
    shown = field.default not in (None, (), "", False)
    common: dict[str, Any] = {"help": HELP[field.name], "default": field.default, "show_default": shown}
    names = (*option_names(field.name), field.name)
    if kind is bool:
        return click.option(*names, is_flag=True, **common)
    if field.name == "devices":
        common["default"] = ",".join(RunOptions().devices)
        return click.option(*names, callback=_split, **common)
    if kind == tuple[str, ...]:
        return click.option(*names, multiple=True, **common)
    if field.name == "kv_memory_bytes":
        return click.option(*names, type=_Bytes(), **common)
    if kind is Method:
        common["default"] = RouteConfig().method.option_name
        return click.option(*names, type=_MethodName([method.option_name for method in Method]), **common)
    return click.option(*names, type=kind, **common)


class _MethodName(click.Choice[str]):
    """A method by its name with dashes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Method(str(super().convert(value, param, ctx)).replace("-", "_"))


class _Bytes(click.ParamType[int]):
    """A size: a number of bytes, or one with K, M, G or T (powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size such as 4GiB or 500M", param, ctx)
        power = " KMGT".index((match[2] or " ").upper())
        return int(match[1]) << (10 * power)


def _split(context: click.Context, parameter: click.Parameter, value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    return tuple(name.strip() for name in names if name.strip())


def _read_config(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    """Make the keys of a TOML file the defaults of the options."""
    if path is None:
        return
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} is not a TOML file: {error}") from error
    context.default_map = _checked(path, values)


def _checked(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by field name. Raises BadParameter that lists every key that is no option."""
    known = {option_names(field.name)[0][2:]: (field.name, kind) for _, field, kind in option_fields()}
    problems: list[str] = []
    by_field: dict[str, Any] = {}
    for key, value in values.items():
        option = key.replace("_", "-")
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            problems.append(f"{path}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
            continue
        name, kind = known[option]
        is_list = kind == tuple[str, ...]
        if not _fits(value, kind, name):
            problems.append(f"{path}: {key} must be {_KIND_NAMES.get(kind, 'a text')}, got {value!r}")
        if name == "devices":
            by_field[name] = value if isinstance(value, str) else ",".join(map(str, value))
        else:
            by_field[name] = [value] if is_list and isinstance(value, str) else value
    if problems:
        raise click.BadParameter("\n".join(problems))
    return by_field


def _fits(value: Any, kind: Any, name: str) -> bool:
    """Whether a TOML value is of an option's kind; a whole number is a number, and sizes may be spelled out."""
    if kind == tuple[str, ...]:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        is_size = name == "kv_memory_bytes" and isinstance(value, str)
        return is_size or (isinstance(value, int) and not isinstance(value, bool))
    return isinstance(value, bool if kind is bool else str)


def _unescape(text: str) -> str:
    return re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], text)


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return next(member for member in typing.get_args(kind) if member is not type(None))
    return kind
