"""Values of a request or a configuration in error messages: never longer than a line, whatever was sent."""

from __future__ import annotations

from collections.abc import Mapping


def show_value(value: object, *, limit: int, mapping: str = "an object") -> str:
    """Return a short form of a JSON or YAML value: ``limit`` characters of it, or ``mapping`` for one."""
    if isinstance(value, str):
        return repr(_cut(value, limit))
    if isinstance(value, Mapping):
        return mapping
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else _cut(str(value), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
