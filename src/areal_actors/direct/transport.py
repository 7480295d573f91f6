"""A transport from an SDK's HTTP client directly into an ASGI application, without a socket.

The ASGI transport of httpx runs the application to its end before the caller sees a byte, and does not support
disconnects. In this one, the response starts when the application starts it, its body arrives as it is sent, and
closing it early is a disconnect, which the application sees as it would see a closed connection.

The official SDKs are split between ``httpx`` and its successor ``httpx2``, which have the same classes; this module
supports both, using the module that the installed SDK uses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import cache, partial
from types import ModuleType
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from areal_actors.proxy.exchange import start_companion

__all__ = ["App", "create_http_client", "http_library_of"]

App = Callable[
    [MutableMapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]
]

_BUFFERED = 16
"""Number of chunks that the application may be ahead of its reader."""
_END_SECONDS = 5.0
"""How long a reader that closes the response early waits for the application to finish."""


def http_library_of(sdk: ModuleType) -> ModuleType:
    """Return ``httpx`` or ``httpx2``: the library whose clients the installed ``openai`` or ``anthropic`` accepts."""
    classes = sdk.DefaultAsyncHttpxClient.__mro__
    client = next(kind for kind in classes if kind.__name__ == "AsyncClient")
    return sys.modules[client.__module__.partition(".")[0]]


def create_http_client(app: App, library: ModuleType) -> Any:
    """Return an ``AsyncClient`` of ``library`` that sends every request to ``app``."""
    return library.AsyncClient(transport=_transport_class(library)(app), trust_env=False)


class _Call:
    """One request that the application handles."""

    def __init__(self, scope: MutableMapping[str, Any], body: bytes) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.failure: Exception | None = None
        self.started = anyio.Event()
        self._scope = scope
        self._body: bytes | None = body
        self._gone = anyio.Event()
        self._ended = anyio.Event()
        self._send: MemoryObjectSendStream[bytes]
        self.chunks: MemoryObjectReceiveStream[bytes]
        self._send, self.chunks = anyio.create_memory_object_stream[bytes](_BUFFERED)

    async def run(self, app: App) -> None:
        """Run the application on the request; never raises an ``Exception``."""
        try:
            await app(self._scope, self._receive, self._answer)
        except Exception as error:  # noqa: BLE001 - raised where the response is read
            self.failure = error
        finally:
            self._send.close()
            self.started.set()
            self._ended.set()

    async def hang_up(self) -> None:
        """Disconnect, and wait until the application has finished handling the request."""
        self._gone.set()
        self.chunks.close()
        with anyio.move_on_after(_END_SECONDS, shield=True):
            await self._ended.wait()

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _answer(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
            self.started.set()
            return
        if message.get("body"):
            with suppress(anyio.BrokenResourceError):  # the reader has gone; servers drop this, too
                await self._send.send(message["body"])
        if not message.get("more_body", False):
            self._send.close()


class _Body:
    """The body of a response, as the application sends it."""

    def __init__(self, call: _Call, stop: Callable[[], object], request: Any, library: Any) -> None:
        # An iterator instead of a generator, so that nothing is left to the garbage collector.
        self._call, self._stop, self._request, self._library = call, stop, request, library
        self._seconds = _read_seconds(request)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            with anyio.fail_after(self._seconds):
                return await self._call.chunks.receive()
        except anyio.EndOfStream:
            _check(self._call, self._library)
            raise StopAsyncIteration from None
        except TimeoutError:
            text = f"Nothing arrived within {self._seconds:g} s."
            raise self._library.ReadTimeout(text, request=self._request) from None

    async def aclose(self) -> None:
        """Disconnect. Closing twice has no effect."""
        await _end(self._call, self._stop)


@cache
def _transport_class(library: Any) -> Any:
    """Return the transport class, derived from the base classes of ``library``."""

    class Body(_Body, library.AsyncByteStream):  # type: ignore[misc]
        """The body, as a stream type of the library."""

    class DirectTransport(library.AsyncBaseTransport):  # type: ignore[misc]
        """Sends requests to an application in this process."""

        def __init__(self, app: App) -> None:
            self._app = app

        async def handle_async_request(self, request: Any) -> Any:
            """Answer ``request``. Raises ``ReadTimeout`` and ``ReadError`` of the library."""
            call = _Call(_scope_of(request), b"".join([part async for part in request.stream]))
            stop = start_companion(partial(call.run, self._app))
            try:
                with anyio.fail_after(seconds := _read_seconds(request)):
                    await call.started.wait()
                _check(call, library)
            except TimeoutError:
                await _end(call, stop)
                text = f"No answer began within {seconds:g} s."
                raise library.ReadTimeout(text, request=request) from None
            except BaseException:
                await _end(call, stop)
                raise
            return library.Response(call.status, headers=call.headers, stream=Body(call, stop, request, library))

    return DirectTransport


def _check(call: _Call, library: Any) -> None:
    if call.failure is not None:
        raise library.ReadError(f"The application failed: {call.failure!r}") from call.failure


async def _end(call: _Call, stop: Callable[[], object]) -> None:
    await call.hang_up()
    stop()


def _read_seconds(request: Any) -> float:
    seconds = request.extensions.get("timeout", {}).get("read")
    return math.inf if seconds is None else float(seconds)


def _scope_of(request: Any) -> dict[str, Any]:
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 0),
        "server": (url.host, url.port),
    }
