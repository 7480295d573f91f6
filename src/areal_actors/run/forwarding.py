"""The stable address of proxies on other machines: the controller forwards connections of agents as bytes.

Agents know the controller's address only, so that a proxy may end and come back on another node. What its end costs is
the connections that it had: they are closed, and clients send their requests again. New connections wait here until a
proxy serves, as those on one machine wait in the backlog of the socket that its proxies share.

Nothing of HTTP is read. The entry point reads each request, to choose the service that has its session; here any
proxy can answer for any session, and a connection is passed on for a fraction of that cost.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from urllib.parse import urlsplit

import anyio

from areal_actors.kernel import Ref
from areal_actors.kernel.remote.sockets import SocketStream, accept, dial_tcp
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import AwaitProxies, Directory

__all__ = ["forwarding"]

_log = get_logger(__name__)

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.25
"""Delay before a proxy that refuses connections is tried again: its end is known in a moment."""


@asynccontextmanager
async def forwarding(listener: socket.socket, directory: Ref[Directory]) -> AsyncIterator[None]:
    """Forward the connections of ``listener`` to the proxies that ``directory`` knows, while the block lasts."""
    forwarder = _Forwarder(directory)
    async with open_tasks() as tasks:
        tasks.start_soon(forwarder.follow)
        tasks.start_soon(forwarder.serve, listener)
        yield
        tasks.cancel_scope.cancel()


class _Forwarder:
    def __init__(self, directory: Ref[Directory]) -> None:
        self._directory = directory
        self._connections: dict[str, set[anyio.CancelScope]] = {}
        """The connections to each proxy that serves, by its URL."""
        self._changed = ChangeSignal()

    async def follow(self) -> None:
        """Follow which proxies serve. The connections of one that is lost are closed.

        A node that crashes closes none: without this, clients would wait for an answer until their own time limit.
        """
        known: tuple[str, ...] = ()
        while True:
            known = await self._directory.ask(AwaitProxies(known=known))
            for url in [url for url in self._connections if url not in known]:
                for scope in self._connections.pop(url):
                    scope.cancel()
            for url in known:
                self._connections.setdefault(url, set())
            self._changed.notify()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections forever."""
        async with anyio.create_task_group() as tasks:
            while True:
                tasks.start_soon(self._forward, await accept(listener))

    async def _forward(self, client: SocketStream) -> None:
        """Pass the bytes of one connection on, in both directions, until either side closes it."""
        async with aclosing(client):
            url, proxy = await self._connect()
            async with aclosing(proxy):
                with anyio.CancelScope() as scope:
                    # It may have been lost while it accepted the connection.
                    connections = self._connections.get(url)
                    if connections is None:
                        return
                    connections.add(scope)
                    try:
                        async with anyio.create_task_group() as tasks:
                            tasks.start_soon(_copy, client, proxy, scope, False)
                            tasks.start_soon(_copy, proxy, client, scope, True)
                    finally:
                        connections.discard(scope)

    async def _connect(self) -> tuple[str, SocketStream]:
        """Connect to the proxy with the fewest connections; wait until one accepts."""
        while True:
            while not self._connections:
                await self._changed.wait()
            url = min(self._connections, key=lambda each: len(self._connections[each]))
            address = urlsplit(url)
            try:
                with anyio.move_on_after(_CONNECT_SECONDS):
                    return url, await dial_tcp(address.hostname or "", address.port or 80)
            except OSError as error:
                _log.debug("proxy_refuses", url=url, reason=str(error))
            await anyio.sleep(_RETRY_SECONDS)


async def _copy(source: SocketStream, target: SocketStream, scope: anyio.CancelScope, is_answer: bool) -> None:  # noqa: FBT001 - start_soon takes no keywords
    """Pass bytes on until ``source`` ends, and the whole connection with it unless its answer may still come."""
    with suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        try:
            while True:
                await target.send(await source.receive())
        except anyio.EndOfStream:
            if not is_answer:
                await target.send_eof()
                return
    scope.cancel()
