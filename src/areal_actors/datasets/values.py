"""The values that a problem may have: those that reach an agent unchanged, in whichever process of a run it is.

They are checked once, when the problems are loaded. Numbers of numpy, dates, times and decimals become the JSON value
that stands for them; others, which a process could not send to another one, are refused by their path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from areal_actors.errors import DatasetError

_MAX_DEPTH = 128
"""Nesting that messages and copies of problems have the stack for."""


def plain_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``row`` with values that travel between processes and compare equal afterwards.

    Raises ``DatasetError``, naming ``where`` and the path in the row, for values that have no such form.
    """
    return {_key(key, where): _plain(value, where, (key,)) for key, value in row.items()}


def without_null_keys(value: Any) -> Any:
    """Return ``value`` without the keys of mappings in it that are null.

    In a table, all mappings of a column have the keys of all others, and null where they had no such key.
    """
    if isinstance(value, Mapping):
        return {key: without_null_keys(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return type(value)(map(without_null_keys, value))
    return value


def _plain(value: Any, where: str, path: tuple[Any, ...]) -> Any:
    if len(path) > _MAX_DEPTH:
        raise DatasetError(f"{where} is nested more than {_MAX_DEPTH} levels deep; flatten it.")
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(inner, where, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(inner, where, (*path, index)) for index, inner in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if value is None or type(value) in _SENT or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
        return value
    for kind, convert in _CONVERTED:
        if isinstance(value, kind):
            return convert(value)
    told = ".".join(map(str, path))
    raise DatasetError(
        f"{where} has a {type(value).__qualname__} in {told}, which cannot be sent to an agent in another process; use "
        "values of JSON, bytes, dates, or arrays of numbers."
    )


_SENT = (str, int, float, bool, bytes)
_CONVERTED: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (np.datetime64, str),
    (np.timedelta64, lambda value: float(value / np.timedelta64(1, "s"))),
    ((np.number, np.bool_, np.str_, np.bytes_), lambda value: value.item()),
    ((date, datetime, time), lambda value: value.isoformat()),
    (timedelta, timedelta.total_seconds),
    (Decimal, str),
    # Subclasses, such as members of an enumeration, arrive as what they are a kind of.
    (str, str.__str__),
    (int, int),
    (float, float),
    (bytes, bytes),
)
"""Functions that convert values of classes that do not travel to those of JSON; the first class that fits is used."""


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key)
    raise DatasetError(f"{where} has the key {key!r}; keys are text or integers.")
