"""Reading, decoding and writing of calls in JSON, and of JSON in other formats.

The arguments of a call that is written as JSON keep the model's spelling. Text that is nested more deeply than any
template could print is not a call.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_actors.domain import Grammar, JsonText, OneOf, Repeated, Tool
from areal_actors.rendering.formats.reading import Call, NoCall, Reading, Source, check_name

__all__ = [
    "MAX_DEPTH",
    "decode_json",
    "decode_object",
    "encode_arguments",
    "format_signatures",
    "grammar_of_arguments",
    "grammar_of_calls",
    "is_json",
    "parse_call",
    "read_object",
]

MAX_DEPTH = 100
_BETWEEN = re.compile(r"[\s\d.,:+\-eEtrufalsn]*")
"""Everything in JSON outside of strings and brackets: numbers, ``true``, ``false``, ``null`` and punctuation."""
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')


def read_object(source: Source) -> Reading[str]:
    """Read a JSON object and return its text. Raises ``NoCall`` as soon as the text cannot be one."""
    yield from source.require("{")
    start, depth = source.at - 1, 1
    while depth:
        match (yield from source.next_char(behind=_BETWEEN)):
            case "{" | "[":
                depth += 1
            case "}" | "]":
                depth -= 1
            case '"':
                while (char := (yield from source.next_char(behind=_IN_STRING))) != '"':
                    if char != "\\":
                        raise NoCall
                    yield from source.next_char()
            case _:
                raise NoCall
    return source.text[start : source.at]


def parse_call(text: str, *, keys: Sequence[str] = ("arguments",), is_bare_allowed: bool = True) -> Call:
    """Return the call that a JSON object represents, with the arguments under one of ``keys`` as the model wrote them.

    Missing arguments are an empty object if ``is_bare_allowed``. If the arguments are a string, it must contain a JSON
    object, whose text is used.

    Raises:
        NoCall: the object does not represent a call.
    """
    values = decode_object(text)
    key = next((key for key in keys if key in values), None)
    if key is None and not is_bare_allowed:
        raise NoCall
    name = check_name(values.get("name"))
    if key is None:
        return Call(name=name, arguments="{}")
    value = values[key]
    if isinstance(value, str):
        decode_object(value)
        return Call(name=name, arguments=value)
    if not isinstance(value, dict):
        raise NoCall
    # The model's own text, whose last value under the key counts: encoding it again would change its spelling.
    arguments = ""
    at = _skip_space(text, _skip_space(text, 0) + 1)
    while text[at] != "}":
        found, at = _JSON.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = _JSON.raw_decode(text, start)
        arguments = text[start:end] if found == key else arguments
        at = _skip_space(text, end)
        at = _skip_space(text, at + 1) if text[at] == "," else at
    return Call(name=name, arguments=arguments)


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at


# --------------------------------------------------------------------------------------------- JSON, strictly


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number in JSON")
    return number


# Python accepts ``NaN``, ``Infinity`` and numbers that overflow to infinity, which JSON does not have.
_JSON = json.JSONDecoder(parse_constant=_parse_finite, parse_float=_parse_finite)


def decode_json(text: str) -> Any:
    """Return the value of strict JSON. Raises ``NoCall`` for any other text and for deep nesting."""
    try:
        value = _JSON.decode(text)
    except (ValueError, RecursionError):
        raise NoCall from None
    # Level by level instead of recursively, so that deep input cannot exceed the recursion limit.
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, dict | list) and item]
        if not nested:
            return value
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    raise NoCall


def decode_object(text: str) -> dict[str, Any]:
    """Return the value of ``text`` if it is a JSON object. Raises ``NoCall`` otherwise."""
    value = decode_json(text)
    if not isinstance(value, dict):
        raise NoCall
    return value


def is_json(text: str) -> bool:
    """Return whether ``text`` is strict JSON."""
    try:
        decode_json(text)
    except NoCall:
        return False
    return True


def encode_arguments(values: Mapping[str, Any]) -> str:
    """Return the JSON text of arguments that were not written as JSON.

    Lone surrogates, which UTF-8 cannot encode, are escaped. The text of fewer arguments is a beginning of the text of
    more, so that arguments can be emitted one by one.
    """
    pairs = (f"{_encode(key)}: {_encode(value)}" for key, value in values.items())
    return f"{{{', '.join(pairs)}}}"


def _encode(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def grammar_of_arguments(tool: Tool) -> JsonText:
    """Return the grammar of the arguments of ``tool`` as one JSON object that matches its schema."""
    return JsonText(schema={"type": "object", **tool.parameters}, is_strict=tool.is_strict)


def grammar_of_calls(parts: Iterable[Grammar], *, is_parallel: bool, separator: str = "\n") -> Grammar:
    """Return the grammar of one of ``parts``, or of several of them with ``separator`` between them."""
    return Repeated(part=OneOf(parts=tuple(parts)), at_most=None if is_parallel else 1, separator=separator)


def format_signatures(tools: Sequence[Tool]) -> str:
    """Return the tools as one JSON object per line."""
    signatures = ({"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools)
    return "\n".join(json.dumps(signature, ensure_ascii=False) for signature in signatures)
