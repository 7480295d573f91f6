"""The wire format.

::

    frame   = number u32 · length u32 · payload · buffers                    little-endian
    payload = msgpack [kind, id, seconds, [length of each buffer], body]

The body of a message is msgpack as well (``codec``); the raw buffers of its arrays follow it. Messages never overtake
each other. Frames are numbered, so that bytes which are no frame are noticed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from attrs import define, field, frozen, validators

from areal_actors.errors import ProtocolError

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

_HEAD = struct.Struct("<II")
_NUM_NUMBERS = 1 << 32
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(tuple[int, int, float, list[int], bytes]).decode


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

    def frame(self, number: int) -> list[Buffer]:
        """Return the bytes of the message as the frame of this number: its head with the payload, then its buffers."""
        body, *buffers = self.parts
        payload = _ENCODE((self.kind, self.id, self.seconds, list(map(len, buffers)), body))
        return [_HEAD.pack(number % _NUM_NUMBERS, len(payload)) + payload, *buffers]


class FrameReader:
    """Reads messages from bytes that arrive in pieces of any size. ``receive`` returns the next piece."""

    def __init__(self, receive: Callable[[], Awaitable[bytes]], max_message_bytes: int) -> None:
        self._receive = receive
        self._max_message_bytes = max_message_bytes
        self._bytes = bytearray()
        self._number = 0

    async def read(self) -> Frame:
        """Return the next message.

        Raises:
            ProtocolError: the bytes violate the protocol; raised before memory is allocated for them.
        """
        number, length = _HEAD.unpack(await self._take(_HEAD.size))
        if number != self._number:
            raise ProtocolError(f"frame {self._number} is due, not {number}")
        self._number = (number + 1) % _NUM_NUMBERS
        # The lengths of buffers, which are larger than 8 KiB each, come on top of the body.
        self._check_size(length - length // 512 - 64)
        try:
            code, call, seconds, lengths, body = _DECODE(await self._take(length))
            kind = _KINDS[code]
        except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
            raise ProtocolError(f"a frame is no message: {error}") from None
        # NaN as a deadline would break the event loop's ordering of timers.
        if math.isnan(seconds) or min(call, *lengths, 0) < 0:
            raise ProtocolError(f"a message of kind {kind.name} has wrong numbers")
        self._check_size(len(body) + sum(lengths))
        return Frame(kind, call, seconds, [body, *[await self._take_buffer(length) for length in lengths]])

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_message_bytes:
            raise ProtocolError(
                f"a message of {num_bytes} bytes is too large; at most {self._max_message_bytes} are taken "
                "(max_message_bytes)"
            )

    async def _take(self, num_bytes: int) -> bytes:
        while len(self._bytes) < num_bytes:
            self._bytes += await self._receive()
        taken = bytes(self._bytes[:num_bytes])
        del self._bytes[:num_bytes]
        return taken

    async def _take_buffer(self, num_bytes: int) -> Buffer:
        """Return the next bytes as memory that can be written; what arrives for it is copied once."""
        # ``bytearray`` would write zeros over memory that is about to be filled.
        buffer = np.empty(num_bytes, np.uint8).data
        piece, start = bytes(self._bytes[:num_bytes]), 0
        del self._bytes[:num_bytes]
        while True:
            end = min(start + len(piece), num_bytes)
            buffer[start:end] = piece[: end - start]
            self._bytes += piece[end - start :]
            start = end
            if start == num_bytes:
                return buffer
            piece = await self._receive()
