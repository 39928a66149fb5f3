"""Chat messages as plain lists of dicts, checked; what is wrong with them is said without their text."""

from __future__ import annotations

import json
from typing import Any

from batchspec.errors import RowError


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of one row, from a list of dicts or from JSON text; all text may still be bytes.

    Each message has a `role` and a `content` of text, or `tool_calls` in its place. Keys whose value is null are
    dropped: a column of structs cannot say otherwise that a key is absent. Raises RowError.
    """
    messages = parse_json(value, "bad_messages", "messages") if isinstance(value, bytes) else _decoded(value)
    if not isinstance(messages, list):
        raise _bad("messages is not a list")
    if not messages:
        raise _bad("there are no messages")
    checked = [_checked(message, number) for number, message in enumerate(messages, start=1)]
    if not any(message.get("content", "").strip() or message.get("tool_calls") for message in checked):
        raise RowError("empty_prompt", f"none of the {len(checked)} messages holds any text")
    return checked


def parse_json(text: bytes, error_type: str, name: str) -> Any:
    """The value of JSON text. Raises RowError `error_type`, or `bad_encoding` where it is not valid Unicode."""
    try:
        value = json.loads(decode_text(text, name))
    except json.JSONDecodeError as error:
        raise RowError(error_type, f"{name} is not JSON: wrong at line {error.lineno} column {error.colno}") from None
    except (ValueError, RecursionError):
        raise RowError(
            error_type, f"{name} is not JSON that can be read: nested too deep, or a number too long"
        ) from None
    if b"\\u" in text:  # the only way to spell half a surrogate pair
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RowError("bad_encoding", f"{name} holds half a surrogate pair") from None
    return value


def decode_text(text: bytes, name: str) -> str:
    """The text of UTF-8 bytes. Raises RowError `bad_encoding` with the place of the first wrong byte."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RowError(
            "bad_encoding", f"{name} is not valid UTF-8: wrong at byte {error.start} of {len(text)}"
        ) from None


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return decode_text(value, "messages")
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        return {_decoded(key): _decoded(item) for key, item in value.items()}
    return value


def _checked(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(f"message {number} is {_kind(message)}, not an object with role and content")
    present = {key: value for key, value in message.items() if value is not None}
    role, content = present.get("role"), present.get("content")
    if not isinstance(role, str) or not role:
        raise _bad(
            f"message {number} has no role" if role in (None, "") else f"the role of message {number} is {_kind(role)}"
        )
    if content is None and not present.get("tool_calls"):
        raise _bad(f"message {number} has no content")
    if content is not None and not isinstance(content, str):
        raise _bad(f"the content of message {number} is {_kind(content)}; only text is supported")
    return present


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "list": "a list", "dict": "an object", "bool": "a boolean", "str": "text"}
    return names.get(type(value).__name__, "a number")


def _bad(message: str) -> RowError:
    return RowError("bad_messages", message)
