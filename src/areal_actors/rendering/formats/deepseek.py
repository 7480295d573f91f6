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
from functools import partial

from attrs import frozen

from areal_actors.domain import Exactly, Grammar, InOrder, Tool, ToolCall
from areal_actors.rendering.formats.json_calls import decode_object, grammar_of_arguments, grammar_of_calls, read_object
from areal_actors.rendering.formats.reading import (
    Call,
    CallParser,
    CallSyntax,
    NoCall,
    Reading,
    Source,
    check_name,
    drop,
)

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

    def matches_template(self, template: str) -> bool:
        """Return whether the template writes calls in this form."""
        return _CALLS_BEGIN in template and self.has_fences == ("```json" in template)

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:  # noqa: ARG002
        """Return a parser for one answer. ``tools`` is ignored, because JSON needs no schema to be read."""
        return CallParser(_SYNTAX, call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls as the family's templates write them; arguments match the tool's schema."""

        def create_call(tool: Tool) -> Grammar:
            before, after = self._delimit(tool.name)
            return InOrder(parts=(Exactly(text=before), grammar_of_arguments(tool), Exactly(text=after)))

        separator = "\n" if self.has_fences else ""
        calls = grammar_of_calls(map(create_call, tools), is_parallel=is_parallel, separator=separator)
        return InOrder(parts=(Exactly(text=_CALLS_BEGIN), calls, Exactly(text=_CALLS_END)))

    def _delimit(self, name: str) -> tuple[str, str]:
        if self.has_fences:
            return f"{_CALL_BEGIN}function{_SEPARATOR}{name}\n```json\n", f"\n```{_CALL_END}"
        return f"{_CALL_BEGIN}{name}{_SEPARATOR}", _CALL_END

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools, one paragraph each, and instructions for calling one."""
        described = "\n\n".join(
            f"### {t.name}\n{t.description}\nParameters: {json.dumps(t.parameters, ensure_ascii=False)}" for t in tools
        )
        before, after = self._delimit("<tool name>")
        example = f"{_CALLS_BEGIN}{before}<JSON object>{after}{_CALLS_END}"
        return f"## Tools\n\n{described}\n\nTo call tools, write:\n{example}"

    def format_call(self, call: ToolCall) -> str:
        """Return one call, with the outer tags around it."""
        before, after = self._delimit(call.name)
        return f"{_CALLS_BEGIN}{before}{call.arguments}{after}{_CALLS_END}"

    def format_result(self, content: str) -> str:
        """Return the result between the family's tags."""
        return f"<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"


def _read_call(source: Source, *, is_first: bool = False) -> Reading[tuple[Call, ...]]:
    if is_first:
        yield from source.require(_CALLS_BEGIN)
    yield from source.require(_CALL_BEGIN)
    name = yield from source.match(_NAME)
    yield from source.require(_SEPARATOR)
    # With fences, ``function`` stands before the separator and the name after it.
    is_bare = yield from source.sees("{")
    if not is_bare:
        name = yield from source.match(_NAME)
        yield from source.require("```json")
    source.begin_call(check_name(name))
    arguments = yield from read_object(source)
    # Checks the arguments; their text is kept as the model wrote it.
    decode_object(arguments)
    if not is_bare:
        yield from source.require("```")
    if not (yield from source.expect(_CALL_END)) and not source.is_at_end:
        raise NoCall
    return (Call(name=check_name(name), arguments=arguments),)


_SYNTAX = CallSyntax(
    anywhere={_CALLS_BEGIN: partial(_read_call, is_first=True), _CALL_BEGIN: _read_call},
    after_call={_CALLS_END: drop(_CALLS_END)},
)
