"""The tool format of Qwen3-Coder: nested tags, one for the function and one for each parameter.

Values stand between line breaks, without quotes or escapes; the schema says which of them are text. A value ends at a
closing tag that is followed by another parameter or by the end of the function, so that code which contains such tags
can be passed. The last closing tag may be missing at the end of an answer.
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

__all__ = ["QwenCoder"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_EXAMPLE = f"{_OPEN}\n{_FUNCTION}tool_name>\n{_PARAMETER}name>\nvalue\n{_END_PARAMETER}\n{_END_FUNCTION}\n{_CLOSE}"


class QwenCoder:
    """The format of Qwen3-Coder, also used by Qwen3.5 and the Nemotron family."""

    markers = (_OPEN, _CLOSE)

    def is_spoken_by(self, template: str) -> bool:
        """Return whether the template writes functions and parameters as tags that contain a name."""
        return _OPEN in template and _FUNCTION in template and _PARAMETER in template

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
        """Return name and arguments as tags."""
        values = values_of(call.arguments).items()
        written = "".join(f"{_PARAMETER}{key}>\n{format_value(value)}\n{_END_PARAMETER}\n" for key, value in values)
        return f"{_OPEN}\n{_FUNCTION}{call.name}>\n{written}{_END_FUNCTION}\n{_CLOSE}"

    def format_result(self, content: str) -> str:
        """Return the result between the family's tags."""
        return f"<tool_response>\n{content}\n</tool_response>"


def _grammar_of_call(tool: Tool) -> Grammar:
    before = Exactly(text=f"{_OPEN}\n{_FUNCTION}{tool.name}>\n")
    values = describe_parameters(tool, before=_PARAMETER, between=">\n", after=f"\n{_END_PARAMETER}\n")
    return InOrder(parts=(before, values, Exactly(text=f"{_END_FUNCTION}\n{_CLOSE}")))


def _read_call(source: Source, *, tools: Sequence[Tool]) -> Reading[tuple[Call, ...]]:
    yield from source.require(_OPEN)
    yield from source.require(_FUNCTION)
    name = yield from _read_name(source)
    known = parameters_of(tools, name)
    values: dict[str, Any] = {}
    while (yield from source.require(_PARAMETER, _END_FUNCTION)) == _PARAMETER:
        key = yield from _read_name(source)
        text = yield from source.until(_END_PARAMETER, before=(_PARAMETER, _END_FUNCTION))
        if key in values:
            raise NoCall
        values[key] = read_value(text.removeprefix("\n").removesuffix("\n"), known.get(key))
    if not (yield from source.expect(_CLOSE)) and not source.is_at_end:
        raise NoCall
    return (Call(name=name, arguments=encode_arguments(values)),)


def _read_name(source: Source) -> Reading[str]:
    name = yield from source.match(_NAME)
    yield from source.require(">")
    return check_name(name.strip())
