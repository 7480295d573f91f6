"""What a format is: the syntax in which one family of models writes calls, or separates its reasoning.

A *format* defines how tools, calls and results look as text, and how to recognise the family by its chat template. A
*parser* reads one answer as it arrives. Parsers never raise and never lose text: text that looks like a call but is not
one stays content.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from areal_actors.domain import Delta, Grammar, OneOf, Repeated, Tool, ToolCall
from areal_actors.rendering.formats.reading import CallParser, CallSyntax


class AnswerParser(Protocol):
    """Incremental parser from the text of one answer to deltas, which do not depend on how the text is chunked."""

    def feed(self, text: str) -> tuple[Delta, ...]:
        """Return the deltas that are certain after this text."""
        ...

    def finish(self) -> tuple[Delta, ...]:
        """Return what was held back."""
        ...


class StateParser(ABC):
    """An ``AnswerParser`` that is a state machine: a state is a method that reads on from the text in ``_buffer``.

    It returns whether there may be more to read, and appends what is certain to ``_deltas``.
    """

    _state: Callable[[], bool]

    def __init__(self) -> None:
        self._buffer = ""
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> tuple[Delta, ...]:
        """Return the deltas that are certain after this text."""
        self._buffer += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> tuple[Delta, ...]:
        """Return what was held back."""
        self._end()
        return self._take()

    @abstractmethod
    def _end(self) -> None:
        """Emit what was held back."""

    def _take(self) -> tuple[Delta, ...]:
        deltas, self._deltas = tuple(self._deltas), []
        return deltas


class Format(ABC):
    """A format that is recognised by the chat templates of its family."""

    markers: tuple[str, ...]
    """Tags that the parser needs to see, even if they are special tokens."""
    signs: tuple[str, ...]
    """Texts that are in every chat template of the family."""
    foreign_signs: tuple[str, ...] = ()
    """Texts in the templates of other families that share all signs."""

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template (its source) belongs to this family."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.foreign_signs)


class ReasoningFormat(Format):
    """The syntax in which one family of models separates reasoning from content."""

    stops: tuple[str, ...] = ()
    """Special tokens that end an answer, in addition to the template's own end of turn."""

    @abstractmethod
    def is_opened_by(self, prompt: str) -> bool:
        """Return whether this rendered prompt ends inside the reasoning."""

    @abstractmethod
    def constrain(self, *, is_open: bool, has_calls: bool) -> Grammar:
        """Return the grammar of the reasoning, up to the beginning of the actual answer.

        The reasoning may be empty unless ``is_open``. ``has_calls`` says that calls follow rather than content, which
        some families announce differently.
        """

    @abstractmethod
    def open_parser(self, *, is_open: bool) -> AnswerParser:
        """Return a parser for one answer, which begins inside the reasoning if ``is_open``."""


class ToolFormat(Format):
    """The syntax in which one family of models writes tools, calls and results."""

    result_tags: tuple[str, str] | None = ("<tool_response>\n", "\n</tool_response>")
    """The texts around the result of a call. ``None``: it is written as a JSON object."""

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> CallParser:
        """Return a parser for one answer.

        ``call_ids`` creates the ids of its calls, ``tools`` are those that were offered. A format that writes arguments
        without types takes the types from the schemas of the tools. A call of a tool that was not offered is still a
        call.
        """
        return CallParser(self.syntax_for(tools), call_ids)

    @abstractmethod
    def syntax_for(self, tools: Sequence[Tool]) -> CallSyntax:
        """Return where calls may begin, and how they are read if these tools are offered."""

    @abstractmethod
    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of a call of ``tools``, or of several if ``is_parallel``."""

    @abstractmethod
    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the block of a system message that offers ``tools`` and explains how to call them."""

    @abstractmethod
    def format_call(self, call: ToolCall) -> str:
        """Return a call as the model writes it."""

    def format_result(self, content: str) -> str:
        """Return the result of a call as the model reads it."""
        if self.result_tags is None:
            return json.dumps({"output": content}, ensure_ascii=False)
        before, after = self.result_tags
        return f"{before}{content}{after}"


def grammar_of_calls(parts: Iterable[Grammar], *, is_parallel: bool, separator: str = "\n") -> Grammar:
    """Return the grammar of one of ``parts``, or of several of them with ``separator`` between them."""
    return Repeated(part=OneOf(parts=tuple(parts)), at_most=None if is_parallel else 1, separator=separator)


def format_signatures(tools: Sequence[Tool]) -> str:
    """Return the tools as one JSON object per line."""
    signatures = ({"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools)
    return "\n".join(json.dumps(signature, ensure_ascii=False) for signature in signatures)
