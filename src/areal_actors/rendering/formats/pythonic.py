"""Calls with literals: in Python syntax, ``[get_weather(city="Paris"), f(x=1)]``, and as Gemma 4 writes them.

The pythonic format is written by Llama 3.2, Llama 4, ToolACE and LFM2. The list is recognised at the beginning of an
answer, after another list, and anywhere between the tags that some of these models have. Arguments are named and are
literals: text, numbers, constants, lists and dictionaries; nothing is evaluated. Names that Python does not allow
(``get-weather``, ``from``) and the constants of JSON are accepted, because tools are described in JSON.

Gemma 4 writes ``<|tool_call>call:f{city:<|"|>Paris<|"|>,x:1}<tool_call|>``: keys without quotes, a token as the quote.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, OneOf, Repeated, Tool, ToolCall
from areal_actors.lib.json_prefix import MAX_DEPTH
from areal_actors.rendering.formats.base import ToolFormat, format_signatures, grammar_of_calls
from areal_actors.rendering.formats.json_calls import encode_arguments
from areal_actors.rendering.formats.reading import (
    Call,
    CallSyntax,
    NoCall,
    Reading,
    Source,
    check_name,
    drop,
    read_items,
)
from areal_actors.rendering.formats.tagged import Parameter, parameters_of, values_of

_TAGS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_SIGNS = ("(params_name1=", "<|tool_call_start|>", "<|tool_list_start|>")
_NAME = re.compile(r"[\w.-]*")
_WORD = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"[+-]?(?:(?P<whole>0|[1-9]\d*)|\d+\.\d*|\.\d+)(?P<exponent>[eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class Pythonic(ToolFormat):
    """The pythonic format.

    Calls are emitted when the list is complete: one invalid element makes the whole list content.
    """

    markers = (*_TAGS, *_TAGS.values())
    result_tags = None

    def matches_template(self, template: str) -> bool:
        """Return whether the template shows such a list, or has the tags of LFM2.

        The tags of Llama 4 are not a criterion, because its templates also use them around JSON.
        """
        return any(sign in template for sign in _SIGNS)

    def syntax_for(self, tools: Sequence[Tool]) -> CallSyntax:  # noqa: ARG002 - literals have types
        """See ``ToolFormat.syntax_for``."""
        return _SYNTAX

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of a list of calls, with arguments in the order of the schema, required ones first."""
        calls = grammar_of_calls(map(_grammar_of_call, tools), is_parallel=is_parallel, separator=", ")
        return InOrder(parts=(Exactly(text="["), calls, Exactly(text="]")))

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools as one JSON object per line, and instructions for calling one."""
        return (
            f"You may call these tools:\n{format_signatures(tools)}\n"
            "To call some, answer with nothing but a list of calls in Python: "
            '[tool_name(argument="value"), other_tool(argument=1)]'
        )

    def format_call(self, call: ToolCall) -> str:
        """Return a list with one call. Arguments whose names are not identifiers are unpacked from a dictionary."""
        values = values_of(call.arguments)
        named = [f"{key}={value!r}" for key, value in values.items() if _is_word(key)]
        others = {key: value for key, value in values.items() if not _is_word(key)}
        written = [*named, f"**{others!r}"] if others else named
        return f"[{call.name}({', '.join(written)})]"


def _is_word(text: str) -> bool:
    return bool(text) and _NAME.fullmatch(text) is not None


# -------------------------------------------------------------------------------------------------- the grammar


def _grammar_of_call(tool: Tool) -> Grammar:
    arguments = _grammar_of_arguments(tool, _grammar_of_argument, separator=", ")
    return InOrder(parts=(Exactly(text=f"{tool.name}("), arguments, Exactly(text=")")))


def _grammar_of_arguments(tool: Tool, create: Callable[[str, Parameter], Grammar], *, separator: str) -> Grammar:
    known = parameters_of([tool], tool.name)
    needed = tool.parameters.get("required") or ()
    required = [create(name, parameter) for name, parameter in known.items() if name in needed]
    optional = [create(name, parameter) for name, parameter in known.items() if name not in needed]
    if required:
        return _in_a_row(required, optional, separator)
    # Without a required argument, any subset of the optional ones; the first one present has no comma before it.
    subsets = (_in_a_row([first], optional[index + 1 :], separator) for index, first in enumerate(optional))
    return OneOf(parts=(Exactly(text=""), *subsets))


def _grammar_of_argument(name: str, parameter: Parameter) -> Grammar:
    """Return the grammar of an argument as JSON, except that a boolean is ``True`` or ``False``.

    Text and numbers have the same syntax in JSON and Python; nested constants are accepted in JSON syntax.
    """
    value: Grammar = parameter.json_text
    if parameter.types == {"boolean"} and not parameter.choices:
        value = OneOf(parts=(Exactly(text="True"), Exactly(text="False")))
    return InOrder(parts=(Exactly(text=f"{name}="), value))


def _in_a_row(needed: Sequence[Grammar], optional: Sequence[Grammar], separator: str) -> Grammar:
    first, *others = needed
    comma = Exactly(text=separator)
    behind = [InOrder(parts=(comma, other)) for other in others]
    maybe = [Repeated(part=InOrder(parts=(comma, other)), at_least=0, at_most=1) for other in optional]
    return InOrder(parts=(first, *behind, *maybe))


# ------------------------------------------------------------------------------------------------------ reading


def _read_list(source: Source, *, opening: str = "") -> Reading[tuple[Call, ...]]:
    if opening:
        yield from source.require(opening)
    yield from source.require("[")
    calls = yield from read_items(source, "]", _read_call)
    if not calls:
        raise NoCall
    return tuple(calls)


_SYNTAX = CallSyntax(
    anywhere={tag: partial(_read_list, opening=tag) for tag in _TAGS},
    at_start={"[": _read_list},
    after_call={"[": _read_list, **{tag: drop(tag) for tag in _TAGS.values()}},
)


def _read_call(source: Source) -> Reading[Call]:
    name = check_name((yield from source.match(_NAME)))
    yield from source.require("(")
    arguments = yield from read_items(source, ")", _read_argument)
    return Call(name=name, arguments=encode_arguments(_unite(arguments)))


def _read_argument(source: Source) -> Reading[dict[str, object]]:
    if (yield from source.expect("**")):
        values = yield from _read_value(source, 0)
        if not isinstance(values, dict):
            raise NoCall
        return values
    key = check_name((yield from source.match(_NAME)))
    yield from source.require("=")
    return {key: (yield from _read_value(source, 0))}


def _unite(parts: Sequence[dict[str, object]]) -> dict[str, object]:
    """Merge dictionaries. Raises ``NoCall`` if a key occurs twice."""
    united = {key: value for part in parts for key, value in part.items()}
    if len(united) < sum(map(len, parts)):
        raise NoCall
    return united


def _read_value(source: Source, depth: int, *, is_gemma: bool = False) -> Reading[object]:
    # Every level is a nested generator, so the depth of hostile input is bounded.
    if depth > MAX_DEPTH:
        raise NoCall
    quotes = (_GEMMA_QUOTE, '"') if is_gemma else ('"""', "'''", '"', "'")
    opening = yield from source.expect(*quotes, "[", "{")
    match opening:
        case "":
            return _parse_word((yield from source.match(_WORD)))
        case "[":
            return (yield from read_items(source, "]", partial(_read_value, depth=depth + 1, is_gemma=is_gemma)))
        case "{":
            pairs = yield from read_items(source, "}", partial(_read_pair, depth=depth + 1, is_gemma=is_gemma))
            return _unite(pairs)
        case '<|"|>':
            return (yield from source.until(opening))
    return (yield from _read_string(source, opening))


