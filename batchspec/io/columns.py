"""The input's columns: one schema for files that differ, and what names and types must be, checked before any work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

import pyarrow as pa
import pyarrow.types as pt

from batchspec.config import InputConfig
from batchspec.errors import InputError
from batchspec.types import SamplingParams

_STRING = pa.string()

SAMPLING_COLUMNS = tuple(f.name for f in fields(SamplingParams))


def plain_type(kind: pa.DataType, text: pa.DataType = _STRING) -> pa.DataType:
    """The type without its encoding: large, view and dictionary forms become string, binary, list or the value type.

    `text` is what stands for strings: `pa.binary()` gives a type that text can be cast to before it is decoded.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    if pt.is_dictionary(kind):
        return plain_type(kind.value_type, text)
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind):
        return text
    if pt.is_large_binary(kind) or pt.is_binary_view(kind):
        return pa.binary()
    if is_list(kind):
        return pa.list_(plain_type(kind.value_type, text))
    if pt.is_map(kind):
        return pa.map_(plain_type(kind.key_type, text), plain_type(kind.item_type, text))
    if pt.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type, text)) for field in kind])
    return kind


def with_text_as_bytes(column: pa.Array) -> pa.Array:
    """The column without its encoding, strings in it as undecoded bytes."""
    kind = plain_type(column.type, text=pa.binary())
    if column.type == kind:
        return column
    # A string's bytes are there as they are; casting imports all of Arrow's compute functions before the first row.
    return column.view(kind) if pt.is_string(column.type) else column.cast(kind)


def is_list(kind: pa.DataType) -> bool:
    tests = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view)
    return any(test(kind) for test in tests)


def unite_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema for all files, given as (name, schema): columns in order of first appearance.

    A column that some file lacks becomes nullable. The same type in two encodings becomes the plain one; a column of
    nulls takes the other file's type. Any other difference raises InputError, naming both files.
    """
    united: dict[str, pa.Field] = {}
    first_seen: dict[str, str] = {}
    num_files_with: Counter[str] = Counter()
    num_files, previous = 0, None
    for name, schema in schemas:
        num_files += 1
        num_files_with.update(schema.names)
        if previous is not None and schema.equals(previous, check_metadata=True):
            continue
        previous = schema
        for field in schema:
            known = united.get(field.name, field)
            kind = _common_type(known.type, field.type)
            if kind is None:
                raise InputError(
                    f"column {field.name!r} is {known.type} in {first_seen[field.name]} but {field.type} in {name}; "
                    f"convert one of the files, or run them apart"
                )
            if field.name not in united or pt.is_null(known.type):
                first_seen[field.name] = name
            united[field.name] = known.with_type(kind).with_nullable(known.nullable or field.nullable)
    return pa.schema(f.with_nullable(f.nullable or num_files_with[f.name] < num_files) for f in united.values())


def _common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    if left == right or pt.is_null(right):
        return left
    if pt.is_null(left):
        return right
    return plain_type(left) if plain_type(left) == plain_type(right) else None


def check_file_columns(name: str, schema: pa.Schema, partition: Sequence[str]) -> None:
    """Raise InputError where a file has two columns of one name, those from its hive directories included."""
    inside, outside = Counter(schema.names), Counter(partition)
    doubled = [column for column, count in inside.items() if count > 1]
    if doubled:
        raise InputError(f"{name} has more than one column named {_quoted(doubled)}; rename one of each pair")
    clashing = [key for key, count in outside.items() if count + inside[key] > 1]
    if clashing:
        raise InputError(
            f"{name} has the column {_quoted(clashing)} twice: inside and in a directory's name, or in two of them; "
            f"drop one, or pass the file itself instead of the directory"
        )


def check_columns(schema: pa.Schema, config: InputConfig) -> None:
    """Raise one InputError with everything that is wrong with the columns that a run reads."""
    defaults = InputConfig()
    roles = ("prompt_column", "messages_column", "request_id_column", "request_class_column")
    names = {role: getattr(config, role) for role in roles}
    problems = []
    for used in (*names.values(), *SAMPLING_COLUMNS):
        lookalikes = [name for name in schema.names if name != used and name.casefold() == used.casefold()]
        if lookalikes:
            problems.append(f"column {_quoted(lookalikes)} differs from {used!r} only by case; rename it")
    for role, name in names.items():
        if name not in schema.names and name != getattr(defaults, role):
            problems.append(f"there is no column {name!r} (--{role.replace('_', '-')})")
    if not {config.prompt_column, config.messages_column} & set(schema.names) and not problems:
        problems.append(
            f"there is neither a column {config.prompt_column!r} nor {config.messages_column!r}; "
            f"name the one to use with --prompt-column or --messages-column"
        )
    expected: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
        config.prompt_column: ("text", _is_text),
        config.messages_column: ("a list of structs with role and content, of maps, or JSON text", _is_messages),
        **dict.fromkeys(SAMPLING_COLUMNS, ("a number", _is_number)),
        "stop": (
            "text or a list of text",
            lambda kind: _is_text(kind) or (is_list(kind) and _is_text(kind.value_type)),
        ),
        "logit_bias": ("a map of token id to number, or a JSON object as text", _is_logit_bias),
    }
    for name, (wanted, fits) in expected.items():
        if name in schema.names and not fits(plain_type(schema.field(name).type)):
            problems.append(f"column {name!r} is {schema.field(name).type}, but must be {wanted}")
    if problems:
        raise InputError(f"{'; '.join(problems)}. The input's columns are: {', '.join(schema.names) or 'none'}")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_binary(kind) or pt.is_null(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_null(kind))


def _is_messages(kind: pa.DataType) -> bool:
    if not is_list(kind):
        return _is_text(kind)
    if pt.is_map(kind.value_type):
        return _is_text(kind.value_type.key_type)
    names = [field.name for field in kind.value_type] if pt.is_struct(kind.value_type) else []
    return {"role", "content"} <= set(names) and len(names) == len(set(names))


def _is_logit_bias(kind: pa.DataType) -> bool:
    if pt.is_map(kind):
        return (pt.is_integer(kind.key_type) or _is_text(kind.key_type)) and _is_number(kind.item_type)
    return _is_text(kind)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
