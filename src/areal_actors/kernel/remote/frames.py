"""The wire format of frames. Both directions are plain bookkeeping, without sockets and without waiting.

::

    frame   = kind u8 · flags u8 · zero u16 · length u32 · id u64 · seconds f64 · payload      little-endian, 24 bytes
    message = one frame
            | a frame with the flag LARGE, whose payload is the lengths (u64) of the message's parts,
              and after it CHUNK frames with the bytes of these parts, one part after the other

The parts of a message are its structure (msgpack) and the raw buffers of its arrays. At most one large message is in
transit in each direction. Frames of the control lane pass between its chunks; messages of the data lane never overtake
each other.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from attrs import define, field, frozen, validators

from areal_actors.errors import ProtocolError

__all__ = [
    "CHUNK_BYTES",
    "DEFAULT_MESSAGE_BYTES",
    "Assembler",
    "Buffer",
    "Frame",
    "Kind",
    "Limits",
    "Outbox",
    "Outgoing",
]

CHUNK_BYTES = 256 * 1024
"""Largest payload of one frame. Larger messages are sent in chunks of this size, with control frames between them."""

DEFAULT_MESSAGE_BYTES = 1 << 30

_POSITIVE: Any = validators.gt(0)


@frozen(kw_only=True)
class Limits:
    """Bounds that a connection enforces, whatever the other side sends."""

    max_message_bytes: int = field(default=DEFAULT_MESSAGE_BYTES, validator=_POSITIVE)
    """Largest message, in bytes.

    The sender refuses a larger one; one that arrives nevertheless closes the connection, before memory is allocated for
    it.
    """

    window_messages: int = field(default=256, validator=_POSITIVE)
    """Messages per actor that may be on their way to its mailbox.

    The other side waits for credit before it sends more.
    """

    window_bytes: int = field(default=64 << 20, validator=_POSITIVE)
    """Bytes per actor that may be on their way to its mailbox; the message that crosses this limit is the last one."""

    max_pending_bytes: int = field(default=64 << 20, validator=_POSITIVE)
    """While more than this waits to be written, no new credit is granted.

    A peer that does not read gets no more work.
    """

    heartbeat_seconds: float = field(default=5.0, validator=_POSITIVE)
    """Interval of heartbeats; infinity sends none."""

    silence_seconds: float = field(default=15.0, validator=_POSITIVE)
    """Time without any byte from the other side after which it counts as unreachable."""

    hello_seconds: float = field(default=10.0, validator=_POSITIVE)
    """Time limit of the handshake."""

    cleanup_seconds: float = field(default=10.0, validator=_POSITIVE)
    """Time limit of clean-up: for the handler of a stream to end, and for the last messages to be written."""

    redial_seconds: float = field(default=0.1, validator=_POSITIVE)
    """Time that a lost connection waits before it reconnects; doubled after each failed attempt."""

    max_redial_seconds: float = field(default=5.0, validator=_POSITIVE)
    """Longest time that a lost connection waits before it reconnects."""


Buffer = bytes | bytearray | memoryview

_HEAD = struct.Struct("<BBHIQd")
_LENGTH = struct.Struct("<Q")
_LARGE = 1
_MAX_PARTS = CHUNK_BYTES // _LENGTH.size
_JOINED_BYTES = 64 * 1024
"""Small frames are joined up to about this size: one write for many costs a fraction of many writes."""


class Kind(IntEnum):
    """The kind of a frame. Requests, and the frames that end them, carry the id of the call."""

    ASK = 1
    TELL = 2
    STREAM = 3
    STOP = 4
    REPLY = 5
    ERROR = 6
    ITEM = 7
    END = 8
    CANCEL = 9
    TAKEN = 10
    CREDIT = 11
    DOWN = 12
    EXPOSED = 13
    PING = 14
    BYE = 15
    CHUNK = 16


_KINDS = {int(kind): kind for kind in Kind}


@define(eq=False)
class Frame:
    """A complete message as it arrived.

    ``seconds`` is the remaining time of a request (infinity without a deadline), or the number of an item of a stream.
    """

    kind: Kind
    id: int
    seconds: float
    parts: list[Buffer]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))


class Outgoing:
    """A message to be written. ``is_sent``: its first bytes may have left. ``is_large``: it is sent in chunks."""

    __slots__ = ("id", "is_large", "is_sent", "is_withdrawn", "kind", "num_bytes", "parts", "seconds")

    def __init__(self, kind: Kind, id: int, parts: Sequence[Buffer], seconds: float = 0.0) -> None:  # noqa: A002 - its name
        self.kind, self.id, self.parts, self.seconds = kind, id, parts, seconds
        self.num_bytes = sum(map(len, parts))
        self.is_large = len(parts) > 1 or self.num_bytes > CHUNK_BYTES
        self.is_sent = self.is_withdrawn = False

    def head(self) -> bytes:
        """Return its first frame: the whole message if it is small, otherwise the lengths of its parts."""
        if not self.is_large:
            payload = self.parts[0] if self.parts else b""
            return _HEAD.pack(self.kind, 0, 0, len(payload), self.id, self.seconds) + payload
        lengths = b"".join(_LENGTH.pack(len(part)) for part in self.parts)
        return _HEAD.pack(self.kind, _LARGE, 0, len(lengths), self.id, self.seconds) + lengths

    def chunks(self) -> Iterator[tuple[bytes, memoryview]]:
        """Iterate over the following frames, each as a head and a piece of a part."""
        for part in self.parts:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                yield _HEAD.pack(Kind.CHUNK, 0, 0, len(piece), self.id, 0.0), piece


class Outbox:
    """Messages that wait to be written, in two lanes. ``wake`` is called once, at the next arrival."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.wake: Callable[[], object] | None = None
        self._control: deque[Outgoing] = deque()
        self._data: deque[Outgoing] = deque()
        self._chunks: Iterator[tuple[bytes, memoryview]] | None = None

    def __bool__(self) -> bool:
        return bool(self._control or self._data or self._chunks is not None)

    def put(self, outgoing: Outgoing) -> None:
        """Append to the data lane, which keeps its order."""
        self._data.append(outgoing)
        self._note(outgoing)

    def put_ahead(self, outgoing: Outgoing) -> None:
        """Append to the control lane. A large message goes to the data lane instead, where it is sent in chunks."""
        (self._data if outgoing.is_large else self._control).append(outgoing)
        self._note(outgoing)

    def withdraw(self, outgoing: Outgoing) -> bool:
        """Remove a message that has not been written yet. Return whether that was possible."""
        if not outgoing.is_sent and not outgoing.is_withdrawn:
            outgoing.is_withdrawn = True
            self.num_bytes -= outgoing.num_bytes
            # The entry stays in the queue, but its buffers are freed.
            outgoing.parts = ()
        return outgoing.is_withdrawn

    def take(self) -> list[Buffer]:
        """Return the next buffers to write: small frames joined, then at most one chunk; empty if there is nothing.

        The caller should send them in one write: a separate write for the head of a chunk would cost the reader a
        wake-up.
        """
        small: list[Buffer] = []
        while self._control:
            self._begin(self._control.popleft(), small)
        size = sum(map(len, small))
        while self._chunks is None and self._data and size < _JOINED_BYTES:
            outgoing = self._data.popleft()
            # Withdrawn messages stay in the queue, so they are skipped here.
            if not outgoing.is_withdrawn:
                self._begin(outgoing, small)
                size += len(small[-1])
        chunk = None if self._chunks is None else next(self._chunks, None)
        if chunk is None:
            self._chunks = None
            return [b"".join(small)] if small else self.take() if self._data else []
        head, piece = chunk
        self.num_bytes -= len(piece)
        return [b"".join((*small, head)), piece]

    def _begin(self, outgoing: Outgoing, small: list[Buffer]) -> None:
        outgoing.is_sent = True
        small.append(outgoing.head())
        if outgoing.is_large:
            self._chunks = outgoing.chunks()
        else:
            self.num_bytes -= outgoing.num_bytes

    def _note(self, outgoing: Outgoing) -> None:
        self.num_bytes += outgoing.num_bytes
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()


