"""Readers of typed fields in a JSON object, with errors that name the field and show its value.

``null`` counts as absent everywhere, because several clients send it for fields that they do not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson

from areal_actors.errors import InvalidRequest

__all__ = [
    "parse_json",
    "read_flag",
    "read_integer",
    "read_mapping",
    "read_number",
    "read_text",
    "read_texts",
    "shown",
    "wrong",
]

T = TypeVar("T")

_MAX_SHOWN = 40
_MAX_DEPTH = 128
"""Maximum nesting of objects and lists.

JSON writers fail soon after 250 levels, and parsed values are written again.
"""


def parse_json(text: bytes, what: str, *, param: str | None = None) -> Any:
    """Parse ``text``; errors refer to it as ``what``.

    Raises:
        InvalidRequest: it is not valid JSON, or nested too deeply to be written again.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{what} is no valid JSON: {error.msg} (line {error.lineno}).", param=param) from None
    # Counting brackets is fast, and most bodies have fewer of them than the limit, so the value is rarely walked.
    if text.count(b"{") + text.count(b"[") > _MAX_DEPTH and _is_deep(value):
        raise InvalidRequest(f"{what} is nested more than {_MAX_DEPTH} levels deep; flatten it.", param=param)
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        nested = [each for each in level if isinstance(each, dict | list)]
        if not nested:
            return False
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def shown(value: Any) -> str:
    """Return a short form of a JSON value for an error message; never longer than a line, whatever was sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "…")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    digits = str(value)
    return digits if len(digits) <= _MAX_SHOWN else digits[:_MAX_SHOWN] + "…"


def wrong(name: str, expected: str, value: Any) -> InvalidRequest:
    """Return the error for a field whose value does not fit."""
    return InvalidRequest(f"{name} must be {expected}, not {shown(value)}.", param=name)


def read_number(
    body: Mapping[str, Any], name: str, default: float, *, low: float, high: float, is_open: bool = False
) -> float:
    """Return a number from ``low`` (excluded if ``is_open``) to ``high``. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return default
    # ``True`` is an ``int`` in Python, but not a number in JSON.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (is_open and value == low):
        edge = "above " if is_open else "from "
        raise wrong(name, f"a number {edge}{low:g} to {high:g}", value)
    return float(value)


def read_integer(body: Mapping[str, Any], name: str, default: T, *, low: int, high: int) -> int | T:
    """Return an integer from ``low`` to ``high``; ``3.0`` is accepted as 3. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, f"an integer from {low} to {high}", value)
    return value


def read_flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a boolean, or ``default`` if the field is absent. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def read_text(body: Mapping[str, Any], name: str) -> str | None:
    """Return a non-empty string, or ``None`` if the field is absent. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise wrong(name, "a string that is not empty", value)
    return value


def read_mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object; an empty one if the field is absent. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def read_texts(body: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """Return an object whose values are strings; an empty one if the field is absent. Raises ``InvalidRequest``."""
    texts = read_mapping(body, name)
    for key, value in texts.items():
        if not isinstance(value, str):
            raise wrong(name, "an object of strings", {key: value})
    return texts
