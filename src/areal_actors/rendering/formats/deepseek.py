"""The tool formats of DeepSeek: calls between special tokens, with fenced arguments (V3, R1) or without.

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Models write the form that their template shows, but both forms are always read. The outer tags, and the last closing
ones, may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from attrs import frozen

from areal_actors.domain import Exactly, Grammar, InOrder, JsonText, OneOf, Repeated, Tool, ToolCall
from areal_actors.rendering.formats.json_calls import decode_object, read_object
from areal_actors.rendering.formats.reading import Call, CallParser, CallSyntax, NoCall, Reading, Source, check_name

__all__ = ["DeepSeek"]

_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.:/-]*")


@frozen(kw_only=True)
class DeepSeek:
    """Both formats of DeepSeek; ``has_fences`` selects the one that is written."""

    has_fences: bool
    markers = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)

    def is_spoken_by(self, template: str) -> bool:
        """Return whether the template writes calls in this form."""
        return _CALLS_BEGIN in template and self.has_fences == ("```json" in template)

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:  # noqa: ARG002
        """Return a parser for one answer. ``tools`` is ignored, because JSON needs no schema to be read."""
        return CallParser(_SYNTAX, call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls as the family's templates write them; arguments match the tool's schema."""
        call = OneOf(parts=tuple(map(self._grammar_of_call, tools)))
        separator = "\n" if self.has_fences else ""
        calls = Repeated(part=call, at_most=None if is_parallel else 1, separator=separator)
        return InOrder(parts=(Exactly(text=_CALLS_BEGIN), calls, Exactly(text=_CALLS_END)))

    def _grammar_of_call(self, tool: Tool) -> Grammar:
        before, after = self._frame(tool.name)
        arguments = JsonText(schema={"type": "object", **tool.parameters}, is_strict=tool.is_strict)
        return InOrder(parts=(Exactly(text=before), arguments, Exactly(text=after)))

    def _frame(self, name: str) -> tuple[str, str]:
        if self.has_fences:
            return f"{_CALL_BEGIN}function{_SEPARATOR}{name}\n```json\n", f"\n```{_CALL_END}"
        return f"{_CALL_BEGIN}{name}{_SEPARATOR}", _CALL_END

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools, one paragraph each, and instructions for calling one."""
        described = "\n\n".join(map(_describe, tools))
        before, after = self._frame("<tool name>")
        example = f"{_CALLS_BEGIN}{before}<JSON object>{after}{_CALLS_END}"
        return f"## Tools\n\n{described}\n\nTo call tools, write:\n{example}"

    def format_call(self, call: ToolCall) -> str:
        """Return one call, with the outer tags around it."""
        before, after = self._frame(call.name)
        return f"{_CALLS_BEGIN}{before}{call.arguments}{after}{_CALLS_END}"

    def format_result(self, content: str) -> str:
        """Return the result between the family's tags."""
        return f"<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"


def _describe(tool: Tool) -> str:
    parameters = json.dumps(tool.parameters, ensure_ascii=False)
    return f"### {tool.name}\n{tool.description}\nParameters: {parameters}"


def _read_first(source: Source) -> Reading[tuple[Call, ...]]:
    yield from source.require(_CALLS_BEGIN)
    return (yield from _read_call(source))


def _read_call(source: Source) -> Reading[tuple[Call, ...]]:
    yield from source.require(_CALL_BEGIN)
    name = yield from source.match(_NAME)
    yield from source.require(_SEPARATOR)
    # With fences, ``function`` stands before the separator and the name after it.
    is_bare = yield from source.sees("{")
    if not is_bare:
        name = yield from source.match(_NAME)
        yield from source.require("```json")
    arguments = yield from read_object(source)
    # Checks the arguments; their text is kept as the model wrote it.
    decode_object(arguments)
    if not is_bare:
        yield from source.require("```")
    if not (yield from source.expect(_CALL_END)) and not source.is_at_end:
        raise NoCall
    return (Call(name=check_name(name), arguments=arguments),)


def _read_end(source: Source) -> Reading[tuple[Call, ...]]:
    yield from source.require(_CALLS_END)
    return ()


_SYNTAX = CallSyntax(anywhere={_CALLS_BEGIN: _read_first, _CALL_BEGIN: _read_call}, after_call={_CALLS_END: _read_end})