class Assembler:
    """Assembles messages from bytes as they arrive, in pieces of any size.

    Raises:
        ProtocolError: raised by ``feed`` and ``advance`` for input that violates the protocol, before memory is
            allocated for it.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._bytes = bytearray()
        self._large: Frame | None = None
        self._holes: deque[memoryview] = deque()
        self._chunk_left = 0
        self._room = memoryview(bytearray(_JOINED_BYTES))

    @property
    def current_id(self) -> int | None:
        """Id of the large message that is arriving, or ``None``."""
        return None if self._large is None else self._large.id

    def targets(self) -> list[memoryview]:
        """Return the buffers to fill next.

        The bytes of a chunk go directly to their final place, followed by room for a head.

        The room is reused: fill the buffers, then call ``advance``.
        """
        if self._chunk_left:
            return [self._holes[0][: self._chunk_left], self._room[: _HEAD.size]]
        return [self._room]

    def advance(self, num_bytes: int) -> list[Frame]:
        """Return the messages that are complete after the first ``num_bytes`` of ``targets`` have been filled."""
        frames: list[Frame] = []
        in_place = min(num_bytes, self._chunk_left)
        if in_place:
            self._fill(in_place, frames)
        self._feed(self._room[: num_bytes - in_place], frames)
        return frames

    def feed(self, data: bytes) -> list[Frame]:
        """Return the messages that are complete with ``data``."""
        frames: list[Frame] = []
        self._feed(memoryview(data), frames)
        return frames

    def _feed(self, rest: memoryview, frames: list[Frame]) -> None:
        while rest:
            if self._chunk_left:
                piece = rest[: self._chunk_left]
                self._holes[0][: len(piece)] = piece
                self._fill(len(piece), frames)
                rest = rest[len(piece) :]
                continue
            if self._bytes:
                rest, self._bytes = memoryview(self._bytes + rest), bytearray()
            rest = self._parse(rest, frames)
            if not self._chunk_left:
                self._bytes += rest
                break

    def _parse(self, data: memoryview, frames: list[Frame]) -> memoryview:
        """Parse whole frames from ``data``, up to the head of a chunk; return the remaining bytes."""
        position = 0
        while len(data) - position >= _HEAD.size:
            code, flags, zero, length, call, seconds = _HEAD.unpack_from(data, position)
            kind = _KINDS.get(code)
            if kind is None or zero or flags > _LARGE or length > CHUNK_BYTES:
                raise ProtocolError(
                    f"no frame begins with kind {code}, flags {flags}, {length} bytes; this is another protocol"
                )
            body = position + _HEAD.size
            if kind is Kind.CHUNK:
                if self._large is None or call != self._large.id or not 0 < length <= len(self._holes[0]):
                    raise ProtocolError("a chunk belongs to no message")
                self._chunk_left = length
                return data[body:]
            if len(data) - body < length:
                break
            position = body + length
            # Copied, because the receive buffer is reused.
            payload = bytes(data[body:position])
            if flags == _LARGE:
                self._begin_large(kind, call, seconds, payload)
            else:
                frames.append(Frame(kind, call, seconds, [payload]))
        return data[position:]

    def _begin_large(self, kind: Kind, call: int, seconds: float, payload: bytes) -> None:
        if self._large is not None:
            raise ProtocolError("a large message began within another one")
        if not payload or len(payload) % _LENGTH.size:
            raise ProtocolError(f"a large message announces its parts in {len(payload)} bytes, which cannot be")
        lengths = [length for (length,) in _LENGTH.iter_unpack(payload)]
        # Checked before any allocation, so that an announcement alone cannot exhaust the memory.
        if sum(lengths) > self._max_message_bytes:
            raise ProtocolError(
                f"a message of {sum(lengths)} bytes is too large; at most {self._max_message_bytes} are taken "
                "(max_message_bytes)"
            )
        # ``bytearray`` would write zeros over memory that is about to be filled.
        parts: list[Buffer] = [np.empty(length, np.uint8).data for length in lengths]
        self._large = Frame(kind, call, seconds, parts)
        self._holes.extend(memoryview(part) for part in parts if len(part))
        if not self._holes:
            raise ProtocolError("a large message announces nothing but empty parts")

    def _fill(self, num_bytes: int, frames: list[Frame]) -> None:
        """Record that ``num_bytes`` of the present chunk are in place."""
        hole = self._holes[0]
        self._chunk_left -= num_bytes
        if num_bytes < len(hole):
            self._holes[0] = hole[num_bytes:]
        else:
            self._holes.popleft()
            if not self._holes and self._large is not None:
                frames.append(self._large)
                self._large = None
