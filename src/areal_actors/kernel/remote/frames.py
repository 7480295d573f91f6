"""The wire format. Both directions are plain bookkeeping, without sockets and without waiting.

::

    frame    = is_chunk u8 · number u32 · length u32 · payload                        little-endian, 9 bytes and payload
    payload  = msgpack [kind, id, seconds, [length of each buffer], body]             a message
             | bytes of a buffer of the message before                                 a chunk

The body of a message is msgpack as well (``codec``); the raw buffers of its arrays follow in chunks, one buffer after
the other. At most one message with buffers is in transit in each direction. Frames of the control lane pass between its
chunks; messages of the data lane never overtake each other. Frames are numbered, so that lost or repeated bytes are
noticed.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from attrs import define, field, frozen, validators

from areal_actors.errors import ProtocolError

CHUNK_BYTES = 256 * 1024
"""Largest piece of a buffer in one frame; control frames pass between two of them."""

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
    """Told messages per actor that may be on their way to its mailbox; the other side waits before it sends more."""

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

_HEAD = struct.Struct("<BII")
_NUM_NUMBERS = 1 << 32
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(tuple[int, int, float, list[int], bytes]).decode
_JOINED_BYTES = 64 * 1024
"""Small messages are joined up to about this size: one write for many costs a fraction of many writes."""


class Kind(IntEnum):
    """The kind of a message. Requests, and the messages that end them, carry the id of the call."""

    ASK = 1
    TELL = 2
    STREAM = 3
    REPLY = 4
    ERROR = 5
    ITEM = 6
    END = 7
    CANCEL = 8
    TAKEN = 9
    DOWN = 10
    EXPOSED = 11
    PING = 12
    BYE = 13


_KINDS = {int(kind): kind for kind in Kind}


@define(eq=False)
class Frame:
    """A complete message as it arrived: its body, then its buffers.

    ``seconds`` is the remaining time of a request; infinity without a deadline.
    """

    kind: Kind
    id: int
    seconds: float
    parts: list[Buffer]


@define(eq=False)
class Outgoing:
    """A message to be written: its body, then its buffers."""

    kind: Kind
    id: int = 0
    parts: Sequence[Buffer] = (b"",)
    seconds: float = 0.0
    is_sent: bool = field(default=False, init=False)
    """True if its first bytes may have left."""

    def envelope(self) -> bytes:
        """Return the payload of its first frame."""
        body, *buffers = self.parts
        return _ENCODE((self.kind, self.id, self.seconds, list(map(len, buffers)), body))

    def chunks(self) -> Iterator[memoryview]:
        """Iterate over the payloads of the following frames."""
        for part in self.parts[1:]:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]


class Outbox:
    """Messages that wait to be written, in two lanes. ``wake`` is called once, at the next arrival."""

    def __init__(self) -> None:
        self.wake: Callable[[], object] | None = None
        self._control: deque[Outgoing] = deque()
        self._data: deque[Outgoing] = deque()
        self._chunks: Iterator[memoryview] = iter(())
        self._next_chunk: memoryview | None = None
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._control or self._data or self._next_chunk is not None)

    def put(self, outgoing: Outgoing, *, is_ahead: bool = False) -> None:
        """Append to the data lane, which keeps its order, or to the control lane, which takes no buffers."""
        lane = self._control if is_ahead and len(outgoing.parts) == 1 else self._data
        lane.append(outgoing)
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()

    def withdraw(self, outgoing: Outgoing) -> bool:
        """Remove a message of the data lane that has not been written yet. Return whether that was possible."""
        if not outgoing.is_sent:
            self._data.remove(outgoing)
        return not outgoing.is_sent

    def take(self) -> bytes:
        """Return the next bytes to write: small messages joined, then at most one chunk; empty if there is nothing."""
        frames: list[Buffer] = []
        while self._control:
            self._begin(self._control.popleft(), frames)
        while self._next_chunk is None and self._data and sum(map(len, frames)) < _JOINED_BYTES:
            outgoing = self._data.popleft()
            self._begin(outgoing, frames)
            self._chunks = outgoing.chunks()
            self._next_chunk = next(self._chunks, None)
        if self._next_chunk is not None:
            self._append(frames, self._next_chunk, is_chunk=True)
            self._next_chunk = next(self._chunks, None)
        return b"".join(frames)

    def _begin(self, outgoing: Outgoing, frames: list[Buffer]) -> None:
        outgoing.is_sent = True
        self._append(frames, outgoing.envelope(), is_chunk=False)

    def _append(self, frames: list[Buffer], payload: Buffer, *, is_chunk: bool) -> None:
        frames += (_HEAD.pack(is_chunk, self._number, len(payload)), payload)
        self._number = (self._number + 1) % _NUM_NUMBERS


class Assembler:
    """Assembles messages from bytes as they arrive, in pieces of any size."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._bytes = bytearray()
        self._number = 0
        self._large: Frame | None = None
        self._holes: deque[memoryview] = deque()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the messages that are complete with ``data``.

        Raises:
            ProtocolError: it violates the protocol; raised before memory is allocated for it.
        """
        frames: list[Frame] = []
        start = 0
        self._bytes += data
        with memoryview(self._bytes) as view:
            while len(view) - start >= _HEAD.size:
                is_chunk, number, length = _HEAD.unpack_from(view, start)
                self._check(is_chunk, number, length)
                body = start + _HEAD.size
                if len(view) - body < length:
                    break
                start = body + length
                self._number = (number + 1) % _NUM_NUMBERS
                with view[body:start] as payload:
                    frame = self._fill(payload) if is_chunk else self._open(bytes(payload))
                if frame is not None:
                    frames.append(frame)
        del self._bytes[:start]
        return frames

    def _check(self, is_chunk: int, number: int, length: int) -> None:
        if is_chunk > 1 or number != self._number:
            raise ProtocolError(f"frame {self._number} is due, not one that begins with {is_chunk}, {number}")
        if is_chunk and (self._large is None or not 0 < length <= min(CHUNK_BYTES, len(self._holes[0]))):
            raise ProtocolError("a chunk belongs to no message")
        # The lengths of buffers, which are larger than 8 KiB each, come on top of the body.
        self._check_size(length - length // 512 - 64)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_message_bytes:
            raise ProtocolError(
                f"a message of {num_bytes} bytes is too large; at most {self._max_message_bytes} are taken "
                "(max_message_bytes)"
            )

    def _open(self, payload: bytes) -> Frame | None:
        """Return the message of ``payload`` if it has no buffers; otherwise prepare to receive them."""
        try:
            code, call, seconds, lengths, body = _DECODE(payload)
            kind = _KINDS[code]
        except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
            raise ProtocolError(f"a frame is no message: {error}") from None
        # NaN as a deadline would break the event loop's ordering of timers.
        if math.isnan(seconds) or min(call, *lengths, 0) < 0:
            raise ProtocolError(f"a message of kind {kind.name} has wrong numbers")
        self._check_size(len(body) + sum(lengths))
        # ``bytearray`` would write zeros over memory that is about to be filled.
        buffers: list[Buffer] = [np.empty(length, np.uint8).data for length in lengths]
        frame = Frame(kind, call, seconds, [body, *buffers])
        if not sum(lengths):
            return frame
        if self._large is not None:
            raise ProtocolError("a message with buffers began within another one")
        self._large = frame
        self._holes.extend(memoryview(buffer) for buffer in buffers if len(buffer))
        return None

    def _fill(self, payload: memoryview) -> Frame | None:
        """Put a chunk in its place. Return its message if that is complete."""
        hole = self._holes.popleft()
        hole[: len(payload)] = payload
        if len(payload) < len(hole):
            self._holes.appendleft(hole[len(payload) :])
        if self._holes:
            return None
        frame, self._large = self._large, None
        return frame
