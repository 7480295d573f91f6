"""Bodies that begin as an earlier one of the same client: their known messages are neither parsed nor checked again.

An agent sends its whole conversation with every request, so that without this a turn costs time linear in the turns
before it. A body is split at the end of its messages::

    {"model": "m", "messages": [{...}, {...}   ], "temperature": 1}
    ├── head ─────────────────┤
    ├── prefix ────────────────────────────────┤├── tail ──────────┤

If the next body begins with the prefix, its JSON is parsed as head + mark + rest, where the mark is a text in place of
the known messages. What a parser of JSON does after the prefix depends only on the rest, so that the result is that of
the whole body if the mark is found where the messages were. If it is not (a key that occurs twice), or if anything is
wrong with the rest, the whole body is parsed. The first split of a conversation is found by trying brackets, and proved
in the same way: the messages alone are the elements of a list, and head + mark + tail is a body with the mark as its
only message.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import orjson
from attrs import frozen

from areal_actors.domain import ChatMessage
from areal_actors.errors import InvalidRequest
from areal_actors.proxy.dialects.chat.request import FollowingMessages
from areal_actors.proxy.dialects.fields import parse_json

__all__ = ["MIN_BYTES", "KnownPrefix", "PrefixCache"]

MIN_BYTES = 2048
"""Shorter bodies are parsed in less time than they are found."""
_MAX_BYTES = 32 * 2**20
_MAX_PREFIXES = 4
"""Conversations of one client: an agent and a few sub-agents that talk in turns."""
_MAX_TRIED = 16
_START = re.compile(rb'"messages"\s*:\s*\[')
_END = re.compile(rb'\}\s*(\])(?=\s*,\s*"[^"\\]*"\s*:|\s*\}\s*\Z)')
_MARK = f"areal-known-{secrets.token_hex(16)}"  # no client can send it by chance or on purpose
_MARK_JSON = orjson.dumps(_MARK)


@frozen
class KnownPrefix:
    """The beginning of a body, up to the end of its messages, and these as they were parsed."""

    prefix: bytes
    head: bytes
    tail: bytes
    messages: tuple[ChatMessage, ...]

    def parse(self, raw: bytes) -> dict[str, Any] | None:
        """Return the body ``raw``, which begins with the prefix, without the known messages.

        ``None`` if it has to be parsed as a whole.
        """
        body = _parse_marked(self.head, raw[len(self.prefix) :])
        if body is not None:
            del body["messages"][0]
        return body

    def restore(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of ``parse`` with the known messages before its own."""
        return {**body, "messages": FollowingMessages(body["messages"], known=self.messages)}


class PrefixCache:
    """The prefixes that were seen last, by client. They have at most 32 MiB."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[KnownPrefix, ...]] = OrderedDict()
        self._num_bytes = 0

    def find(self, client: Hashable, raw: bytes) -> KnownPrefix | None:
        """Return the longest known prefix of ``raw``."""
        found = [known for known in self._known.get(client, ()) if raw.startswith(known.prefix)]
        return max(found, key=lambda known: len(known.prefix), default=None)

    def note(self, client: Hashable, raw: bytes, before: KnownPrefix | None, messages: tuple[ChatMessage, ...]) -> None:
        """Remember the prefix of ``raw``, a body with these messages. It takes the place of ``before``."""
        known = _split(raw, messages, before)
        if known is None:
            return
        others = self._pop(client)
        kept = (known, *(other for other in others if other is not before))[:_MAX_PREFIXES]
        self._known[client] = kept
        self._num_bytes += sum(len(each.prefix) for each in kept)
        while self._num_bytes > _MAX_BYTES:
            self._pop(next(iter(self._known)))

    def _pop(self, client: Hashable) -> tuple[KnownPrefix, ...]:
        popped = self._known.pop(client, ())
        self._num_bytes -= sum(len(each.prefix) for each in popped)
        return popped


def _split(raw: bytes, messages: tuple[ChatMessage, ...], before: KnownPrefix | None) -> KnownPrefix | None:
    """Return the prefix of ``raw``; ``None`` if its end is not found or not proved."""
    if before is not None:
        start, head, first = len(before.prefix), before.head, b"[0"
        # Most requests of a conversation end alike. An equal tail was proved before.
        end = len(raw) - len(before.tail)
        if end >= start and raw.endswith(before.tail) and _is_list(first + raw[start:end] + b"]"):
            return KnownPrefix(raw[:end], head, before.tail, messages)
    else:
        found = _START.search(raw)
        if found is None:
            return None
        start, head, first = found.end(), raw[: found.end()], b"["
    # Objects that end where a key or the end of the body follows: the messages, and a few parts of tools or messages.
    ends = [match.start(1) for match in _END.finditer(raw, start)]
    for end in (*ends[: -_MAX_TRIED - 1 : -1], *ends[:_MAX_TRIED]):
        if _is_list(first + raw[start:end] + b"]"):
            body = _parse_marked(head, raw[end:])
            if body is not None and len(body["messages"]) == 1:
                return KnownPrefix(raw[:end], head, raw[end:], messages)
    return None


def _is_list(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _parse_marked(head: bytes, rest: bytes) -> dict[str, Any] | None:
    """Return the body whose messages begin with the mark; ``None`` if there is none."""
    try:
        body = parse_json(head + _MARK_JSON + rest, "The body")
    except InvalidRequest:
        return None
    messages = body.get("messages") if isinstance(body, dict) else None
    return body if isinstance(messages, list) and messages[:1] == [_MARK] else None
