"""Connections whose requests have the common form: read, answered and kept alive without Hypercorn's own protocol.

Hypercorn accepts connections and serves every request that is not in this form. A request is in the common form if its
head, as httptools parses it, consists of a method, a path and headers of printable ASCII that h11 reads in the same
way, with one ``host`` and at most one ``content-length``. ``read_head`` accepts nothing else: a body in chunks,
``Expect``, an upgrade, HTTP/1.0, or any malformed byte leaves the connection to Hypercorn from that request on, with
the bytes that were read.

The application runs in the task of its connection. That, one write per answer and one timer per connection cost a
quarter of what Hypercorn's tasks, queues and events do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from itertools import starmap
from time import time
from typing import Any, Protocol
from urllib.parse import unquote

import anyio
from attrs import frozen
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from areal_actors.lib.loops import Loop, Scope, Signal

__all__ = [
    "ON_DISCONNECT",
    "TAKE_BODY",
    "AsyncioConnection",
    "Connection",
    "Head",
    "TrioConnection",
    "read_head",
    "with_bodies_read",
]

_log = logging.getLogger("areal_actors.proxy.hypercorn")

ON_DISCONNECT = "areal.on_disconnect"
"""The key in a scope of a function that takes a callback: it is called once when the client has disconnected."""

TAKE_BODY = "areal.take_body"
"""The key in a scope of a function that returns the body if all of it has arrived, in place of ``receive``."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
"""Some clients, such as h2load, take an answer without a reason for a failed one."""
_MAX_HEAD = 64 * 1024
_MAX_READ = 64 * 1024
_DISCARD_SECONDS = 2.0
"""How long a client may go on to send a body that was not wanted."""
_MAX_AHEAD = 64 * 1024
"""Bytes behind the current request after which nothing more is read until it is answered."""

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
Address = tuple[str, int] | None


# ------------------------------------------------------------------------------------------------------------ requests


