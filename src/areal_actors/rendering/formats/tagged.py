"""Formats that write values between tags, without their type: a tool's JSON schema says how to read them.

::

    <tool_call>                      <tool_call>f
    <function=f>                     <arg_key>a</arg_key>
    <parameter=a>                    <arg_value>text</arg_value>
    text                             </tool_call>
    </parameter>
    </function>                      GLM-4.5; 4.6 and 4.7 omit the line breaks
    </tool_call>

    Qwen3-Coder, Qwen3.5, Nemotron 3

    <minimax:tool_call>              <｜DSML｜tool_calls>
    <invoke name="f">                <｜DSML｜invoke name="f">
    <parameter name="a">text         <｜DSML｜parameter name="a" string="true">text
    </parameter>                     </｜DSML｜parameter>
    </invoke>                        </｜DSML｜invoke>
    </minimax:tool_call>             </｜DSML｜tool_calls>

    MiniMax-M2                       DeepSeek V3.2 (``function_calls``) and V4

A value ends at a closing tag that is followed by another parameter or by the end of the call, so that code which
contains such tags can be passed. The last closing tag may be missing at the end of an answer.

If the schema says that a value is text, the text is used unchanged. Other values are JSON, or Python's names of
constants, which some templates produce. A value that is neither stays text; the tool has to decide whether it is
acceptable.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from attrs import evolve, frozen

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, JsonText, OneOf, Repeated, Tool, ToolCall
from areal_actors.rendering.formats.base import ToolFormat, format_signatures, grammar_of_calls
from areal_actors.rendering.formats.json_calls import decode_json, decode_object, encode_arguments
from areal_actors.rendering.formats.reading import Call, CallSyntax, NoCall, Reading, Source, check_name, drop

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

    def __init__(self, schema: object, root: Mapping[str, object], *, is_strict: bool = False) -> None:
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
    def choices(self) -> Sequence[object] | None:
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


def _resolve(schema: Mapping[str, object], root: Mapping[str, object]) -> Mapping[str, object]:
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: object = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        schema = found if isinstance(found, Mapping) else {}
    return {}


def _types_of(schema: Mapping[str, object], root: Mapping[str, object]) -> frozenset[str]:
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
        named = part.get("type")
        listed = [part["const"]] if "const" in part else _sequence(part.get("enum"))
        if named:
            types |= frozenset([named] if isinstance(named, str) else map(str, _sequence(named)))
        elif own := frozenset(name for value in listed for name in _types_of_value(value)):
            types |= own
        elif choices:
            waiting += choices
        else:
            types |= _ALL_TYPES
    return types


def _types_of_value(value: object) -> frozenset[str]:
    # JSON Schema counts ``1.0`` as an integer.
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    return _TYPES.get(type(value), frozenset())


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


# ---------------------------------------------------------------------------------------- reading and writing


def read_value(text: str, parameter: Parameter | None) -> object:
    """Return the value that ``text`` represents. Without known types, it is parsed as JSON if possible."""
    types = parameter.types if parameter else _ALL_TYPES
    if types == {"string"}:
        return text
    bare = text.strip()
    try:
        value = _PYTHON_NAMES[bare] if bare in _PYTHON_NAMES else decode_json(text)
    except NoCall:
        return text if types & {"string"} else _read_literal(bare)
    # Without a schema, a value that parses as JSON is taken as such.
    if "string" not in types or types == _ALL_TYPES:
        return value
    return value if types & (_types_of_value(value) - {"string"}) else text


def _read_literal(text: str) -> object:
    """Return the list or dictionary that ``text`` is in Python syntax, as some templates show them, else ``text``."""
    try:
        value = ast.literal_eval(text)
        # What JSON cannot express stays text.
        return decode_json(json.dumps(value, allow_nan=False)) if isinstance(value, list | dict) else text
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, NoCall):
        return text


def format_value(value: object) -> str:
    """Return text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def values_of(arguments: str) -> Mapping[str, object]:
    """Return the arguments of a call as a mapping.

    Text that is not a JSON object becomes one argument named ``arguments``.
    """
    try:
        return decode_object(arguments)
    except NoCall:
        return {"arguments": arguments}


