"""Calls that a client writes into the text of an answer, instead of sending them back as calls.

smolagents does so: what the model said, then ``Calling tools:`` and the calls as Python prints them, ids included. The
ids were given out once, so that such a text can be told from anything else; whether they are those of an answer of ours
is decided in ``canonical``.
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
    """The calls of an answer, wherever they stand."""
    if message.tool_calls or message.role != "assistant":
        return message.tool_calls
    quoted = read_quoted(message.content)
    return () if quoted is None else quoted.calls


def read_quoted(content: str | None) -> Quoted | None:
    """The calls that the end of a text quotes; ``None`` for any other text. Never raises."""
    if content is None or _MARK not in content:
        return None
    text, _, listing = content.rpartition(_MARK)
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