def _read_pair(source: Source, depth: int, *, is_gemma: bool = False) -> Reading[dict[str, object]]:
    if is_gemma and not (yield from source.sees(_GEMMA_QUOTE, '"')):
        key: object = check_name((yield from source.match(_NAME)))
    else:
        key = yield from _read_value(source, depth, is_gemma=is_gemma)
    if not isinstance(key, str):
        raise NoCall
    yield from source.require(":")
    return {key: (yield from _read_value(source, depth, is_gemma=is_gemma))}


def _parse_word(word: str) -> object:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    found = _NUMBER.fullmatch(word)
    if not found:
        raise NoCall
    if found["whole"] and not found["exponent"]:
        return int(word)
    number = float(word)
    # Arguments become JSON, which has no infinity.
    if not math.isfinite(number):
        raise NoCall
    return number


# -------------------------------------------------------------------------------------------------------- strings

_PLAIN = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
_ESCAPE = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<hex>[0-9a-fA-F]{2})|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})"
    r"|N\{(?P<name>[^}]*)\}|(?P<letter>.))",
    re.DOTALL,
)
_LETTERS = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_BASES = {"octal": 8, "hex": 16, "short": 16, "long": 16}


def _read_string(source: Source, quote: str) -> Reading[str]:
    start = source.at
    while True:
        source.skip(_PLAIN[quote[0]])
        if (yield from source.expect(quote, is_tight=True)):
            raw = source.text[start : source.at - len(quote)]
            try:
                # A surrogate pair, as JSON writes it, becomes one character.
                return _ESCAPE.sub(_decode_escape, raw).encode("utf-16", "surrogatepass").decode("utf-16")
            except (ValueError, KeyError):  # a lone surrogate, a number beyond Unicode, or an unknown character name
                raise NoCall from None
        char = yield from source.next_char()
        if char == "\\":
            yield from source.next_char()
        # Templates of this family write text without escapes, so that line breaks occur in any string.
        elif not char:
            raise NoCall


