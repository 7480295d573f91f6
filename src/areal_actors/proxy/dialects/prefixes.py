"""Bodies that begin as an earlier one of the same client: their known messages are neither parsed nor checked again.

An agent sends its whole conversation with every request, so that without this a turn costs time linear in the turns
before it. A body has a list of messages (``input`` in Responses, whose elements are items)::

    {"model": "m", "messages": [{...}, {...}, {...}  ], "temperature": 1}
    ├── head ─────────────────┤
                               ├── elements ───────┤
                               ├── known ───┤├── rest ───────────────┤

If the elements of the next body begin with the same bytes, those that lie within these bytes are known, and the body is
parsed as head + mark + rest, where the mark is a text in place of the known elements. What a parser of JSON does after
them depends only on the rest, so that the result is that of the whole body if the mark is found at the start of the
list. If it is not (a key that occurs twice), or if anything is wrong with the rest, the whole body is parsed. Head and
rest may change from one body to the next, as the system prompt of a coding agent does. Elements may change as well: a
client that marks its last messages for caching (``cache_control``) changes them when the marks move on, and is
recognised up to the first of them.

The places of the elements of a first body are looked up when a second one comes, so that a single request costs nothing
more. They are proved in the same way: head + mark + rest is a body with the mark as its only message.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from attrs import define, field, frozen

from areal_actors.domain import ChatMessage
from areal_actors.errors import InvalidRequest
from areal_actors.proxy.dialects.fields import parse_json, parse_object

__all__ = ["MIN_BYTES", "OPEN", "MessageList", "PrefixCache", "Reading"]

MIN_BYTES = 2048
"""Shorter bodies are parsed in less time than they are found."""
_MAX_BYTES = 32 * 2**20
_MAX_PREFIXES = 4
"""Conversations of one client: an agent and a few sub-agents that talk in turns."""
_MAX_TRIED = 16
_COMPARED = 64
"""Bytes of the first elements that tell whether one conversation continues another."""
OPEN = -1
"""The number of messages after an element whose last message the next element may change."""
_BETWEEN = re.compile(r"[ \t\n\r]*,?[ \t\n\r]*")
_MARK = f"areal-known-{secrets.token_hex(16)}"  # no client can send it by chance or on purpose
_MARK_JSON = orjson.dumps(_MARK)


class MessageList(list[Any]):
    """The elements of a body's list of messages, without ``num_known`` ones at its start that were parsed before.

    ``known`` are the messages of these. The parser calls ``note`` for the whole list.
    """

    def __init__(self, new: Iterable[Any], *, known: tuple[ChatMessage, ...] = (), num_known: int = 0) -> None:
        super().__init__(new)
        self.known = known
        self.num_known = num_known
        self.num_lasting = len(self)
        """How many of the elements mean the same in every request."""
        self.messages: tuple[ChatMessage, ...] | None = None
        self.counts: Sequence[int] = ()

    def with_elements(self, new: Iterable[Any], *, num_lasting: int | None = None) -> MessageList:
        """Return the list with others in place of its own elements, one for each."""
        changed = MessageList(new, known=self.known, num_known=self.num_known)
        changed.num_lasting = self.num_lasting if num_lasting is None else min(num_lasting, self.num_lasting)
        return changed

    def note(self, messages: tuple[ChatMessage, ...], counts: Sequence[int]) -> None:
        """Store what the list was parsed to: all messages, and their number after each of its own elements.

        The number is negative if the next element may change the last message.
        """
        self.messages, self.counts = messages, counts


@define(eq=False)
class _Conversation:
    """A body, and the messages that its list was parsed to.

    ``counts`` are their numbers after each element, or ``OPEN``. ``head`` is what comes before the first element, and
    ``elements`` the text up to the end of the last one. ``ends`` are where each one ends in it.
    """

    raw: bytes
    """The body until its elements were located, and then nothing."""
    messages: tuple[ChatMessage, ...]
    counts: array[int]
    size: int
    """The bytes of the body."""
    head: bytes = b""
    elements: bytes = b""
    ends: array[int] = field(factory=lambda: array("q"))
    _start: int | None = field(default=None, init=False)

    @classmethod
    def create(
        cls, raw: bytes, messages: tuple[ChatMessage, ...], counts: array[int], start: int, ends: array[int]
    ) -> _Conversation:
        """Return the conversation in ``raw``, whose elements end at ``ends`` from ``start`` on."""
        elements = raw[start : start + ends[-1]] if ends else b""
        return cls(b"", messages, counts, size=len(raw), head=raw[:start], elements=elements, ends=ends)

    def begins(self, opening: re.Pattern[bytes], text: bytes) -> bool:
        """Return whether the list begins with ``text``, before its elements are located."""
        if self._start is None:
            self._start = _find_start(opening, self.raw)
        return self.raw.startswith(text, self._start)

    def locate(self, opening: re.Pattern[bytes], name: str) -> bool:
        """Find the elements. Return whether their places are proved."""
        if not self.counts:
            return False
        for number, found in enumerate(opening.finditer(self.raw)):
            if number == _MAX_TRIED:
                break
            ends = _find_ends(self.raw, found.end(), len(self.counts))
            if ends is None:
                continue
            body = _parse_marked(self.raw[: found.end()], self.raw[found.end() + ends[-1] :], name)
            if body is not None and len(body[name]) == 1:
                self.head, self.ends = self.raw[: found.end()], ends
                self.elements, self.raw = self.raw[found.end() : found.end() + ends[-1]], b""
                return True
        self.counts = self.counts[:0]  # not again
        return False

    def count_known(self, raw: bytes, start: int, *, minimum: int) -> int:
        """Return how many elements at the start of this conversation are those of ``raw`` from ``start`` on.

        If there are fewer than ``minimum``, it may return 0.
        """
        # Most conversations go on, or are others.
        if raw.startswith(self.elements, start):
            num = len(self.ends)
        elif len(self.ends) < minimum or not raw.startswith(self.elements[: self.ends[minimum - 1]], start):
            return 0
        else:
            mine, other = np.frombuffer(self.elements, np.uint8), np.frombuffer(raw, np.uint8)[start:]
            size = min(len(mine), len(other))
            unequal = mine[:size] != other[:size]
            first = int(unequal.argmax())
            num = bisect_right(self.ends, first if unequal[first] else size)
        while num and self.counts[num - 1] < 0:
            num -= 1
        return num


@frozen
class Reading:
    """A body that was read: its object, in which the list of messages is a ``MessageList``, and where it was found."""

    cache: PrefixCache
    client: Hashable
    raw: bytes
    body: dict[str, Any]
    before: _Conversation | None = None
    num_known: int = 0
    start: int = 0

    def note(self, body: Mapping[str, Any]) -> None:
        """Remember the conversation, once its list was parsed, which is in ``body`` as it was passed to the parser."""
        if isinstance(messages := body.get(self.cache.name), MessageList):
            self.cache.note(self, messages)


class PrefixCache:
    """The conversations that were seen last, by client. Their bodies have at most 32 MiB.

    ``name`` is the field that has the messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._opening = re.compile(rb'"%b"[ \t\n\r]*:[ \t\n\r]*\[[ \t\n\r]*' % name.encode())
        self._known: OrderedDict[Hashable, tuple[_Conversation, ...]] = OrderedDict()
        self._num_bytes = 0

    def read(self, client: Hashable, raw: bytes) -> Reading:
        """Return the object in ``raw`` without its known messages. Raises ``InvalidRequest`` if it is none."""
        best, num_best, start = self._find(client, raw)
        body = None
        if best is not None:
            body = _parse_marked(raw[:start], raw[start + best.ends[num_best - 1] :], self.name)
        if best is None or body is None:
            body = parse_object(raw)
            if isinstance(messages := body.get(self.name), list):
                body[self.name] = MessageList(messages)
            return Reading(self, client, raw, body)
        known = best.messages[: best.counts[num_best - 1]]
        body[self.name] = MessageList(body[self.name][1:], known=known, num_known=num_best)
        return Reading(self, client, raw, body, best, num_best, start)

    def _find(self, client: Hashable, raw: bytes) -> tuple[_Conversation | None, int, int]:
        """Return the conversation that has most elements in common with ``raw``, their number, and where they begin."""
        best, num_best, start = None, 0, 0
        conversations = self._known.get(client, ())
        has_heads = all(known.ends and raw.startswith(known.head) for known in conversations)
        opened = 0 if has_heads else _find_start(self._opening, raw)
        first = raw[opened : opened + _COMPARED]
        for known in conversations:
            if not known.ends and not (known.begins(self._opening, first) and known.locate(self._opening, self.name)):
                continue
            at = len(known.head) if raw.startswith(known.head) else opened
            num = known.count_known(raw, at, minimum=num_best + 1)
            if num > num_best:
                best, num_best, start = known, num, at
        return best, num_best, start

    def note(self, reading: Reading, messages: MessageList) -> None:
        """Remember the conversation of a body, whose list was parsed."""
        if messages.messages is None:
            return
        own = array("q", messages.counts)
        for index in range(messages.num_lasting, len(own)):
            own[index] = OPEN
        before = reading.before
        if before is None:
            noted = _Conversation(reading.raw, messages.messages, own, size=len(reading.raw))
        else:
            end = before.ends[reading.num_known - 1]
            more = _find_ends(reading.raw, reading.start + end, len(own))
            if more is None:
                return
            ends = before.ends[: reading.num_known]
            ends.extend(end + each for each in more)
            counts = before.counts[: reading.num_known] + own
            noted = _Conversation.create(reading.raw, messages.messages, counts, reading.start, ends)
            if noted.messages[: len(before.messages)] != before.messages:
                before = None  # another conversation that begins alike
        kept = (noted, *(other for other in self._pop(reading.client) if other is not before))[:_MAX_PREFIXES]
        self._known[reading.client] = kept
        self._num_bytes += sum(each.size for each in kept)
        while self._num_bytes > _MAX_BYTES:
            self._pop(next(iter(self._known)))

    def _pop(self, client: Hashable) -> tuple[_Conversation, ...]:
        popped = self._known.pop(client, ())
        self._num_bytes -= sum(each.size for each in popped)
        return popped


