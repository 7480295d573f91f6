"""Kept connections as a stack: what a request pays for its connection does not grow with the number of connections.

httpx keeps its connections in one list and asks all of them, with two system calls each, whether they are still
alive, for every request that begins and for every one that ends. With the hundred connections that a batch of episodes
has, most of the time of a rollout goes there. Here every connection is an httpx transport of one connection, and a
request takes the one that was used last; what HTTP is remains httpx's matter.

``httpx2``, the successor that newer SDKs take their clients from, has the same classes and the same list; what is
written here is written for both.
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
    """A transport for the clients of ``library``, which is ``httpx`` or ``httpx2``; see ``Stack``."""
    transport: Stack = _transport_class(library)(library, max_connections=max_connections, keep_seconds=keep_seconds)
    return transport


@cache
def _transport_class(library: Any) -> Any:
    return type("StackTransport", (Stack, library.AsyncBaseTransport), {})


@cache
def _stream_class(library: Any) -> Any:
    return type("Borrowed", (_Borrowed, library.AsyncByteStream), {})


class Stack:
    """Sends each request over the connection that became free last, or over a new one.

    At most ``max_connections`` are open at once; further requests wait in line, for as long as the ``pool`` timeout of
    the request allows (``httpx.PoolTimeout``). A connection that nobody used for ``keep_seconds`` is closed when
    another one becomes free; one whose request failed, was cancelled or was not read to its end is closed at once.
    """

    def __init__(self, library: Any, *, max_connections: int, keep_seconds: float) -> None:
        self._library = library
        self._places = anyio.Semaphore(max_connections)
        self._keep_seconds = keep_seconds
        self._idle: deque[_Idle] = deque()

    @cached_property
    def _verify(self) -> Any:
        """Made once: reading the certificates of the system takes longer than a thousand requests on this machine.

        And not before the first connection: an agent's process has a client for agents that may never use it.
        """
        return self._library.create_ssl_context(trust_env=False)

    async def handle_async_request(self, request: Any) -> Any:
        """Send ``request``; the connection is free again when the response is closed. Raises what the library does."""
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
        """Close the connections that are idle; those in use are closed by whoever reads from them."""
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
        with anyio.CancelScope(shield=True):  # closing a socket does not wait for its peer
            if is_usable:
                self._idle.append(_Idle(anyio.current_time(), connection))
                await self._close_expired()
            else:
                await connection.aclose()

    async def _close_expired(self) -> None:
        """Those that were used longest ago lie at the bottom."""
        oldest = anyio.current_time() - self._keep_seconds
        while self._idle and self._idle[0].since < oldest:
            await self._idle.popleft().connection.aclose()


class _Borrowed:
    """A response's body; when it is closed, its connection is given back.

    An iterator rather than a generator: a reader that stops early would leave one to the garbage collector.
    """

    def __init__(self, stream: Any, give_back: Callable[..., Awaitable[None]]) -> None:
        self._stream = stream
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
        """Free the connection. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        is_closed_well = False
        try:
            await self._stream.aclose()
            is_closed_well = True
        finally:
            await self._give_back(is_usable=self._is_read and is_closed_well)