@frozen
class Head:
    """The head of a request. ``length`` is that of its body in bytes."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    length: int


_FIRST_LINE = re.compile(rb"(GET|POST|DELETE) (/[!-~]*) HTTP/1\.1\r\n")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[ -~]*")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_FRAMING = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"http2-settings", b"te", b"trailer"})


class _Headers:
    """Collects the headers that ``httptools`` finds."""

    def __init__(self) -> None:
        self.found: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.found.append((name.lower(), value.rstrip(b" ")))


@lru_cache(maxsize=4096)
def _is_plain(name: bytes, value: bytes) -> bool:
    """Return whether every parser reads this header in one way, and it says nothing uncommon about the connection."""
    return (
        name not in _FRAMING
        and (name != b"connection" or value.lower() == b"keep-alive")
        and (name != b"content-length" or _LENGTH.fullmatch(value) is not None)
        and _NAME.fullmatch(name) is not None
        and _VALUE.fullmatch(value) is not None
    )


_LENGTH_LINE = re.compile(rb"\r\ncontent-length: ([0-9]{1,15})(?=\r\n|\Z)", re.IGNORECASE)
_EMPTY = (b"content-length", b"0")
_MAX_KNOWN = 2048
"""Bytes of a head that is kept, in case it is sent again."""


def read_head(data: bytes) -> Head | None:
    """Return the head that consists of ``data`` without the empty line at its end; ``None`` for an uncommon one."""
    # A client sends the same head again and again, but for the length of its body.
    found = _LENGTH_LINE.search(data)
    if found is not None:
        data = data[: found.start(1)] + b"0" + data[found.end(1) :]
    head = _parse_known(data) if len(data) <= _MAX_KNOWN else _parse_head(data)
    if head is None:
        return None
    headers = [*head.headers]
    if found is None:
        return Head(head.method, head.target, headers, head.length)
    headers[headers.index(_EMPTY)] = b"content-length", found[1]
    return Head(head.method, head.target, headers, int(found[1]))


def _parse_head(data: bytes) -> Head | None:
    data += b"\r\n\r\n"
    start = _FIRST_LINE.match(data)
    # llhttp accepts first lines that h11 refuses (two spaces), and a line feed alone as the end of a line.
    if start is None or data.count(b"\n") != data.count(b"\r\n") or data.find(b"\r\n\r\n") != len(data) - 4:
        return None
    headers = _Headers()
    try:
        HttpRequestParser(headers).feed_data(data)
    except (HttpParserError, HttpParserUpgrade):
        return None
    if not all(starmap(_is_plain, headers.found)):
        return None
    hosts = [value for name, value in headers.found if name == b"host"]
    lengths = [int(value) for name, value in headers.found if name == b"content-length"]
    if len(hosts) != 1 or len(lengths) > 1:
        return None
    return Head(start[1].decode(), start[2], headers.found, lengths[0] if lengths else 0)


_parse_known = lru_cache(maxsize=2048)(_parse_head)


# --------------------------------------------------------------------------------------------------------- connections


class Connection(ABC):
    """One client's connection. Requests are answered one after another by ``app``, in the task of ``serve``."""

    def __init__(
        self, app: Application, now: Callable[[], float], *, client: Address, server: Address, idle_seconds: float
    ) -> None:
        self.unread = bytearray()
        """Bytes that were read and belong to no request that was served here."""
        self.has_left = False
        """Whether the client sends nothing more."""
        self.is_broken = False
        """Whether nothing more can be sent."""
        self.is_closing = False
        """Whether the server ends: no request is read after the present one."""
        self._app = app
        self.now = now
        self._client = client
        self._server = server
        self._idle_seconds = idle_seconds
        self._on_disconnect: Callable[[], object] | None = None

    @abstractmethod
    async def wait(self, deadline: float = math.inf) -> None:
        """Wait until more was read, the client has left, the connection closes, or the deadline has passed."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send ``data``, as fast as the client takes it. Does nothing if the connection is broken."""

    @abstractmethod
    def wake(self) -> None:
        """End every ``wait``."""

    def close_when_idle(self) -> None:
        """Read no request after the present one."""
        self.is_closing = True
        self.wake()

    async def serve(self) -> bool:
        """Answer requests; return whether ``unread`` begins with one that Hypercorn has to read."""
        while (head := await self._read_head()) is not None:
            if not await self._answer(head) or self.is_closing:
                return False
        return bool(self.unread) and not (self.is_closing or self.is_broken)

    async def _read_head(self) -> Head | None:
        """Return the next request without its body; ``None`` at the end, or for one that is not in the common form."""
        searched, deadline = 0, math.inf
        while (end := self.unread.find(b"\r\n\r\n", searched)) < 0:
            if self.has_left or self.is_closing or len(self.unread) > _MAX_HEAD:
                return None
            searched = max(len(self.unread) - 3, 0)
            deadline = min(deadline, self.now() + self._idle_seconds)
            await self.wait(deadline)
            if len(self.unread) < searched + 4 and self.now() >= deadline:
                self.unread.clear()
                return None
        head = read_head(bytes(self.unread[:end])) if end <= _MAX_HEAD else None
        if head is not None:
            del self.unread[: end + 4]
        return head

    async def _answer(self, head: Head) -> bool:
        """Run the application; return whether the connection can serve another request."""
        request = _Request(self, head.length)
        path, _, query = head.target.partition(b"?")
        text = path.decode()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": head.method,
            "scheme": "http",
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": head.headers,
            "client": self._client,
            "server": self._server,
            "state": {},
            "extensions": {},
            ON_DISCONNECT: self.call_on_disconnect,
            TAKE_BODY: request.take_body,
        }
        try:
            await self._app(scope, request.receive, request.send)
        except Exception:  # noqa: BLE001 - it ends this request only, as with Hypercorn
            _log.exception("Error in ASGI Framework")
        finally:
            self._on_disconnect = None
        return await request.end()

    def call_on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call ``callback`` once the client has disconnected, in place of an earlier one; ``None`` calls nothing."""
        self._on_disconnect = callback
        if self.has_left:
            self.note_left()

    def note_left(self) -> None:
        """Record that the client sends nothing more."""
        self.has_left = True
        callback, self._on_disconnect = self._on_disconnect, None
        if callback is not None:
            callback()
        self.wake()


class _Transferable(Protocol):
    """The parts of asyncio's ``StreamReaderProtocol`` that are needed for its transport to be given back."""

    def eof_received(self) -> bool | None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class AsyncioConnection(Connection, asyncio.Protocol):
    """A connection of asyncio. It takes the transport from its ``protocol``, which has it again after ``give_back``."""

    def __init__(
        self,
        app: Application,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        protocol: _Transferable,
        **settings: Any,
    ) -> None:
        super().__init__(app, loop.time, **settings)
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []
        self._transport = transport
        self._protocol = protocol
        self._is_full = False
        """Whether the client takes more slowly what is sent than it comes."""
        self._is_paused = False
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        transport.set_protocol(self)

    async def wait(self, deadline: float = math.inf) -> None:
        """See ``Connection.wait``."""
        if self._is_paused and len(self.unread) < _MAX_AHEAD and not self.is_broken:
            self._is_paused = False
            self._transport.resume_reading()
        # A companion that was stopped may still be here, without a deadline.
        if deadline == math.inf:
            await self._wait()
            return
        self._deadline = deadline
        if self._timer is not None and self._timer.when() > deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._start_timer()
        try:
            await self._wait()
        finally:
            self._deadline = math.inf

    def _start_timer(self) -> None:
        # One timer for the life of a connection: it is moved on when it rings, not for each request.
        self._timer = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self.now() >= self._deadline:
            self.wake()
        elif self._deadline < math.inf:
            self._start_timer()

    async def _wait(self) -> None:
        future = self._loop.create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def wake(self) -> None:
        """See ``Connection.wake``."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def write(self, data: bytes) -> None:
        """See ``Connection.write``."""
        if not self.is_broken:
            self._transport.write(data)
            while self._is_full and not self.is_broken:
                await self._wait()

    def end(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def give_back(self) -> None:
        """Let the former protocol read what follows ``unread``."""
        if not self.is_broken:
            self._transport.set_protocol(self._protocol)  # type: ignore[arg-type]  # it is one
            if self._is_paused:
                self._transport.resume_reading()
            if self.has_left:
                self._protocol.eof_received()

    # What the transport calls:

    def data_received(self, data: bytes) -> None:
        """Keep ``data`` until it is waited for."""
        self.unread += data
        if len(self.unread) > _MAX_AHEAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._waiting:
            self.wake()

    def eof_received(self) -> bool:
        """Keep the transport open, because the answer can still be sent."""
        self.note_left()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything that waits for the client."""
        self.is_broken = True
        self.note_left()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Have ``write`` wait."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Let ``write`` return."""
        self._is_full = False
        self.wake()