_decode = json.JSONDecoder().raw_decode


def _find_start(opening: re.Pattern[bytes], raw: bytes) -> int:
    """Return where the first list of messages in ``raw`` seems to begin; its end if there is none."""
    found = opening.search(raw)
    return len(raw) if found is None else found.end()


def _find_ends(raw: bytes, start: int, number: int) -> array[int] | None:
    """Return where each of so many elements of a list ends, from ``start`` on; ``None`` if there are not as many."""
    # As Latin-1, one character is one byte. The structure of JSON is ASCII, and the texts are of no interest.
    text, at, ends = raw[start:].decode("latin-1"), 0, array("q")
    try:
        for _ in range(number):
            between = _BETWEEN.match(text, at)
            assert between is not None
            _, at = _decode(text, between.end())
            ends.append(at)
    except (ValueError, RecursionError):
        return None
    return ends


def _parse_marked(head: bytes, rest: bytes, name: str) -> dict[str, Any] | None:
    """Return the body whose list of messages begins with the mark; ``None`` if there is none."""
    try:
        body = parse_json(head + _MARK_JSON + rest, "The body")
    except InvalidRequest:
        return None
    messages = body.get(name) if isinstance(body, dict) else None
    return body if isinstance(messages, list) and messages[:1] == [_MARK] else None
