"""The tool format of Hermes and Qwen: JSON between ``<tool_call>`` and ``</tool_call>``.

The closing tag may be missing at the end of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from areal_actors.domain import Exactly, Grammar, InOrder, Tool, ToolCall
from areal_actors.rendering.formats.json_calls import (
    format_signatures,
    grammar_of_arguments,
    grammar_of_calls,
    is_json,
    parse_call,
    read_object,
)
from areal_actors.rendering.formats.reading import Call, CallParser, CallSyntax, NoCall, Reading, Source

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_OTHER_FAMILIES = ("<function=", "<arg_key>")
"""Markers of formats that use the same tags around something other than JSON."""


class Hermes:
    """The format of Hermes and Qwen. Its instructions are short, because small models read them too."""

    markers = (_OPEN, _CLOSE)

    def matches_template(self, template: str) -> bool:
        """Return whether the template writes calls as JSON between the tags."""
        return _OPEN in template and not any(sign in template for sign in _OTHER_FAMILIES)

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:  # noqa: ARG002
        """Return a parser for one answer. ``tools`` is ignored, because JSON needs no schema to be read."""
        return CallParser(CallSyntax(anywhere={_OPEN: _read_call}), call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls as the family's templates write them; arguments match the tool's schema."""

        def create_call(tool: Tool) -> Grammar:
            before = f'{_OPEN}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
            return InOrder(parts=(Exactly(text=before), grammar_of_arguments(tool), Exactly(text=f"}}\n{_CLOSE}")))

        return grammar_of_calls(map(create_call, tools), is_parallel=is_parallel)

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools as one JSON object per line, and instructions for calling one."""
        lines = format_signatures(tools)
        example = '{"name": <tool name>, "arguments": <JSON object>}'
        return (
            f"You may call these tools:\n<tools>\n{lines}\n</tools>\nTo call one, write:\n{_OPEN}\n{example}\n{_CLOSE}"
        )

    def format_call(self, call: ToolCall) -> str:
        """Return name and arguments between the tags; arguments that are valid JSON keep their text."""
        arguments = call.arguments if is_json(call.arguments) else json.dumps(call.arguments, ensure_ascii=False)
        name = json.dumps(call.name, ensure_ascii=False)
        return f'{_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{_CLOSE}'

    def format_result(self, content: str) -> str:
        """Return the result between the family's tags."""
        return f"<tool_response>\n{content}\n</tool_response>"


def _read_call(source: Source) -> Reading[tuple[Call, ...]]:
    yield from source.require(_OPEN)
    source.begin_object()
    call = parse_call((yield from read_object(source)))
    if not (yield from source.expect(_CLOSE)) and not source.is_at_end:
        raise NoCall
    return (call,)
