"""Limits of HTTP connections that the servers do not have.

uvicorn limits neither the size of a request's head nor the time that it takes; ``LimitedProtocol`` does. Hypercorn
closes a connection whose request body was not read, so that the client gets a reset in place of its answer;
``reading_bodies`` reads it. Limits of bodies belong to the application (``exchange``).
"""

from __future__ import annotations

import asyncio
import logging
from email.utils import formatdate
from functools import lru_cache
from time import time

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

SERVER_LOG = "areal_actors.proxy.server"
MAX_HEAD_BYTES = 64 * 1024
_DISCARD_SECONDS = 2.0
"""How long a client may go on to send a body after its request was answered."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection of uvicorn whose heads have a limited size and whose client has limited time to send them.

    It is closed if it is idle for ``idle_seconds``, or if a head takes as long.
    """

    def __init__(self, config: Config, server_state: ServerState, *, idle_seconds: float) -> None:
        super().__init__(config, server_state, app_state={})
        self._idle_seconds = idle_seconds
        self.logger = logging.getLogger(SERVER_LOG)
        # Paths name sessions, which are secrets.
        self.access_log = False
        self._is_body = False
        self._num_head_bytes = 0
        """Bytes since a request, its head, or a part of its body was complete: of a head, of trailers, or of chunks."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._close_after(self._idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._close_after(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse ``data``, and refuse a head that is too long."""
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        """Give the head its time."""
        super().on_message_begin()
        self._close_after(self._idle_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, but none that follows the body."""
        if not self._is_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, unless the head is too long."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            raise ValueError(f"The head has {size} bytes.")  # the parser reports it, and uvicorn answers 400
        self._close_after(None)
        self._is_body, self._num_head_bytes = True, 0
        # uvicorn's own server sets it each second.
        self.server_state.default_headers = _date_headers(int(time()))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next request, if this one is answered."""
        self._is_body, self._num_head_bytes = False, 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._close_after(self._idle_seconds)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the end of a body that was not read."""
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._close_after(_DISCARD_SECONDS if self._is_body else self._idle_seconds)

    def _close_after(self, seconds: float | None) -> None:
        """Close the connection after this time, in place of an earlier one; ``None`` closes it at no time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.close)


@lru_cache(maxsize=2)
def _date_headers(seconds: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(seconds, usegmt=True).encode())]


def reading_bodies(app: ASGIApp) -> ASGIApp:
    """Return an application that reads what ``app`` leaves of a body, for at most two seconds.

    It refuses a request whose body has two lengths.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _accept_lifespan(receive, send)
            return
        names = {name.lower() for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            # h11 reads the chunks, and another server in front may read the length.
            start = {"type": "http.response.start", "status": 400, "headers": [(b"connection", b"close")]}
            await send(start)
            await send({"type": "http.response.body"})
            return
        is_read = anyio.Event()

        async def receive_part() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                is_read.set()
            return message

        async def discard() -> None:
            while not is_read.is_set():
                await receive_part()

        async def send_part(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last and not is_read.is_set():
                # The client has its answer while its body is read, which the application may be doing, too.
                await send({**message, "more_body": True})
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(discard)
                    with anyio.move_on_after(_DISCARD_SECONDS):
                        await is_read.wait()
                    tasks.cancel_scope.cancel()
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, receive_part, send_part)

    return serve


async def _accept_lifespan(receive: Receive, send: Send) -> None:
    """Accept the start and the end of the server, at which no application here does anything.

    Starlette reports the cancellation of its wait as a failure of the server, which hid the error of a program whose
    end cancels all tasks, as that of ``asyncio.run`` does.
    """
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})
