"""Tool calls that a client quotes in the text of an answer, instead of sending them back as calls.

smolagents does this: it sends the model's text, then ``Calling tools:`` and the calls as Python prints them, with their
ids. The ids were issued only once, which identifies such a text; ``canonical`` checks whether they belong to an answer.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from attrs import frozen

from areal_actors.domain import ChatMessage, ToolCall

__all__ = ["Quoted", "calls_of", "read_quoted"]

_MARK = "Calling tools:\n"
_MAX_CHARACTERS = 1 << 16


@frozen
class Quoted:
    """The text before the calls, and the calls."""

    text: str
    calls: tuple[ToolCall, ...]


def calls_of(message: ChatMessage) -> tuple[ToolCall, ...]:
    """Return the calls of an answer, whether sent as calls or quoted in its text."""
    if message.tool_calls or message.role != "assistant":
        return message.tool_calls
    quoted = read_quoted(message.content)
    return () if quoted is None else quoted.calls


def read_quoted(content: str | None) -> Quoted | None:
    """Return the calls quoted at the end of a text; ``None`` for any other text. Never raises."""
    if content is None or _MARK not in content:
        return None
    text, _, listing = content.rpartition(_MARK)
    # ``literal_eval`` of a client's text: the length limit bounds its time and memory.
    if len(listing) > _MAX_CHARACTERS:
        return None
    try:
        calls = tuple(_read_call(raw) for raw in ast.literal_eval(listing.strip()))
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        return None
    return Quoted(text, calls) if calls else None


def _read_call(raw: Any) -> ToolCall:
    function, call_id = raw["function"], raw["id"]
    name, arguments = function["name"], function["arguments"]
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise TypeError(name)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
    return ToolCall(id=call_id, name=name, arguments=text)