# --------------------------------------------------------------------------------- formats with values in tags


@frozen(kw_only=True, eq=False)
class TaggedFormat(ToolFormat):
    """Calls with each value between tags: the texts that are written around names and values.

    Line breaks in these texts are written, and may be missing where a call is read; those next to a value belong to the
    format. ``name`` and ``key`` match the names of a tool and of a parameter.
    """

    markers: tuple[str, ...]
    signs: tuple[str, ...]
    before_name: str
    after_name: str
    before_key: str
    between: str
    """The text between the name of a parameter and its value. TYPE in it says whether the value is text."""
    after_value: str
    closing: str
    """The text after the last value."""
    name: re.Pattern[str]
    key: re.Pattern[str]
    foreign_signs: tuple[str, ...] = ()
    opening: str = ""
    ending: str = ""
    """The tags around all calls of an answer."""

    def syntax_for(self, tools: Sequence[Tool]) -> CallSyntax:
        """See ``ToolFormat.syntax_for``; the types of values come from ``tools``."""
        first, *_ = self.before_name.split()
        read = partial(self._read, tools=tools)
        if not self.opening:
            return CallSyntax(anywhere={first: read})
        tag, end = self.opening.strip(), self.ending.strip()
        return CallSyntax(anywhere={tag: partial(read, opening=tag)}, after_call={first: read, end: drop(end)})

    def _read(self, source: Source, tools: Sequence[Tool], opening: str = "") -> Reading[tuple[Call, ...]]:
        yield from _require_all(source, f"{opening} {self.before_name}")
        name = check_name((yield from source.match(self.name)).strip())
        yield from _require_all(source, self.after_name)
        known = parameters_of(tools, name)
        *inner, last = self.closing.split()
        end_value, next_tags = self.after_value.strip(), (self.before_key, self.closing.split()[0])
        values: dict[str, object] = {}
        if (yield from source.sees(self.before_key)):
            source.begin_call(name, arguments="{")
        while (yield from source.expect(self.before_key)):
            key = check_name((yield from source.match(self.key)).strip())
            before, declared, after = self.between.partition("TYPE")
            yield from _require_all(source, before)
            is_text = declared and (yield from source.require("true", "false")) == "true"
            yield from _require_all(source, after)
            text = yield from source.until(end_value, before=next_tags)
            if key in values:
                raise NoCall
            if self.after_value.startswith("\n"):
                text = text.removeprefix("\n").removesuffix("\n")
            values[key] = text if is_text else read_value(text, None if declared else known.get(key))
            source.begin_call(name, arguments=encode_arguments(values)[:-1])
        yield from _require_all(source, " ".join(inner))
        is_closed = yield from source.expect(last)
        # A name alone, with nothing after it, may be any text.
        if not is_closed and not (source.is_at_end and (values or inner)):
            raise NoCall
        return (Call(name=name, arguments=encode_arguments(values)),)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls, with parameters in the order of the schema.

        Parameters that are not required may be missing. Text may not contain what follows a value, and must be one of
        its choices, if there are any; every other value is JSON that matches its schema.
        """

        def create_call(tool: Tool) -> Grammar:
            before = Exactly(text=f"{self.before_name}{tool.name}{self.after_name}")
            required = tool.parameters.get("required")
            needed = frozenset(map(str, required)) if isinstance(required, Iterable) else frozenset()
            parts: list[Grammar] = []
            for name, parameter in parameters_of([tool], tool.name).items():
                value: Grammar = InOrder(parts=(self._between(is_text=False), parameter.json_text))
                if parameter.choices:
                    value = OneOf(
                        parts=tuple(
                            InOrder(parts=(self._between(is_text=isinstance(c, str)), Exactly(text=format_value(c))))
                            for c in parameter.choices
                        )
                    )
                elif "string" in parameter.types and parameter.types != _ALL_TYPES:
                    text = FreeText(excluding=(self.after_value.strip(),))
                    value = InOrder(parts=(self._between(is_text=True), text))
                key = Exactly(text=f"{self.before_key}{name}")
                part = InOrder(parts=(key, value, Exactly(text=self.after_value)))
                parts.append(part if name in needed else Repeated(part=part, at_least=0, at_most=1))
            return InOrder(parts=(before, InOrder(parts=tuple(parts)), Exactly(text=self.closing)))

        calls = grammar_of_calls(map(create_call, tools), is_parallel=is_parallel)
        if not self.opening:
            return calls
        return InOrder(parts=(Exactly(text=self.opening), calls, Exactly(text=self.ending)))

    def _between(self, *, is_text: bool) -> Exactly:
        return Exactly(text=self.between.replace("TYPE", str(is_text).lower()))

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools as one JSON object per line, and instructions for calling one."""
        return (
            f"You may call these tools:\n<tools>\n{format_signatures(tools)}\n</tools>\n"
            f"To call one, write:\n{self._write('tool_name', {'name': 'value'})}\n"
            "Text stands without quotes, everything else as JSON."
        )

    def format_call(self, call: ToolCall) -> str:
        """Return name and arguments in the family's tags."""
        return self._write(call.name, values_of(call.arguments))

    def _write(self, name: str, values: Mapping[str, object]) -> str:
        written = "".join(
            f"{self.before_key}{key}{self._between(is_text=isinstance(value, str)).text}{format_value(value)}"
            f"{self.after_value}"
            for key, value in values.items()
        )
        return f"{self.opening}{self.before_name}{name}{self.after_name}{written}{self.closing}{self.ending}"


