"""The stable address of proxies in workers: the controller forwards the requests of agents to them.

Agents know the controller's address only, so that a proxy may end and come back on another node. Sessions are in
another worker, so any proxy can answer for any session. Requests wait until a proxy serves.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
from starlette.applications import Starlette

from areal_actors.errors import Unavailable
from areal_actors.kernel import Ref
from areal_actors.lib.task_groups import open_tasks
from areal_actors.messages import AwaitProxies, Directory
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.exchange import Exchange, Traffic
from areal_actors.proxy.forwarding import Backend, EveryPath, forward
from areal_actors.proxy.server import serve_until_cancelled

_PATIENCE_SECONDS = 600.0
"""How long a request waits for a proxy: a cluster may take minutes to start one."""


@asynccontextmanager
async def forwarding(listener: socket.socket, directory: Ref[Directory], config: ProxyConfig) -> AsyncIterator[None]:
    """Forward the requests at ``listener`` to the proxies that ``directory`` knows, while the block lasts."""
    limits, traffic = httpx.Limits(max_connections=None), Traffic()
    timeout = httpx.Timeout(None, connect=5.0)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client, open_tasks() as tasks:
        forwarder = _Forwarder(directory, config, client, traffic)
        tasks.start_soon(forwarder.follow)

        async def serve() -> None:
            app = Starlette(routes=[forwarder])
            await serve_until_cancelled(
                app, listener, traffic, drain_seconds=config.drain_seconds, server=config.server
            )

        tasks.start_soon(serve)
        yield
        tasks.cancel_scope.cancel()


class _Forwarder(EveryPath):
    def __init__(
        self, directory: Ref[Directory], config: ProxyConfig, client: httpx.AsyncClient, traffic: Traffic
    ) -> None:
        super().__init__(traffic)
        self._directory = directory
        self._config = config
        self._client = client
        self._known: tuple[str, ...] = ()
        self._places: dict[Exchange, str] = {}
        """The URL of the proxy at which each request is."""

    async def follow(self) -> None:
        """Follow which proxies serve. The requests of one that is lost are cut.

        A node that crashes closes no connections: without this, clients would wait until their own time limit.
        """
        while True:
            self._known = await self._directory.ask(AwaitProxies(known=self._known))
            for exchange, url in self._places.items():
                if url not in self._known:
                    exchange.cut(Unavailable("The proxy of this request has ended; ask again."))

    async def serve(self, exchange: Exchange) -> None:
        """Forward one request."""
        config = self._config
        body = await exchange.read_body(max_bytes=config.max_body_bytes, timeout_seconds=config.body_timeout_seconds)
        try:
            async with exchange.cut_on_disconnect():
                await forward(
                    exchange,
                    body=body,
                    backends=partial(self._choose, exchange),
                    client=self._client,
                    patience_seconds=_PATIENCE_SECONDS,
                )
        finally:
            self._places.pop(exchange, None)

    def _choose(self, exchange: Exchange) -> Iterator[Backend]:
        """Yield the proxies to try, those with the fewest requests first."""
        counts = Counter(self._places.values())
        for url in sorted(self._known, key=counts.__getitem__):
            self._places[exchange] = url
            yield Backend(url, url)
