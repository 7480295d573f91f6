"""Output formats and tool choices of all vendors, parsed into grammars and tool choices. Pure.

The dialects pass in the field unchanged: chat completions pass ``response_format`` and ``tool_choice``, Responses
passes ``text.format``, Messages passes ``output_config.format``. A format that two vendors write differently is
accepted in both notations everywhere; a format that cannot be honoured is rejected by name. The renderer decides what
the model writes around a call, and the engine how a grammar is enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from areal_actors.domain import Exactly, Grammar, JsonText, MatchingRegex, OneOf, Tool, ToolChoice
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.lib.exact_json import parse_json
from areal_actors.proxy.dialects.client_tools import OPENAI_TOOLS
from areal_actors.proxy.dialects.fields import (
    OBJECT,
    Field,
    JsonObject,
    Kind,
    honoured,
    optional_text,
    required_text,
    shown,
    unread,
    wrong,
)

_MAX_CHOICES = 4096
_NAMED = ("function", "tool", "custom")
"""The types of a tool choice that names a tool."""


# -------------------------------------------------------------------------------------------------- output formats


def parse_response_format(value: Any, param: str = "response_format") -> Grammar | None:
    """Return the grammar that the text must match, or ``None`` if it is free.

    Accepts ``{"type": "text"}``, ``{"type": "json_object"}`` (with ``schema``, as in some servers) and ``{"type":
    "json_schema"}`` with name, schema and strict in a ``json_schema`` object (chat completions) or next to the type
    (Responses, Messages). ``param`` is the field's name in errors.

    Raises:
        UnsupportedParameter: an unknown type.
        InvalidRequest: an invalid value.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(param, "an object", value)
    match value.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return JsonText(schema={"type": "object", **_schema(value.get("schema") or {}, f"{param}.schema")})
        case "json_schema":
            pass
        case kind:
            raise UnsupportedParameter(
                f"{param}.type must be text, json_object or json_schema, not {shown(kind)}.", param=param
            )
    where = param
    if "json_schema" in value:
        value, where = value["json_schema"], f"{param}.json_schema"
        if not isinstance(value, dict):
            raise wrong(where, "an object", value)
    strict = value.get("strict")
    if not isinstance(strict, bool | None):
        raise wrong(f"{where}.strict", "true or false", strict)
    schema = value.get("schema")
    if schema is None:
        raise InvalidRequest(f"{where} needs a schema; or ask for json_object.", param=param)
    return JsonText(schema=_schema(schema, f"{where}.schema"), is_strict=bool(strict))


def _schema(value: Any, param: str) -> JsonObject:
    """Return a JSON schema that was given as an object or as its text."""
    if isinstance(value, str):
        value = parse_json(value.encode(), param, param=param)
    if not isinstance(value, dict):
        raise wrong(param, "a JSON schema", value)
    return value


RESPONSE_FORMAT: Kind[Grammar | None] = Kind(OBJECT.schema, parse_response_format)


# -------------------------------------------------------------------------------------- extensions of other servers


def _parse_guided_json(value: Any, param: str) -> Grammar:
    return JsonText(schema=_schema(value, param))


def _parse_regex(value: Any, param: str) -> Grammar:
    if not isinstance(value, str):
        raise wrong(param, "a regular expression", value)
    return MatchingRegex(pattern=value)


def _parse_choice(value: Any, param: str) -> Grammar:
    is_valid = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    if not is_valid or not 0 < len(value) <= _MAX_CHOICES:
        raise wrong(param, f"a list of 1 to {_MAX_CHOICES} strings, none of them empty", value)
    return OneOf(parts=tuple(Exactly(text=text) for text in dict.fromkeys(value)))


def _parse_structured_outputs(value: Any, param: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise wrong(param, "an object", value)
    asked = {name: form for name, form in value.items() if form not in (None, False)}
    if len(asked) > 1:
        raise InvalidRequest(f"{param} has {' and '.join(asked)}; give one of them.", param=param)
    for name, form in asked.items():
        if name == "json_object":
            return JsonText(schema={"type": "object"})
        if name not in _STRUCTURED:
            raise UnsupportedParameter(f"{param}.{name} is not supported; use json, regex or choice.", param=param)
        return _STRUCTURED[name](form, f"{param}.{name}")
    return None


_STRUCTURED: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _parse_guided_json,
    "regex": _parse_regex,
    "choice": _parse_choice,
}

