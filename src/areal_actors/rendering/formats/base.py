"""``ToolFormat``: the syntax in which one family of models writes tools, calls and results."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from areal_actors.domain import Grammar, OneOf, Repeated, Tool, ToolCall
from areal_actors.rendering.formats.reading import CallParser, CallSyntax


class ToolFormat(ABC):
    """The syntax of one family. Subclasses say how calls are read and written."""

    markers: tuple[str, ...]
    """Tags that the parser needs to see, even if they are special tokens."""
    signs: tuple[str, ...]
    """Texts that are in every chat template of the family."""
    foreign_signs: tuple[str, ...] = ()
    """Texts in the templates of other families that share all signs."""
    result_tags: tuple[str, str] | None = ("<tool_response>\n", "\n</tool_response>")
    """The texts around the result of a call. ``None``: it is written as a JSON object."""

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template (its source) belongs to this family."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.foreign_signs)

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
