"""What a client of any protocol keeps of a conversation, and how it echoes the answers in it.

A client keeps what it says in its own words (``Entry.wire``) and, beside them, what they mean (``Entry.keys``): the
meaning is what decides which histories are one, and is computed here without any code of ``cache``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from attrs import frozen

from areal_actors.domain import ChatMessage, ToolCall
from areal_actors.proxy.dialects.base import Dialect
from areal_actors.testing.strategies import ECHO_STYLES

__all__ = ["Client", "Entry", "Reply", "Wire", "echo", "key_of", "refuse_number", "rename", "say"]

Wire = dict[str, Any]
Key = tuple[Any, ...]


@frozen(kw_only=True)
class Reply:
    """An answer as its client reads it, and as it came."""

    interaction: str
    message: ChatMessage
    raw: Any


@frozen(kw_only=True)
class Entry:
    """One step of a conversation, in the client's words, with its meaning."""

    wire: tuple[Wire, ...]
    keys: tuple[Key, ...]
    is_faithful: bool = True
    """Whether the echo of an answer keeps enough for anybody to know it again."""


def say(role: str, text: str) -> Entry:
    """What is not an answer."""
    return Entry(wire=({"role": role, "content": text},), keys=((role, text),))


def key_of(message: ChatMessage) -> Key:
    """What every faithful echo of an answer has in common with it."""
    calls = tuple((call.name, _meaning(call.arguments)) for call in message.tool_calls)
    return ("assistant", (message.content or "").strip(), calls)


def _meaning(arguments: str) -> str:
    """Arguments as numbers, texts and so on; what is not JSON means itself."""
    try:
        return repr(_normal(json.loads(arguments.strip() or "{}", parse_constant=refuse_number)))
    except (ValueError, RecursionError):
        return arguments


def refuse_number(literal: str) -> Any:
    """For JSON readers: there is no such number."""
    raise ValueError(literal)


def _normal(value: Any) -> Any:
    if isinstance(value, float):
        return _normal_number(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)  # most clients read it so
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return sorted((key, _normal(item)) for key, item in value.items()) if isinstance(value, dict) else value


def _normal_number(value: float) -> float | int:
    if value in (float("inf"), float("-inf")):
        raise ValueError(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


class Client(Protocol):
    """One protocol."""

    dialect: Dialect
    styles: Sequence[str]
    """Its ways to word an echo, beside those of ``ECHO_STYLES``."""

    def body(self, system: Sequence[str], entries: Sequence[Entry], tools: Sequence[Wire], limit: int) -> Wire:
        """A request."""
        ...

    def read(self, document: Any) -> list[Reply]:
        """The answers of a finished request."""
        ...

    def read_stream(self, events: bytes) -> list[Reply]:
        """The answers of a stream."""
        ...

    def echo(self, reply: Reply, message: ChatMessage, style: str) -> list[Wire]:
        """``message``, which is what a client has kept of ``reply``, in its own words."""
        ...

    def result(self, call: ToolCall, text: str) -> Wire:
        """The result of a call."""
        ...


def echo(client: Client, reply: Reply, rng: Random) -> Entry:
    """An answer as some client sends it back."""
    if rng.random() < 0.3:
        message, style = reply.message, client.styles[0]
    else:
        message, style = ECHO_STYLES[rng.choice(_STYLES)](reply.message), rng.choice(client.styles)
    is_lost = style == "ids renamed" and message.content != reply.message.content
    return Entry(wire=tuple(client.echo(reply, message, style)), keys=(key_of(reply.message),), is_faithful=not is_lost)


_STYLES = tuple(ECHO_STYLES)


def rename(call_id: str) -> str:
    """Another id for a call, always the same one."""
    return "mine_" + call_id[-8:]