def _decode_escape(found: re.Match[str]) -> str:
    kind = str(found.lastgroup)
    written = found[kind]
    if kind == "name":
        return unicodedata.lookup(written)
    if kind in _BASES:
        return chr(int(written, _BASES[kind]))
    if written in "xuUN":  # without its digits or name
        raise NoCall
    return _LETTERS.get(written, found[0])


# -------------------------------------------------------------------------------------------------------- Gemma 4

_GEMMA_QUOTE = '<|"|>'
_GEMMA_CALL, _GEMMA_END = "<|tool_call>", "<tool_call|>"


class Gemma(ToolFormat):
    """The format of Gemma 4."""

    markers = (_GEMMA_CALL, _GEMMA_END, _GEMMA_QUOTE)
    signs = (f"{_GEMMA_CALL}call:",)
    result_tags = ("<|tool_response>", "<tool_response|>")

    def syntax_for(self, tools: Sequence[Tool]) -> CallSyntax:  # noqa: ARG002 - literals have types
        """See ``ToolFormat.syntax_for``."""
        return CallSyntax(anywhere={_GEMMA_CALL: _read_gemma})

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls, with arguments in the order of the schema, required ones first."""
        return grammar_of_calls(map(_grammar_of_gemma, tools), is_parallel=is_parallel, separator="")

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools as one JSON object per line, and instructions for calling one."""
        example = f"{_GEMMA_CALL}call:tool_name{{key:{_GEMMA_QUOTE}text{_GEMMA_QUOTE},other:1}}{_GEMMA_END}"
        return f"You may call these tools:\n{format_signatures(tools)}\nTo call one, write:\n{example}"

    def format_call(self, call: ToolCall) -> str:
        """Return the call between its tags."""
        return f"{_GEMMA_CALL}call:{call.name}{_write_gemma(values_of(call.arguments))}{_GEMMA_END}"


def _read_gemma(source: Source) -> Reading[tuple[Call, ...]]:
    yield from source.require(_GEMMA_CALL)
    yield from source.require("call:")
    name = check_name((yield from source.match(_NAME)))
    yield from source.require("{")
    values: dict[str, object] = {}
    if not (yield from source.sees("}")):
        source.begin_call(name, arguments="{")
    while not (yield from source.expect("}")):
        values = _unite([values, (yield from _read_pair(source, 0, is_gemma=True))])
        source.begin_call(name, arguments=encode_arguments(values)[:-1])
        if (yield from source.require(",", "}")) == "}":
            break
    if not (yield from source.expect(_GEMMA_END)) and not source.is_at_end:
        raise NoCall
    return (Call(name=name, arguments=encode_arguments(values)),)


def _write_gemma(value: object) -> str:
    match value:
        case str():
            return f"{_GEMMA_QUOTE}{value}{_GEMMA_QUOTE}"
        case Mapping():
            keys = {key: str(key) if _is_word(str(key)) else _write_gemma(str(key)) for key in value}
            return "{" + ",".join(f"{keys[key]}:{_write_gemma(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_write_gemma, value)) + "]"
    return json.dumps(value)


def _grammar_of_gemma(tool: Tool) -> Grammar:
    """Return the grammar of a call. Text stands between the token for quotes; lists and objects are JSON."""

    def create_argument(name: str, parameter: Parameter) -> Grammar:
        value: Grammar = parameter.json_text
        if parameter.choices:
            value = OneOf(parts=tuple(Exactly(text=_write_gemma(choice)) for choice in parameter.choices))
        elif "string" in parameter.types:
            quote = Exactly(text=_GEMMA_QUOTE)
            value = InOrder(parts=(quote, FreeText(excluding=(_GEMMA_QUOTE,)), quote))
        return InOrder(parts=(Exactly(text=f"{name}:"), value))

    before, after = Exactly(text=f"{_GEMMA_CALL}call:{tool.name}{{"), Exactly(text=f"}}{_GEMMA_END}")
    return InOrder(parts=(before, _grammar_of_arguments(tool, create_argument, separator=","), after))