class Stream(Protocol):
    """The part of a ``trio.SocketStream`` that is used."""

    async def send_all(self, data: bytes) -> None: ...


class TrioConnection(Connection):
    """A connection of trio. ``keep_reading`` and ``keep_time`` run beside ``serve``.

    ``errors`` are those of a broken stream. Its ``descriptor`` is read and written by the system's calls: the stream
    looks for a cancellation at each call, lets other tasks run, and tries to read before it waits.
    """

    def __init__(
        self,
        app: Application,
        loop: Loop,
        stream: Stream,
        descriptor: int,
        errors: tuple[type[Exception], ...],
        **settings: Any,
    ) -> None:
        super().__init__(app, loop.now, **settings)
        self._loop = loop
        self._waiting: list[Signal] = []
        self._stream = stream
        self._descriptor = descriptor
        self._errors = errors
        self._room: Signal | None = None
        self._deadline = math.inf
        self._alarm: Scope | None = None

    async def keep_reading(self) -> None:
        """Read until the client has left."""
        from trio.lowlevel import wait_readable

        while not self.has_left:
            await wait_readable(self._descriptor)
            try:
                data = os.read(self._descriptor, _MAX_READ)
            except BlockingIOError:
                continue
            except OSError:
                data, self.is_broken = b"", True
            self.unread += data
            if data:
                self.wake()
            else:
                self.note_left()
            while len(self.unread) > _MAX_AHEAD:
                self._room = self._loop.new_signal()
                await self._room.wait()

    async def wait(self, deadline: float = math.inf) -> None:
        """See ``Connection.wait``."""
        if self._room is not None and len(self.unread) < _MAX_AHEAD:
            self._room.set()
            self._room = None
        signal = self._loop.new_signal()
        self._waiting.append(signal)
        # A companion that was stopped may still be here, without a deadline.
        if deadline < math.inf:
            self._deadline = deadline
            if self._alarm is not None and self._alarm.deadline > deadline:
                self._alarm.deadline = deadline
        try:
            await signal.wait()
        finally:
            if deadline < math.inf:
                self._deadline = math.inf
            if signal in self._waiting:
                self._waiting.remove(signal)

    async def keep_time(self) -> None:
        """Wake a ``wait`` at its deadline: one scope that is moved on when it ends, not one for each request."""
        while True:
            with self._loop.new_scope(deadline=self._deadline) as self._alarm:
                await anyio.sleep_forever()
            if self.now() >= self._deadline:
                self._deadline = math.inf
                self.wake()

    def wake(self) -> None:
        """See ``Connection.wake``."""
        waiting, self._waiting = self._waiting, []
        for signal in waiting:
            signal.set()

    async def write(self, data: bytes) -> None:
        """See ``Connection.write``."""
        if self.is_broken:
            return
        # Until it is done, since a part of it may have been sent if it is cancelled.
        self.is_broken = True
        try:
            size = os.write(self._descriptor, data)
        except BlockingIOError:
            size = 0
        except OSError:
            self.note_left()
            return
        try:
            if size < len(data):
                await self._stream.send_all(data[size:])
            self.is_broken = False
        except self._errors:
            self.note_left()


