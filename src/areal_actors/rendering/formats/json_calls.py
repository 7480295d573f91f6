"""Reading, decoding and writing of calls in JSON, and of JSON in other formats.

The arguments of a call that is written as JSON keep the model's spelling. Text that is nested more deeply than any
template could print is not a call.

Models write the arguments under the key of whatever API they have seen most, so all of these keys are read in every
family. An object that has other data instead, or arguments under two keys, is not a call.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from areal_actors.domain import JsonText, Tool
from areal_actors.lib.json_prefix import MAX_DEPTH, MAX_DIGITS, mend_surrogates
from areal_actors.rendering.formats.reading import ARGUMENT_KEYS, Call, NoCall, Reading, Source, check_name

_OTHER_KEYS = frozenset({"name", "id", "type", "index"})
"""Keys of a call that has no arguments."""
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


def parse_call(text: str, *, is_bare_allowed: bool = True) -> Call:
    """Return the call that a JSON object represents, with the arguments as the model wrote them.

    Without arguments and any other data, they are an empty object if ``is_bare_allowed``. If the arguments are a
    string, it must contain a JSON object, whose text is used. OpenAI's nested form is read as well, which has name and
    arguments under ``function``.

    Raises:
        NoCall: the object does not represent a call.
    """
    # The arguments may be as deep as they may be without the object around them.
    values, pairs = decode_object(text, max_depth=MAX_DEPTH + 1), _read_pairs(text)
    if len(values) < len(pairs):
        raise NoCall
    texts = dict(pairs)
    if isinstance(values.get("function"), dict) and values.keys() <= {"function", *_OTHER_KEYS} - {"name"}:
        return parse_call(texts["function"], is_bare_allowed=is_bare_allowed)
    name = check_name(values.get("name", values.get("tool_name")))
    keys = [key for key in ARGUMENT_KEYS if key in values]
    if not keys and is_bare_allowed and values.keys() <= _OTHER_KEYS:
        return Call(name=name, arguments="{}")
    if len(keys) != 1:
        raise NoCall
    value = values[keys[0]]
    if isinstance(value, str):
        decode_object(value)
        return Call(name=name, arguments=value)
    if not isinstance(value, dict):
        raise NoCall
    return Call(name=name, arguments=texts[keys[0]])


def _read_pairs(text: str) -> list[tuple[str, str]]:
    """Return the keys of an object, each with the text of its value: encoding it again would change its spelling."""
    pairs: list[tuple[str, str]] = []
    at = _skip_space(text, _skip_space(text, 0) + 1)
    while text[at] != "}":
        key, at = _JSON.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = _JSON.raw_decode(text, start)
        pairs.append((key, text[start:end]))
        at = _skip_space(text, end)
        at = _skip_space(text, at + 1) if text[at] == "," else at
    return pairs


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at


# --------------------------------------------------------------------------------------------- JSON, strictly


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or len(text) > MAX_DIGITS:
        raise ValueError(f"{text} is not a number in JSON")
    return number


def _parse_int(text: str) -> int:
    # Some readers refuse an integer that is infinite as a float.
    _parse_finite(text)
    return int(text)


# Python accepts ``NaN``, ``Infinity`` and numbers that overflow to infinity, which JSON does not have.
_JSON = json.JSONDecoder(parse_constant=_parse_finite, parse_float=_parse_finite, parse_int=_parse_int)


def decode_json(text: str, *, max_depth: int = MAX_DEPTH) -> object:
    """Return the value of strict JSON. Raises ``NoCall`` for any other text and for deep nesting.

    An object is accepted if and only if ``JsonPrefix`` finds it complete, so that a call which is read while it is
    written is the same call.
    """
    try:
        value = _JSON.decode(text)
    except (ValueError, RecursionError):
        raise NoCall from None
    # Level by level instead of recursively, so that deep input cannot exceed the recursion limit.
    level = [value]
    for _ in range(max_depth + 1):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return value
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    raise NoCall


def decode_object(text: str, *, max_depth: int = MAX_DEPTH) -> dict[str, object]:
    """Return the value of ``text`` if it is a JSON object. Raises ``NoCall`` otherwise."""
    value = decode_json(text, max_depth=max_depth)
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


def encode_arguments(values: Mapping[str, object]) -> str:
    """Return the JSON text of arguments that were not written as JSON.

    The text of fewer arguments is a beginning of the text of more, so that arguments can be emitted one by one.
    """
    pairs = (f"{json.dumps(k, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}" for k, v in values.items())
    return mend_surrogates(f"{{{', '.join(pairs)}}}")


def grammar_of_arguments(tool: Tool) -> JsonText:
    """Return the grammar of the arguments of ``tool`` as one JSON object that matches its schema."""
    return JsonText(schema={"type": "object", **tool.parameters}, is_strict=tool.is_strict)
