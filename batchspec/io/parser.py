"""Turns input rows into requests; a row that cannot be one becomes a row error."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from batchspec.config import InputConfig
from batchspec.errors import RowError
from batchspec.io.columns import SAMPLING_COLUMNS, with_text_as_bytes
from batchspec.io.messages import decode_text, parse_json, parse_messages
from batchspec.types import Request, RowFailure, SamplingParams

_INTEGER_FIELDS = {field.name for field in fields(SamplingParams) if field.type == "int"}


class RowParser:
    """Parses record batches of one input. `defaults` is what a row's null or absent sampling column inherits.

    A row is answered from its messages where these are not null, else from its prompt. A binary prompt is read as
    UTF-8. Row errors: `null_prompt`; `empty_prompt`, nothing but white space; `bad_encoding`, not UTF-8;
    `bad_messages`; `bad_sampling`. Ids and classes of any type are taken in their text form, binary ones as UTF-8,
    those of a fixed size (UUIDs) in hexadecimal.
    """

    def __init__(self, config: InputConfig, defaults: SamplingParams) -> None:
        self._config = config
        self._defaults = defaults

    def parse(self, batch: pa.RecordBatch, first_row_index: int) -> list[Request | RowFailure]:
        """One Request or RowFailure per row of `batch`, in order; the first has `row_index` `first_row_index`.

        The columns are as `resolve_inputs` checked them.
        """
        config = self._config
        prompts = _values(batch, config.prompt_column)
        messages = _values(batch, config.messages_column)
        ids = _texts(batch, config.request_id_column)
        classes = _texts(batch, config.request_class_column)
        sampling = {name: _values(batch, name) for name in SAMPLING_COLUMNS if name in batch.schema.names}

        rows: list[Request | RowFailure] = []
        for i, row_index in enumerate(range(first_row_index, first_row_index + batch.num_rows)):
            try:
                chat = None if messages[i] is None else parse_messages(_had(messages[i]))
                rows.append(
                    Request(
                        row_index=row_index,
                        prompt=self._prompt(prompts[i]) if chat is None else None,
                        messages=chat,
                        request_id=ids[i],
                        request_class=classes[i],
                        sampling=self._sampling({name: values[i] for name, values in sampling.items()}),
                    )
                )
            except RowError as error:
                rows.append(RowFailure(row_index, error.error_type, error.message))
        return rows

    def _prompt(self, value: Any) -> str:
        if value is None:
            raise RowError("null_prompt", "the row has no prompt: it is null")
        prompt = decode_text(value, "the prompt")
        if not prompt.strip():
            raise RowError("empty_prompt", f"the prompt holds no text: {len(prompt)} characters of white space")
        return prompt

    def _sampling(self, values: dict[str, Any]) -> SamplingParams:
        given = {name: _setting(name, _had(value)) for name, value in values.items() if value is not None}
        if not given:
            return self._defaults
        params = replace(self._defaults, **given)
        if problems := params.problems():
            raise RowError("bad_sampling", "; ".join(problems))
        return params


def _had(value: Any) -> Any:
    """A value of `_values`, or its RowError raised."""
    if isinstance(value, RowError):
        raise value
    return value


def _setting(name: str, value: Any) -> Any:
    """A sampling column's value as SamplingParams wants it."""
    if name == "stop":
        return _stop(value)
    if name == "logit_bias":
        return _logit_bias(value)
    if name not in _INTEGER_FIELDS:
        return float(value)
    try:
        whole = int(value)
    except (ValueError, OverflowError):  # not a number, infinite
        whole = None
    if whole != value:
        raise RowError("bad_sampling", f"{name} must be a whole number, got {value}")
    return whole


def _stop(value: Any) -> tuple[str, ...]:
    strings = value if isinstance(value, list) else [value]
    if None in strings:
        raise RowError("bad_sampling", "stop holds a null")
    return tuple(decode_text(string, "stop") for string in strings)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    biases = parse_json(value, "bad_sampling", "logit_bias") if isinstance(value, bytes) else value
    try:
        pairs = tuple(sorted((int(token_id), float(bias)) for token_id, bias in biases.items()))
        finite = all(math.isfinite(bias) for _, bias in pairs)
    except (ValueError, TypeError, AttributeError, OverflowError):
        finite = False
    if not finite:
        raise RowError("bad_sampling", "logit_bias must be an object of token ids and finite numbers")
    return pairs


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """The column as Python values: text as undecoded bytes, maps as dicts; a RowError where a value cannot be had."""
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = with_text_as_bytes(batch.column(name))
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    except KeyError:  # some row's map holds a key twice
        values = [_value(scalar, name) for scalar in column]
    return values


def _value(scalar: pa.Scalar, name: str) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except KeyError:
        error_type = "bad_sampling" if name in SAMPLING_COLUMNS else "bad_messages"
        return RowError(error_type, f"a map in {name} holds a key twice")


def _texts(batch: pa.RecordBatch, name: str) -> list[str | None]:
    return text_forms(batch.column(name)) if name in batch.schema.names else [None] * batch.num_rows


def text_forms(column: pa.Array) -> list[str | None]:
    """The values, of any type, in their text form; bytes that are not UTF-8 appear as `\\xff`."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    column = with_text_as_bytes(column)
    if pt.is_fixed_size_binary(column.type):
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if not pt.is_binary(column.type):
        try:
            column = column.cast(pa.string()).cast(pa.binary())
        except pa.ArrowNotImplementedError:  # nested types
            return [None if value is None else str(value) for value in column.to_pylist()]
    values = column.to_pylist()
    return [None if value is None else value.decode(errors="backslashreplace") for value in values]
