"""Values between tags: uses a tool's JSON schema to interpret text that does not show its own type.

If the schema says that a value is text, the text is used unchanged. Other values are JSON, or Python's names of
constants, which some templates produce. A value that is neither stays text; the tool has to decide whether it is
acceptable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, JsonText, OneOf, Repeated, Tool
from areal_actors.rendering.formats.json_calls import decode_json, decode_object
from areal_actors.rendering.formats.reading import NoCall

__all__ = ["Parameter", "describe_parameters", "format_value", "parameters_of", "read_value", "values_of"]

_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_PYTHON_NAMES = {"True": True, "False": False, "None": None}
_TYPES: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
_CHOICES = ("anyOf", "oneOf", "allOf")
_MAX_REFERENCES = 20
"""Limit of chained references; a schema that exceeds it may be cyclic."""


class Parameter:
    """One parameter of a tool: its schema, and the tool's schema, to which references point."""

    def __init__(self, schema: object, root: Mapping[str, Any], *, is_strict: bool = False) -> None:
        self._root = root
        self._is_strict = is_strict
        self._given = schema if isinstance(schema, Mapping) else {}
        self.schema = _resolve(self._given, root)
        self.types = _types_of(self.schema, root)

    @property
    def json_text(self) -> JsonText:
        """The grammar of its values as JSON that matches the schema and the definitions that it may refer to."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return JsonText(schema={**definitions, **self._given}, is_strict=self._is_strict)

    @property
    def choices(self) -> Sequence[Any] | None:
        """The permitted values, if the schema lists them; otherwise ``None``."""
        if "const" in self.schema:
            return (self.schema["const"],)
        return _sequence(self.schema.get("enum")) or None


def parameters_of(tools: Sequence[Tool], name: str) -> Mapping[str, Parameter]:
    """Return the parameters of the tool ``name`` by name; empty if the tool was not offered."""
    tool = next((tool for tool in tools if tool.name == name), None)
    properties = {} if tool is None else tool.parameters.get("properties")
    if tool is None or not isinstance(properties, Mapping):
        return {}
    return {
        str(key): Parameter(schema, tool.parameters, is_strict=tool.is_strict) for key, schema in properties.items()
    }


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        schema = found if isinstance(found, Mapping) else {}
    return {}


def _types_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that values may have, as far as the schema says. No part of the schema is visited twice."""
    types: frozenset[str] = frozenset()
    waiting, seen = [schema], set[int]()
    while waiting:
        part = _resolve(waiting.pop(), root)
        # References can form cycles.
        if id(part) in seen:
            continue
        seen.add(id(part))
        choices = [inner for key in _CHOICES for inner in _sequence(part.get(key)) if isinstance(inner, Mapping)]
        own = _own_types(part)
        if own is None and choices:
            waiting += choices
        else:
            types |= _ALL_TYPES if own is None else own
    return types


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names itself, or those of the values that it lists; ``None`` if neither."""
    named = schema.get("type")
    if named:
        return frozenset([named] if isinstance(named, str) else map(str, _sequence(named)))
    listed = [schema["const"]] if "const" in schema else _sequence(schema.get("enum"))
    return frozenset(name for value in listed for name in _types_of_value(value)) or None


def _types_of_value(value: object) -> frozenset[str]:
    # JSON Schema counts ``1.0`` as an integer.
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    return _TYPES.get(type(value), frozenset())


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


# ---------------------------------------------------------------------------------------- reading and writing


def read_value(text: str, parameter: Parameter | None) -> Any:
    """Return the value that ``text`` represents. Without known types, it is parsed as JSON if possible."""
    types = parameter.types if parameter else _ALL_TYPES
    if types == {"string"}:
        return text
    bare = text.strip()
    try:
        value = _PYTHON_NAMES[bare] if bare in _PYTHON_NAMES else decode_json(text)
    except NoCall:
        return text
    # Without a schema, a value that parses as JSON is taken as such.
    if "string" not in types or types == _ALL_TYPES:
        return value
    return value if types & (_types_of_value(value) - {"string"}) else text


def format_value(value: object) -> str:
    """Return text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def values_of(arguments: str) -> Mapping[str, Any]:
    """Return the arguments of a call as a mapping.

    Text that is not a JSON object becomes one argument named ``arguments``.
    """
    try:
        return decode_object(arguments)
    except NoCall:
        return {"arguments": arguments}


# -------------------------------------------------------------------------------------------------- grammars


def describe_parameters(tool: Tool, *, before: str, between: str, after: str) -> Grammar:
    """Return the grammar of all parameters in order, each as ``before`` name ``between`` value ``after``.

    Parameters that are not required may be missing. Text may not contain ``after`` and must be one of its choices, if
    there are any; every other value is JSON that matches its schema.
    """
    known = parameters_of([tool], tool.name)
    required = tool.parameters.get("required")
    needed = frozenset(map(str, required)) if isinstance(required, Iterable) else frozenset()
    parts: list[Grammar] = []
    for name, parameter in known.items():
        value = _describe_value(parameter, end=after.strip())
        part = InOrder(parts=(Exactly(text=f"{before}{name}{between}"), value, Exactly(text=after)))
        parts.append(part if name in needed else Repeated(part=part, at_least=0, at_most=1))
    return InOrder(parts=tuple(parts))


def _describe_value(parameter: Parameter, *, end: str) -> Grammar:
    if parameter.choices:
        return OneOf(parts=tuple(Exactly(text=format_value(choice)) for choice in parameter.choices))
    if "string" in parameter.types and parameter.types != _ALL_TYPES:
        return FreeText(excluding=(end,))
    return parameter.json_text
