"""The tool format of GLM-4.5 and its successors: a name, followed by keys and values in separate tags.

Text stands between the tags unchanged, every other value as JSON; the schema decides which. A value ends at a closing
tag that is followed by another key or by the end of the call. The last closing tag may be missing at the end of an
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from areal_actors.domain import Exactly, Grammar, InOrder, OneOf, Repeated, Tool, ToolCall
from areal_actors.rendering.formats.json_calls import encode_arguments, format_signatures
from areal_actors.rendering.formats.reading import (
    Call,
    CallParser,
    CallSyntax,
    NoCall,
    Reading,
    Source,
    check_name,
)
from areal_actors.rendering.formats.schemas import (
    describe_parameters,
    format_value,
    parameters_of,
    read_value,
    values_of,
)

__all__ = ["Glm"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_KEY = "<arg_key>"
_END_KEY = "</arg_key>"
_VALUE = "<arg_value>"
_END_VALUE = "</arg_value>"
_NAME = re.compile(r"[\w.:/-]*")
_KEY_NAME = re.compile(r"[^<\n]*")
_EXAMPLE = f"{_OPEN}tool_name\n{_KEY}name{_END_KEY}\n{_VALUE}value{_END_VALUE}\n{_CLOSE}"


class Glm:
    """The format of GLM-4.5, also used by GLM-4.6 and 4.7, which omit the line breaks."""

    markers = (_OPEN, _CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE)

    def is_spoken_by(self, template: str) -> bool:
        """Return whether the template writes keys and values as tags."""
        return _OPEN in template and _KEY in template and _VALUE in template

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:
        """Return a parser for one answer; the types of values come from ``tools``."""
        return CallParser(CallSyntax(anywhere={_OPEN: partial(_read_call, tools=tools)}), call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls, with parameters in the order of the schema.

        Text is free, other values match the schema.
        """
        call = OneOf(parts=tuple(map(_grammar_of_call, tools)))
        return Repeated(part=call, at_most=None if is_parallel else 1, separator="\n")

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools as one JSON object per line, and instructions for calling one."""
        return (
            f"You may call these tools:\n<tools>\n{format_signatures(tools)}\n</tools>\n"
            f"To call one, write:\n{_EXAMPLE}\nText stands without quotes, everything else as JSON."
        )

    def format_call(self, call: ToolCall) -> str:
        """Return name, keys and values."""
        values = values_of(call.arguments).items()
        written = (f"{_KEY}{key}{_END_KEY}\n{_VALUE}{format_value(value)}{_END_VALUE}\n" for key, value in values)
        return f"{_OPEN}{call.name}\n{''.join(written)}{_CLOSE}"

    def format_result(self, content: str) -> str:
        """Return the result between the family's tags."""
        return f"<tool_response>\n{content}\n</tool_response>"


def _grammar_of_call(tool: Tool) -> Grammar:
    before = Exactly(text=f"{_OPEN}{tool.name}\n")
    values = describe_parameters(tool, before=_KEY, between=f"{_END_KEY}\n{_VALUE}", after=f"{_END_VALUE}\n")
    return InOrder(parts=(before, values, Exactly(text=_CLOSE)))


def _read_call(source: Source, *, tools: Sequence[Tool]) -> Reading[tuple[Call, ...]]:
    yield from source.require(_OPEN)
    name = check_name((yield from source.match(_NAME)))
    known = parameters_of(tools, name)
    values: dict[str, Any] = {}
    while (yield from source.expect(_KEY)):
        key = check_name((yield from source.match(_KEY_NAME)).strip())
        yield from source.require(_END_KEY)
        yield from source.require(_VALUE)
        text = yield from source.until(_END_VALUE, before=(_KEY, _CLOSE))
        if key in values:
            raise NoCall
        values[key] = read_value(text, known.get(key))
    if not (yield from source.expect(_CLOSE)) and not (values and source.is_at_end):
        raise NoCall
    return (Call(name=name, arguments=encode_arguments(values)),)
