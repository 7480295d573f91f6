"""JSON in which nothing changes: integers of any size keep their digits, and every text can be encoded.

orjson reads an integer of more than 64 bits as the nearest float and refuses to write it, and it refuses to write half
of a surrogate pair, which UTF-8 cannot encode. Both occur: models copy identifiers of twenty digits, and programs cut
texts within a character.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from areal_actors.errors import InvalidRequest

_LONG = b"0" * 19
"""Every integer of more than 64 bits has at least so many digits."""
_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_SURROGATE = re.compile("[\ud800-\udfff]")
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
_MAX_DEPTH = 128
"""Maximum nesting of objects and lists in a request.

JSON writers fail soon after 250 levels, and parsed values are written again.
"""


def load_json(text: bytes) -> Any:
    """Return the value of strict JSON, with its integers as they are.

    Raises:
        orjson.JSONDecodeError: ``text`` is not JSON, or contains half of a surrogate pair or a number that overflows to
            infinity.
        RecursionError: it has a long integer, and is nested too deep for Python's parser.
    """
    value = orjson.loads(text)
    # Python's parser takes five times as long. Translating and searching takes a tenth of orjson's time.
    return json.loads(text) if _LONG in text.translate(_DIGITS) else value


def parse_json(text: bytes, what: str, *, param: str | None = None) -> Any:
    """Parse ``text``, with integers of any size as they are; errors refer to it as ``what``.

    Raises:
        InvalidRequest: it is not valid JSON, or nested too deeply to be written again.
    """
    try:
        value = load_json(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error.msg} (line {error.lineno}).", param=param) from None
    except RecursionError:
        raise _too_deep(what, param) from None
    # Counting brackets is fast, and most bodies have fewer of them than the limit, so the value is rarely walked.
    depth, level = 0, [value] if text.count(b"{") + text.count(b"[") > _MAX_DEPTH else []
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise _too_deep(what, param)
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return value


def _too_deep(what: str, param: str | None) -> InvalidRequest:
    return InvalidRequest(f"{what} is nested more than {_MAX_DEPTH} levels deep; flatten it.", param=param)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``; an empty one for an empty body.

    Raises ``InvalidRequest`` for anything else.
    """
    if not body:
        return {}
    value = parse_json(body, "The body")
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def dump_json(value: object) -> bytes:
    """Return ``value`` as JSON: integers of any size, numpy's arrays as lists, NaN and the infinities as ``null``.

    Half of a surrogate pair becomes U+FFFD.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return orjson.dumps(_encodable(value), option=orjson.OPT_SERIALIZE_NUMPY)


def _encodable(value: object) -> Any:
    """Return ``value`` with what orjson refuses to write in a form that it writes."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(inner) for inner in value]
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        return orjson.Fragment(str(value).encode())
    return value


def replace_surrogates(text: str) -> str:
    """Return ``text`` with U+FFFD in the place of every half of a surrogate pair, so that UTF-8 can encode it."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