class _Request:
    """``receive`` and ``send`` of one request, as ASGI has them."""

    def __init__(self, connection: Connection, length: int) -> None:
        self._connection = connection
        self._length = self._num_missing = length
        """Bytes of the body that were not received."""
        self._is_received = False
        self._start: Message | None = None
        self._is_started = False
        self._is_answered = False
        self._is_chunked = False
        self._has_body = True
        self._is_last = False

    def take_body(self) -> bytes | None:
        """Return the body if all of it was read and none of it received, which needs no waiting and no time limit."""
        unread, length = self._connection.unread, self._length
        if self._is_received or self._num_missing < length or len(unread) < length:
            return None
        body = bytes(unread[:length])
        del unread[:length]
        self._num_missing, self._is_received = 0, True
        return body

    async def receive(self) -> Message:
        """Return the body, in parts if it is long; after that, wait until the client has disconnected."""
        connection, unread = self._connection, self._connection.unread
        while not self._is_received:
            if len(unread) >= min(self._num_missing, _MAX_READ):
                part = bytes(unread[: self._num_missing])
                del unread[: len(part)]
                self._num_missing -= len(part)
                self._is_received = not self._num_missing
                return {"type": "http.request", "body": part, "more_body": not self._is_received}
            if connection.has_left:
                break
            await connection.wait()
        while not connection.has_left and not self._is_answered:
            await connection.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the head together with the first part of the body, and other parts as they come."""
        if message["type"] == "http.response.start" and self._start is None:
            self._start = message
            return
        if message["type"] != "http.response.body" or self._start is None or self._is_answered:
            raise RuntimeError(f"The application sent {message['type']} out of its order.")
        body: bytes = message.get("body", b"")
        self._is_answered = not message.get("more_body", False)
        parts = []
        if not self._is_started:
            parts.append(self._format_head(self._start, len(body)))
            self._is_started = True
        if body and self._has_body:
            parts.append(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)
        if self._is_answered and self._is_chunked:
            parts.append(b"0\r\n\r\n")
        await self._connection.write(b"".join(parts))

    def _format_head(self, start: Message, length: int) -> bytes:
        status: int = start["status"]
        headers: list[tuple[bytes, bytes]] = [*start.get("headers", ())]
        lines, values = b"".join([b"%b: %b\r\n" % header for header in headers]), dict(headers)
        if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
            raise RuntimeError(f"The application sent a header of several lines, among {[*values]}.")
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, lines]
        self._is_last = values.get(b"connection", b"").lower() == b"close"
        self._has_body = status not in (204, 304)
        if self._has_body and b"content-length" not in values:
            self._is_chunked = not self._is_answered
            parts.append(b"transfer-encoding: chunked\r\n" if self._is_chunked else b"content-length: %d\r\n" % length)
        if self._connection.is_closing and not self._is_last:
            self._is_last = True
            parts.append(b"connection: close\r\n")
        parts.append(_format_date(int(time())))
        return b"".join(parts)

    async def _discard(self) -> None:
        """Read what the application did not want, such as the body of a request for a path that does not exist.

        If the connection were closed while the client still sends, the client would get a reset in place of the answer.
        """
        connection, deadline = self._connection, self._connection.now() + _DISCARD_SECONDS
        while self._num_missing:
            num_read = min(self._num_missing, len(connection.unread))
            del connection.unread[:num_read]
            self._num_missing -= num_read
            if not self._num_missing or connection.has_left or connection.now() >= deadline:
                return
            await connection.wait(deadline)

    async def end(self) -> bool:
        """Answer 500 if the application has not answered; return whether the connection can serve another request."""
        if not self._is_started:
            self._start, self._is_answered = {"status": 500, "headers": [(b"connection", b"close")]}, False
            await self.send({"type": "http.response.body"})
        await self._discard()
        is_complete = self._is_answered and not self._num_missing
        return is_complete and not self._is_last and not self._connection.is_broken


async def _accept_lifespan(receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]) -> None:
    """Accept the start and the end of the server, at which no application here does anything.

    Starlette reports the cancellation of its wait as a failure of the server, which hid the error of a program whose
    end cancels all tasks, as that of ``asyncio.run`` does.
    """
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


def with_bodies_read(app: Application) -> Application:
    """Return an application that reads what ``app`` leaves of a body, for the requests that Hypercorn serves.

    Hypercorn closes the connection of such a request as soon as it is answered; see ``_Request._discard``.
    """

    async def serve(scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]) -> None:
        if scope["type"] == "lifespan":
            await _accept_lifespan(receive, send)
            return
        names = {name.lower() for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if names.isdisjoint((b"content-length", b"transfer-encoding")):
            await app(scope, receive, send)
            return
        is_received = anyio.Event()

        async def receive_part() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                is_received.set()
            return message

        async def discard() -> None:
            while not is_received.is_set():
                await receive_part()

        async def send_part(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last and not is_received.is_set():
                # The client has its answer while its body is read, which the application may be doing, too.
                await send({**message, "more_body": True})
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(discard)
                    with anyio.move_on_after(_DISCARD_SECONDS):
                        await is_received.wait()
                    tasks.cancel_scope.cancel()
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, receive_part, send_part)

    return serve


@lru_cache(maxsize=2)
def _format_date(seconds: int) -> bytes:
    """Return the last header, which most answers of a second have in common, and the end of the head."""
    return b"date: %b\r\n\r\n" % formatdate(seconds, usegmt=True).encode()
