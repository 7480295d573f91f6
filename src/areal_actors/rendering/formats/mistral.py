"""The tool formats of Mistral: ``[TOOL_CALLS]`` before a JSON list, or before each call.

::

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]8f3Kd01aZ[ARGS]{}

Models write the form that their template shows, but both forms are always read. An id of nine letters and digits that
the model wrote is kept, because the result has to quote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from areal_actors.domain import Exactly, Grammar, InOrder, Tool, ToolCall
from areal_actors.lib.json_prefix import MAX_DEPTH
from areal_actors.rendering.formats.json_calls import (
    decode_object,
    format_signatures,
    grammar_of_arguments,
    grammar_of_calls,
    parse_call,
    read_object,
)
from areal_actors.rendering.formats.reading import Call, CallParser, CallSyntax, NoCall, Reading, Source, check_name

_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"
_ID = re.compile("[a-zA-Z0-9]{9}")
_NAME = re.compile(r"[\w.:/-]*")


@frozen(kw_only=True)
class Mistral:
    """Both formats of Mistral.

    With ``has_names``, calls are written with names before their arguments, otherwise as a list.
    """

    has_names: bool = False
    markers = (_CALLS, _CALL_ID, _ARGS)

    def matches_template(self, template: str) -> bool:
        """Return whether the template writes calls in this form."""
        return _CALLS in template and self.has_names == (_ARGS in template)

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:  # noqa: ARG002
        """Return a parser for one answer. ``tools`` is ignored, because JSON needs no schema to be read."""
        return CallParser(_SYNTAX, call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls as the family's templates write them; arguments match the tool's schema."""

        def create_call(tool: Tool) -> Grammar:
            arguments = grammar_of_arguments(tool)
            if self.has_names:
                return InOrder(parts=(Exactly(text=f"{_CALLS}{tool.name}{_ARGS}"), arguments))
            before = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
            return InOrder(parts=(Exactly(text=before), arguments, Exactly(text="}")))

        separator = "" if self.has_names else ", "
        calls = grammar_of_calls(map(create_call, tools), is_parallel=is_parallel, separator=separator)
        return calls if self.has_names else InOrder(parts=(Exactly(text=f"{_CALLS}["), calls, Exactly(text="]")))

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools as the family's templates put them before a question, and instructions for calling one."""
        example = f'{_CALLS}<tool name>{_ARGS}{{"<argument>": <value>}}'
        if not self.has_names:
            example = f'{_CALLS}[{{"name": <tool name>, "arguments": <JSON object>}}]'
        return f"[AVAILABLE_TOOLS]\n{format_signatures(tools)}\n[/AVAILABLE_TOOLS]\nTo call one, write:\n{example}"

    def format_call(self, call: ToolCall) -> str:
        """Return one call; in the form with lists, as a list with one element."""
        if self.has_names:
            return f"{_CALLS}{call.name}{_ARGS}{call.arguments}"
        return f'{_CALLS}[{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}]'

    def format_result(self, content: str) -> str:
        """Return the result between the family's tags."""
        return f"[TOOL_RESULTS]{content}[/TOOL_RESULTS]"


def _read_calls(source: Source) -> Reading[tuple[Call, ...]]:
    """Read one call after its name, or a list of calls."""
    yield from source.require(_CALLS)
    if (yield from source.sees(_ARGS, _CALL_ID)):
        raise NoCall
    if not (yield from source.expect("[")):
        name = check_name((yield from source.match(_NAME)))
        call_id = (yield from source.match(_NAME)) if (yield from source.expect(_CALL_ID)) else ""
        yield from source.require(_ARGS)
        source.begin_call(name, call_id=call_id if _ID.fullmatch(call_id) else None)
        arguments = yield from read_object(source)
        decode_object(arguments)
        return (_identify(Call(name=name, arguments=arguments), call_id),)
    calls: list[Call] = []
    is_over = False
    while not is_over:
        text = yield from read_object(source)
        calls.append(_identify(parse_call(text), decode_object(text, max_depth=MAX_DEPTH + 1).get("id")))
        is_over = (yield from source.require(",", "]")) == "]"
    return tuple(calls)


def _identify(call: Call, call_id: object) -> Call:
    return evolve(call, id=call_id) if isinstance(call_id, str) and _ID.fullmatch(call_id) else call


_SYNTAX = CallSyntax(anywhere={_CALLS: _read_calls})
