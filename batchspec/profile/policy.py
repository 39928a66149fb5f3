"""Which route a request class takes: pure, torch-free, cheap enough to be asked in every step."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchspec.config import MAX_MATCH_TOKENS, MAX_SPECULATIVE_TOKENS, RouteConfig
from batchspec.errors import UsageError
from batchspec.types import Method, Route, StepReport
from batchspec.workload import DEFAULT_LABEL, label_of

ANY_CLASS = "*"
_DRAFT_MODEL_METHODS = (Method.DRAFT_MODEL, Method.LOOKUP_THEN_DRAFT)
_KEYS = ("method", "num_speculative_tokens", "min_match_tokens")


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Routes that somebody chose: by cell (`label/p256-1024/o64-256`), else by label, else by `*`, else the default.

    Rows without a class have the label `default`. Occupancy does not matter.
    """

    default: Route
    by_class: Mapping[str, Route] = field(default_factory=dict)

    def route(self, request_class: str | None, occupancy: int) -> Route:
        cell = request_class or DEFAULT_LABEL
        for key in (cell, label_of(cell), ANY_CLASS):
            if key in self.by_class:
                return self.by_class[key]
        return self.default

    def observe(self, step: StepReport) -> None:
        """Chosen routes learn nothing."""


def beyond_measured(num_rows: int) -> str:
    """Why rows are decoded target-only beside more live rows than their profile was measured with."""
    return f"profile: measured up to {num_rows} live rows"


def static_policy(config: RouteConfig, draft_model: str | None = None) -> StaticPolicy:
    """The policy of `--method` and `--routes`. Raises one UsageError that lists everything wrong with either.

    The routes file is TOML, one table per class; only `method` is required:

        ["*"]
        method = "target-only"
        [extraction]
        method = "prompt-lookup"
        num_speculative_tokens = 8
    """
    problems = [
        *_limit_problems("--num-speculative-tokens", config.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS),
        *_limit_problems("--min-match-tokens", config.min_match_tokens, 1, MAX_MATCH_TOKENS),
        *_method_problems("--method", config.method, draft_model),
    ]
    default = _route(config.method, config.num_speculative_tokens, config.min_match_tokens, "--method")
    by_class: dict[str, Route] = {}
    if config.routes_file is not None:
        for name, table in _read_routes_file(config.routes_file).items():
            route = _parse_table(name, table, config, draft_model, problems)
            if route is not None:
                by_class[name] = route
    if problems:
        raise UsageError("\n".join(problems))
    return StaticPolicy(default, by_class)


def setting_name(route: Route) -> str:
    """The method and its draft length, for people."""
    k = route.num_speculative_tokens
    return f"{route.method.value} k={k}" if k else route.method.value


def _route(method: Method, num_speculative_tokens: int, min_match_tokens: int, reason: str) -> Route:
    if method is Method.TARGET_ONLY or num_speculative_tokens == 0:
        return Route(Method.TARGET_ONLY, reason=reason)
    return Route(method, num_speculative_tokens, reason, min_match_tokens)


def _read_routes_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--routes {path}: cannot read the file: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--routes {path}: not a TOML file: {error}") from error


def _parse_table(
    name: str, table: object, config: RouteConfig, draft_model: str | None, problems: list[str]
) -> Route | None:
    """The route of one class of a routes file; None where `problems` got a reason why there is none."""
    where = f"{config.routes_file}, class {name!r}:"
    if not isinstance(table, dict):
        problems.append(f"{where} must be a table with the keys {', '.join(_KEYS)}, got {table!r}")
        return None
    found = [f"{where} unknown key {key!r}; the keys are {', '.join(_KEYS)}" for key in table if key not in _KEYS]
    if "num_speculative_tokens" in table:
        what = f"{where} num_speculative_tokens"
        found += _limit_problems(what, table["num_speculative_tokens"], 0, MAX_SPECULATIVE_TOKENS)
    if "min_match_tokens" in table:
        found += _limit_problems(f"{where} min_match_tokens", table["min_match_tokens"], 1, MAX_MATCH_TOKENS)
    method = _parse_method(table.get("method"))
    if method is None:
        names = ", ".join(known.option_name for known in Method)
        found.append(f"{where} method must be one of {names}, got {table.get('method', 'nothing')!r}")
    else:
        found += _method_problems(f"{where} method", method, draft_model)
    problems += found
    if found or method is None:
        return None
    return _route(
        method,
        table.get("num_speculative_tokens", config.num_speculative_tokens),
        table.get("min_match_tokens", config.min_match_tokens),
        f"routes file, class {name}",
    )


def _parse_method(name: object) -> Method | None:
    """The method of this name, written with `-` or `_`; None where there is none."""
    known = {method.value: method for method in Method}
    return known.get(name.replace("-", "_")) if isinstance(name, str) else None


def _method_problems(what: str, method: Method, draft_model: str | None) -> list[str]:
    if method in _DRAFT_MODEL_METHODS and draft_model is None:
        return [f"{what} {method.option_name} needs a draft model: name one with --draft-model"]
    return []


def _limit_problems(what: str, value: object, lowest: int, highest: int) -> list[str]:
    if isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest:
        return []
    return [f"{what} must be a whole number from {lowest} to {highest}, got {value!r}"]