def _require_all(source: Source, tags: str) -> Reading[None]:
    for tag in tags.split():
        yield from source.require(tag)


QWEN_CODER = TaggedFormat(
    markers=("<tool_call>", "</tool_call>"),
    signs=("<tool_call>", "<function=", "<parameter="),
    before_name="<tool_call>\n<function=",
    after_name=">\n",
    before_key="<parameter=",
    between=">\n",
    after_value="\n</parameter>\n",
    closing="</function>\n</tool_call>",
    name=re.compile(r"[^<>\n]*"),
    key=re.compile(r"[^<>\n]*"),
)
GLM = TaggedFormat(
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    before_name="<tool_call>",
    after_name="\n",
    before_key="<arg_key>",
    between="</arg_key>\n<arg_value>",
    after_value="</arg_value>\n",
    closing="</tool_call>",
    name=re.compile(r"[\w.:/-]*"),
    key=re.compile(r"[^<\n]*"),
)
SEED = TaggedFormat(
    markers=("<seed:tool_call>", "</seed:tool_call>"),
    signs=("<seed:tool_call>", "<function=", "<parameter="),
    before_name="<seed:tool_call>\n<function=",
    after_name=">\n",
    before_key="<parameter=",
    between=">",
    after_value="</parameter>\n",
    closing="</function>\n</seed:tool_call>",
    name=re.compile(r"[^<>\n]*"),
    key=re.compile(r"[^<>\n]*"),
)
MINIMAX = TaggedFormat(
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    signs=("<minimax:tool_call>", "<invoke name="),
    opening="<minimax:tool_call>\n",
    before_name='<invoke name="',
    after_name='">\n',
    before_key='<parameter name="',
    between='">',
    after_value="</parameter>\n",
    closing="</invoke>",
    ending="\n</minimax:tool_call>",
    name=re.compile(r'[^"<>\n]*'),
    key=re.compile(r'[^"<>\n]*'),
)
DEEPSEEK_V4 = TaggedFormat(
    markers=("｜DSML｜",),
    signs=("｜DSML｜", "tool_calls>"),
    foreign_signs=("function_calls>",),
    opening="<｜DSML｜tool_calls>\n",
    before_name='<｜DSML｜invoke name="',
    after_name='">\n',
    before_key='<｜DSML｜parameter name="',
    between='" string="TYPE">',
    after_value="</｜DSML｜parameter>\n",
    closing="</｜DSML｜invoke>",
    ending="\n</｜DSML｜tool_calls>",
    name=re.compile(r'[^"<>\n]*'),
    key=re.compile(r'[^"<>\n]*'),
)
DEEPSEEK_V3_2 = evolve(
    DEEPSEEK_V4,
    signs=("｜DSML｜", "function_calls>"),
    foreign_signs=(),
    opening="<｜DSML｜function_calls>\n",
    ending="\n</｜DSML｜function_calls>",
)
