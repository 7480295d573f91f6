"""The tool format of Llama 3.x: JSON objects with ``name`` and ``parameters`` that are the answer.

Such an object is a call at the beginning of an answer, behind ``<|python_tag|>`` (and the tags of Llama 4) anywhere,
and behind another call, with or without a semicolon in between. In the middle of a text it is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial

from areal_actors.domain import Exactly, Grammar, InOrder, JsonText, OneOf, Repeated, Tool, ToolCall
from areal_actors.rendering.formats.json_calls import format_signatures, is_json, parse_call, read_object
from areal_actors.rendering.formats.reading import Call, CallParser, CallSyntax, Reading, Source

__all__ = ["LlamaJson"]

_TAG = "<|python_tag|>"
_START = "<|python_start|>"
_END = "<|python_end|>"
_WRITTEN = re.compile(r'\{\s*\\?"name\\?":(?:(?!description).){0,120}?\\?"parameters\\?":', re.DOTALL)
"""A call in a template's source, whatever stands for its name; a tool has a description, too."""
_OTHER_FAMILIES = ("<tool_call>", "(params_name1=")


class LlamaJson:
    """One call is an answer for the templates of Llama 3; several are read all the same."""

    markers = (_TAG, _START, _END)

    def is_spoken_by(self, template: str) -> bool:
        """Whether the template writes calls as JSON with parameters, and no tag around them."""
        return _WRITTEN.search(template) is not None and not any(sign in template for sign in _OTHER_FAMILIES)

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:  # noqa: ARG002
        """A parser for one answer. JSON needs no schema to be read."""
        return CallParser(_SYNTAX, call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:  # noqa: ARG002
        """One call, its arguments held to the tool's schema: the family's templates refuse an answer with two."""
        return Repeated(part=OneOf(parts=tuple(map(_grammar_of_call, tools))), at_most=1)

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """The tools as one JSON object a line, and how to call one."""
        return (
            f"You may call these tools:\n{format_signatures(tools)}\n"
            'To call one, answer with nothing but {"name": <tool name>, "parameters": <JSON object>}'
        )

    def format_call(self, call: ToolCall) -> str:
        """Name and parameters; these are the call's own text where that is JSON."""
        arguments = call.arguments if is_json(call.arguments) else json.dumps(call.arguments, ensure_ascii=False)
        return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "parameters": {arguments}}}'

    def format_result(self, content: str) -> str:
        """The result as the family's templates show it."""
        return json.dumps({"output": content}, ensure_ascii=False)


def _grammar_of_call(tool: Tool) -> Grammar:
    before = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": '
    arguments = JsonText(schema={"type": "object", **tool.parameters}, is_strict=tool.is_strict)
    return InOrder(parts=(Exactly(text=before), arguments, Exactly(text="}")))


def _read_call(source: Source, *, opening: str) -> Reading[tuple[Call, ...]]:
    yield from source.require(opening)
    text = yield from read_object(source)
    return (parse_call(text, keys=("parameters", "arguments"), is_bare_allowed=False),)


def _read_bare_call(source: Source) -> Reading[tuple[Call, ...]]:
    text = yield from read_object(source)
    return (parse_call(text, keys=("parameters", "arguments"), is_bare_allowed=False),)


def _read_separator(source: Source) -> Reading[tuple[Call, ...]]:
    yield from source.require(";")
    yield from source.expect(_TAG)
    return (yield from _read_bare_call(source))


def _read_end(source: Source) -> Reading[tuple[Call, ...]]:
    """The tag that closes the calls of Llama 4; calls may follow it all the same."""
    yield from source.require(_END)
    return ()


_SYNTAX = CallSyntax(
    anywhere={tag: partial(_read_call, opening=tag) for tag in (_TAG, _START, _END)},
    at_start={"{": _read_bare_call},
    after_call={"{": _read_bare_call, ";": _read_separator, _END: _read_end},
)
