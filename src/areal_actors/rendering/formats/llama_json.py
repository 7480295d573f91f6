"""The tool format of Llama 3.x: the answer consists of JSON objects with ``name`` and ``parameters``.

Such an object is a call at the beginning of an answer, anywhere in it after ``<|python_tag|>`` (or a tag of Llama 4),
and after another call, with or without a semicolon between them. Elsewhere in a text it is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial

from areal_actors.domain import Exactly, Grammar, InOrder, Tool, ToolCall
from areal_actors.rendering.formats.json_calls import (
    format_signatures,
    grammar_of_arguments,
    grammar_of_calls,
    is_json,
    parse_call,
    read_object,
)
from areal_actors.rendering.formats.reading import Call, CallParser, CallSyntax, Reading, Source, drop

_TAG = "<|python_tag|>"
_START = "<|python_start|>"
_END = "<|python_end|>"
_WRITTEN = re.compile(r'\{\s*\\?"name\\?":(?:(?!description).){0,120}?\\?"parameters\\?":', re.DOTALL)
"""Matches a call in a template's source, with any expression for its name. A tool is excluded by its description."""
_OTHER_FAMILIES = ("<tool_call>", "(params_name1=")


class LlamaJson:
    """The format of Llama 3. Its templates accept one call per answer, but several are read."""

    markers = (_TAG, _START, _END)

    def matches_template(self, template: str) -> bool:
        """Return whether the template writes calls as JSON with parameters, without a tag around them."""
        return _WRITTEN.search(template) is not None and not any(sign in template for sign in _OTHER_FAMILIES)

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:  # noqa: ARG002
        """Return a parser for one answer. ``tools`` is ignored, because JSON needs no schema to be read."""
        return CallParser(_SYNTAX, call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:  # noqa: ARG002
        """Return the grammar of one call, with arguments that match the tool's schema.

        ``is_parallel`` is ignored, because the family's templates refuse an answer with two calls.
        """

        def create_call(tool: Tool) -> Grammar:
            before = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": '
            return InOrder(parts=(Exactly(text=before), grammar_of_arguments(tool), Exactly(text="}")))

        return grammar_of_calls(map(create_call, tools), is_parallel=False)

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools as one JSON object per line, and instructions for calling one."""
        return (
            f"You may call these tools:\n{format_signatures(tools)}\n"
            'To call one, answer with nothing but {"name": <tool name>, "parameters": <JSON object>}'
        )

    def format_call(self, call: ToolCall) -> str:
        """Return name and parameters; parameters that are valid JSON keep their text."""
        arguments = call.arguments if is_json(call.arguments) else json.dumps(call.arguments, ensure_ascii=False)
        return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "parameters": {arguments}}}'

    def format_result(self, content: str) -> str:
        """Return the result as the family's templates show it."""
        return json.dumps({"output": content}, ensure_ascii=False)


def _read_call(source: Source, *, opening: str = "") -> Reading[tuple[Call, ...]]:
    if opening:
        yield from source.require(opening)
    if opening == ";":
        yield from source.expect(_TAG)
    source.begin_object()
    text = yield from read_object(source)
    return (parse_call(text, is_bare_allowed=False),)


_SYNTAX = CallSyntax(
    anywhere={tag: partial(_read_call, opening=tag) for tag in (_TAG, _START, _END)},
    at_start={"{": _read_call},
    # The end tag closes the calls of Llama 4; further calls may follow it.
    after_call={"{": _read_call, ";": partial(_read_call, opening=";"), _END: drop(_END)},
)
