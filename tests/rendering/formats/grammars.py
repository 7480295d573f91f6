"""Strings that a grammar describes, and values that a schema describes: the reading of both that needs no engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, JsonText, MatchingRegex, OneOf, Repeated

__all__ = ["texts_of", "values_of"]

_FREE = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "</", "<", ">", "\n", " ", '"', "\\", "{", "é", "12"])
    | st.text(max_size=3),
    max_size=6,
).map("".join)
_SCALARS = {
    "string": st.text(max_size=6),
    "integer": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
}


def texts_of(grammar: Grammar) -> st.SearchStrategy[str]:  # noqa: PLR0911 - a line or two for each kind
    """All kinds of texts that match ``grammar``."""
    match grammar:
        case Exactly():
            return st.just(grammar.text)
        case JsonText():
            return st.builds(_spell, values_of(grammar.schema), is_compact=st.booleans())
        case MatchingRegex():
            return st.from_regex(re.compile(grammar.pattern), fullmatch=True)
        case FreeText():
            return _FREE.filter(lambda text: not any(tag in text for tag in grammar.excluding))
        case InOrder():
            return st.tuples(*map(texts_of, grammar.parts)).map("".join)
        case OneOf():
            return st.one_of(*map(texts_of, grammar.parts))
        case Repeated():
            least = grammar.at_least
            most = least + 2 if grammar.at_most is None else grammar.at_most
            return st.lists(texts_of(grammar.part), min_size=least, max_size=most).map(grammar.separator.join)
    raise TypeError(grammar)


def _spell(value: Any, *, is_compact: bool) -> str:
    """Two of the ways to write a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if is_compact else json.dumps(value)


def values_of(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Values that satisfy a schema, as far as tests need schemas."""
    root = schema if root is None else root
    if "$ref" in schema:
        return values_of(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    name = schema.get("type")
    if name == "object":
        return _objects(schema, root)
    if name == "array":
        return st.lists(values_of(schema.get("items", {}), root), max_size=2)
    choices = [values_of(part, root) for part in schema.get("anyOf", ())]
    return _SCALARS[name] if name else st.one_of(*(choices or _SCALARS.values()))


def _objects(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    known = {key: values_of(inner, root) for key, inner in schema.get("properties", {}).items()}
    required = {key: known[key] for key in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional={k: v for k, v in known.items() if k not in required})
