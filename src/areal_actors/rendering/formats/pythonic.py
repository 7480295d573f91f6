"""The pythonic tool format: a list of calls in Python syntax, ``[get_weather(city="Paris"), f(x=1)]``.

It is written by Llama 3.2, Llama 4, ToolACE and LFM2. The list is recognised at the beginning of an answer, after
another list, and anywhere between the tags that some of these models have. Arguments are named and are literals: text,
numbers, constants, lists and dictionaries; nothing is evaluated. Names that Python does not allow (``get-weather``,
``from``) and the constants of JSON are accepted, because tools are described in JSON.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial

from areal_actors.domain import Exactly, Grammar, InOrder, OneOf, Repeated, Tool, ToolCall
from areal_actors.lib.json_prefix import MAX_DEPTH
from areal_actors.rendering.formats.base import ToolFormat, format_signatures, grammar_of_calls
from areal_actors.rendering.formats.json_calls import encode_arguments
from areal_actors.rendering.formats.reading import (
    Call,
    CallSyntax,
    NoCall,
    Reading,
    Source,
    T,
    check_name,
    drop,
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
    known = parameters_of([tool], tool.name)
    needed = tool.parameters.get("required") or ()
    required = [_grammar_of_argument(name, parameter) for name, parameter in known.items() if name in needed]
    optional = [_grammar_of_argument(name, parameter) for name, parameter in known.items() if name not in needed]
    # Without a required argument, any subset of the optional ones; the first one present has no comma before it.
    subsets = (_in_a_row([first], optional[index + 1 :]) for index, first in enumerate(optional))
    written = _in_a_row(required, optional) if required else OneOf(parts=(Exactly(text=""), *subsets))
    return InOrder(parts=(Exactly(text=f"{tool.name}("), written, Exactly(text=")")))


def _grammar_of_argument(name: str, parameter: Parameter) -> Grammar:
    """Return the grammar of an argument as JSON, except that a boolean is ``True`` or ``False``.

    Text and numbers have the same syntax in JSON and Python; nested constants are accepted in JSON syntax.
    """
    value: Grammar = parameter.json_text
    if parameter.types == {"boolean"} and not parameter.choices:
        value = OneOf(parts=(Exactly(text="True"), Exactly(text="False")))
    return InOrder(parts=(Exactly(text=f"{name}="), value))


def _in_a_row(needed: Sequence[Grammar], optional: Sequence[Grammar]) -> Grammar:
    first, *others = needed
    comma = Exactly(text=", ")
    behind = [InOrder(parts=(comma, other)) for other in others]
    maybe = [Repeated(part=InOrder(parts=(comma, other)), at_least=0, at_most=1) for other in optional]
    return InOrder(parts=(first, *behind, *maybe))


# ------------------------------------------------------------------------------------------------------ reading


def _read_list(source: Source, *, opening: str = "") -> Reading[tuple[Call, ...]]:
    if opening:
        yield from source.require(opening)
    yield from source.require("[")
    calls = yield from _read_items(source, "]", _read_call)
    if not calls:
        raise NoCall
    return tuple(calls)


_SYNTAX = CallSyntax(
    anywhere={tag: partial(_read_list, opening=tag) for tag in _TAGS},
    at_start={"[": _read_list},
    after_call={"[": _read_list, **{tag: drop(tag) for tag in _TAGS.values()}},
)


def _read_items(source: Source, end: str, read_item: Callable[[Source], Reading[T]]) -> Reading[list[T]]:
    """Read items separated by commas, up to and including ``end``; a trailing comma is allowed."""
    items: list[T] = []
    while not (yield from source.expect(end)):
        items.append((yield from read_item(source)))
        if (yield from source.require(",", end)) == end:
            break
    return items


def _read_call(source: Source) -> Reading[Call]:
    name = check_name((yield from source.match(_NAME)))
    yield from source.require("(")
    arguments = yield from _read_items(source, ")", _read_argument)
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


def _read_value(source: Source, depth: int) -> Reading[object]:
    # Every level is a nested generator, so the depth of hostile input is bounded.
    if depth > MAX_DEPTH:
        raise NoCall
    opening = yield from source.expect('"""', "'''", '"', "'", "[", "{")
    match opening:
        case "":
            return _parse_word((yield from source.match(_WORD)))
        case "[":
            return (yield from _read_items(source, "]", partial(_read_value, depth=depth + 1)))
        case "{":
            return _unite((yield from _read_items(source, "}", partial(_read_pair, depth=depth + 1))))
    return (yield from _read_string(source, opening))


def _read_pair(source: Source, depth: int) -> Reading[dict[str, object]]:
    key = yield from _read_value(source, depth)
    if not isinstance(key, str):
        raise NoCall
    yield from source.require(":")
    return {key: (yield from _read_value(source, depth))}


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
        # Only triple-quoted strings may contain line breaks.
        elif not char or (char == "\n" and len(quote) == 1):
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