_JSON = Kind({"type": ["object", "string", "null"]}, _parse_guided_json, is_raw=True)
_REGEX = Kind({"type": ["string", "null"]}, _parse_regex)
_CHOICE = Kind(
    {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": _MAX_CHOICES},
    _parse_choice,
)
EXTENSIONS: tuple[Field, ...] = (
    honoured("guided_json", _JSON, "a schema or its text; vLLM's name of response_format"),
    honoured("guided_regex", _REGEX, "without look-around and back-references"),
    honoured("guided_choice", _CHOICE, "the texts of which the answer is one"),
    honoured(
        "structured_outputs",
        Kind(OBJECT.schema, _parse_structured_outputs),
        "one of json, json_object, regex and choice",
    ),
    honoured("json_schema", _JSON, "SGLang's name of guided_json"),
    honoured("regex", _REGEX, "SGLang's name of guided_regex"),
)
"""Fields that vLLM and SGLang add to OpenAI's. Fields that no grammar here can express are refused by name."""


# ------------------------------------------------------------------------------------------------------------ tools


def parse_tool(function: JsonObject, where: str, *, schema: str, needs_schema: bool = False) -> Tool:
    """Return the function that ``function`` describes; ``schema`` is the vendor's name for its parameters.

    Raises:
        InvalidRequest: an invalid value; the error names it.
    """
    name, description = required_text(function, "name", where), optional_text(function, "description", where)
    parameters, strict = function.get(schema), function.get("strict")
    if not isinstance(parameters, dict) and (needs_schema or parameters is not None):
        raise wrong(f"{where}.{schema}", "a JSON schema", parameters)
    if not isinstance(strict, bool | None):
        raise wrong(f"{where}.strict", "true or false", strict)
    return Tool(name=name, description=description or "", parameters=parameters or {}, is_strict=bool(strict))


def require_distinct(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Return the offered functions. Raises ``InvalidRequest`` if two of them have one name."""
    offered = tuple(tools)
    if len({tool.name for tool in offered}) < len(offered):
        raise InvalidRequest("tools has two functions of one name; the model could not tell them apart.", param="tools")
    return offered


TOOL_CHOICE = unread({"type": ["string", "object", "null"]})
"""``parse_tool_choice`` needs the tools as well."""


@frozen(kw_only=True)
class ToolSelection:
    """The tools that may be called, and the tool choice. Both are passed to ``CompletionRequest`` unchanged."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice | str = ToolChoice.AUTO


def parse_tool_choice(value: Any, tools: Sequence[Tool], *, param: str = "tool_choice") -> ToolSelection:
    """Return which of ``tools`` may or must be called.

    Accepts ``auto``, ``none`` and ``required`` (also ``any``), as a word or as the type of an object (Messages); a tool
    named in ``function`` or ``custom`` (chat completions) or next to the type (Responses, and Messages with ``tool``);
    the type of a tool that needs no name (Responses); and ``allowed_tools`` in both of OpenAI's notations, which leaves
    the tools that are not allowed out of the prompt.

    Raises:
        UnsupportedParameter: a tool that is not a function.
        InvalidRequest: an invalid value, or a function that is not among ``tools``.
    """
    tools = tuple(tools)
    if not isinstance(value, dict):
        return ToolSelection(tools=tools, choice=_parse_word("auto" if value is None else value, tools, param))
    match value.get("type"):
        case kind if kind in _NAMED or (isinstance(kind, str) and kind in OPENAI_TOOLS):
            name = _find(value, tools, param).name
            # ``ToolSelection.choice`` is either a ``ToolChoice`` or a name; a tool called ``auto`` would be ambiguous.
            if name in set(ToolChoice):
                raise InvalidRequest(
                    f"{param} names {shown(name)}, which is a choice of its own; rename the tool.", param=param
                )
            return ToolSelection(tools=tools, choice=name)
        case "allowed_tools":
            where, allowed = f"{param}.allowed_tools", value.get("allowed_tools", value)
            if not isinstance(allowed, dict):
                raise wrong(where, "an object", allowed)
            mode, named = allowed.get("mode", "auto"), allowed.get("tools")
            if mode not in ("auto", "required"):
                raise wrong(f"{where}.mode", "auto or required", mode)
            if not isinstance(named, list) or not named:
                raise wrong(f"{where}.tools", "a list of at least one tool", named)
            names = {_find(each, tools, f"{where}.tools[{index}]").name for index, each in enumerate(named)}
            kept = tuple(tool for tool in tools if tool.name in names)
            return ToolSelection(tools=kept, choice=ToolChoice(mode))
        case "auto" | "none" | "any" | "required" as word:
            return ToolSelection(tools=tools, choice=_parse_word(word, tools, param))
        case kind:
            raise UnsupportedParameter(
                f"{param} is of type {shown(kind)}; only tools that your client runs are known.", param=param
            )


def _parse_word(value: Any, tools: Sequence[Tool], param: str) -> ToolChoice:
    match value:
        case "auto":
            return ToolChoice.AUTO
        case "none":
            return ToolChoice.NONE
        case "required" | "any":
            if not tools:
                raise InvalidRequest(f"{param} is {value}, but there are no tools; send some.", param=param)
            return ToolChoice.REQUIRED
        case _:
            raise wrong(param, "auto, none, required or an object that names a function", value)


def _find(value: Any, tools: Sequence[Tool], param: str) -> Tool:
    """Return the tool that ``value`` names, in ``function`` or next to the type."""
    if not isinstance(value, dict):
        raise wrong(param, "an object that names a function", value)
    function = value.get("function", value.get("custom", value))
    name = function.get("name") if isinstance(function, dict) else None
    typed = OPENAI_TOOLS.get(kind) if isinstance(kind := value.get("type"), str) else None
    if name is None and typed is not None:
        # A tool that its type describes needs no name.
        name = typed.name
    if not isinstance(name, str) or not name:
        raise wrong(f"{param}.function.name", "the name of a function", name)
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequest(f"{param} names {shown(name)}, which is not among the tools.", param=param)
