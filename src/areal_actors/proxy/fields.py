"""Reading typed fields from a JSON object, with an error that names the field and shows what was there.

``null`` counts as absent everywhere, because several clients send it for what they do not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from areal_actors.errors import InvalidRequest

__all__ = ["read_flag", "read_integer", "read_mapping", "read_number", "read_text", "read_texts", "shown", "wrong"]

T = TypeVar("T")

_MAX_SHOWN = 40


def shown(value: Any) -> str:
    """A short form of a JSON value for an error message; never larger than a line, whatever was sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "…")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def wrong(name: str, expected: str, value: Any) -> InvalidRequest:
    """The error of a field whose value does not fit."""
    return InvalidRequest(f"{name} must be {expected}, not {shown(value)}.", param=name)


def read_number(
    body: Mapping[str, Any], name: str, default: float, *, low: float, high: float, is_open: bool = False
) -> float:
    """A number from ``low`` (excluded if ``is_open``) to ``high``. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (is_open and value == low):
        edge = "above " if is_open else "from "
        raise wrong(name, f"a number {edge}{low:g} to {high:g}", value)
    return float(value)


def read_integer(body: Mapping[str, Any], name: str, default: T, *, low: int, high: int) -> int | T:
    """An integer from ``low`` to ``high``; ``3.0`` is one. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, f"an integer from {low} to {high}", value)
    return value


def read_flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """``true`` or ``false``. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def read_text(body: Mapping[str, Any], name: str) -> str | None:
    """A string that is not empty, or ``None`` if there is none. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise wrong(name, "a string that is not empty", value)
    return value


def read_mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; an empty one if there is none. Raises ``InvalidRequest``."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def read_texts(body: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """An object whose values are strings; an empty one if there is none. Raises ``InvalidRequest``."""
    texts = read_mapping(body, name)
    for key, value in texts.items():
        if not isinstance(value, str):
            raise wrong(name, "an object of strings", {key: value})
    return texts
