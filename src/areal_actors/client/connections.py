"""A connection pool whose cost per request does not grow with the number of connections.

httpx keeps its connections in one list and, for every request that begins or ends, checks with two system calls each
whether they are still alive. With the hundred connections of a batch of episodes, most of the time of a rollout was
spent there. In this pool, every connection is an httpx transport limited to one connection, and a request takes the
most recently used one from a stack; httpx still implements HTTP.

``httpx2``, the successor that newer SDKs use, has the same classes and the same list; this module supports both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Any

import anyio
from attrs import frozen

__all__ = ["Stack", "create_stack_transport"]


@frozen
class _Idle:
    since: float
    connection: Any


def create_stack_transport(library: ModuleType, *, max_connections: int, keep_seconds: float) -> Stack:
    """Return a transport for the clients of ``library``, which is ``httpx`` or ``httpx2``; see ``Stack``."""
    transport: Stack = _transport_class(library)(library, max_connections=max_connections, keep_seconds=keep_seconds)
    return transport


@cache
def _transport_class(library: Any) -> Any:
    return type("StackTransport", (Stack, library.AsyncBaseTransport), {})


@cache
def _stream_class(library: Any) -> Any:
    return type("Borrowed", (_Borrowed, library.AsyncByteStream), {})


class Stack:
    """A transport that sends each request over the most recently freed connection, or over a new one.

    At most ``max_connections`` are open at once; further requests wait for as long as the ``pool`` timeout of the
    request allows (``httpx.PoolTimeout``). A connection that was not used for ``keep_seconds`` is closed when another
    one becomes free; one whose request failed, was cancelled or was not read to its end is closed at once.
    """

    def __init__(self, library: Any, *, max_connections: int, keep_seconds: float) -> None:
        self._library = library
        self._places = anyio.Semaphore(max_connections)
        self._keep_seconds = keep_seconds
        self._idle: deque[_Idle] = deque()

    @cached_property
    def _verify(self) -> Any:
        """The SSL context, created once, at the first connection."""
        # Reading the system's certificates takes longer than a thousand requests on this machine. Not created earlier,
        # because the HTTP client that an agent's process gets may never be used.
        return self._library.create_ssl_context(trust_env=False)

    async def handle_async_request(self, request: Any) -> Any:
        """Send ``request``; closing the response frees the connection. Raises the library's exceptions."""
        await self._take_place(request)
        try:
            connection = self._idle.pop().connection if self._idle else self._connect()
        except BaseException:
            self._places.release()
            raise
        try:
            response = await connection.handle_async_request(request)
            give_back = partial(self._give_back, connection)
            response.stream = _stream_class(self._library)(response.stream, give_back)
        except BaseException:
            await self._give_back(connection, is_usable=False)
            raise
        return response

    async def aclose(self) -> None:
        """Close idle connections; connections in use are closed when their responses are."""
        self._keep_seconds = -1.0
        await self._close_expired()

    async def _take_place(self, request: Any) -> None:
        try:
            with anyio.fail_after(request.extensions.get("timeout", {}).get("pool")):
                await self._places.acquire()
        except TimeoutError as error:
            text = "Every connection of this client is in use."
            raise self._library.PoolTimeout(text, request=request) from error

    def _connect(self) -> Any:
        library = self._library
        limits = library.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=self._keep_seconds)
        return library.AsyncHTTPTransport(verify=self._verify, trust_env=False, limits=limits)

    async def _give_back(self, connection: Any, *, is_usable: bool) -> None:
        self._places.release()
        with anyio.CancelScope(shield=True):  # shielded is safe: closing a socket does not wait for its peer
            if is_usable:
                self._idle.append(_Idle(anyio.current_time(), connection))
                await self._close_expired()
            else:
                await connection.aclose()

    async def _close_expired(self) -> None:
        """Close connections that have been idle for too long."""
        oldest = anyio.current_time() - self._keep_seconds
        # The least recently used connections are at the bottom of the stack.
        while self._idle and self._idle[0].since < oldest:
            await self._idle.popleft().connection.aclose()


class _Borrowed:
    """The body of a response; closing it returns its connection."""

    def __init__(self, stream: Any, give_back: Callable[..., Awaitable[None]]) -> None:
        self._stream = stream
        # An iterator instead of a generator: a reader that stops early would leave a generator to the garbage
        # collector.
        self._parts = aiter(stream)
        self._give_back = give_back
        self._is_read = False
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            part: bytes = await anext(self._parts)
        except StopAsyncIteration:
            self._is_read = True
            raise
        return part

    async def aclose(self) -> None:
        """Return the connection. Closing twice has no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        is_closed_well = False
        try:
            await self._stream.aclose()
            is_closed_well = True
        finally:
            await self._give_back(is_usable=self._is_read and is_closed_well)
