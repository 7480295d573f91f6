"""The entry point and the host as actors, which bind, serve and drain as the proxy does, and the command ``entry``."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import anyio
import httpx
from starlette.types import ASGIApp

from areal_actors.client.http import create_http_client
from areal_actors.errors import ConfigError
from areal_actors.kernel import Actor, ActorSystem, Context
from areal_actors.messages import DescribeEndpoint, Endpoint, Serving
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.exchange import Traffic
from areal_actors.proxy.server import listen, serve_until_cancelled, url_of
from areal_actors_service.entry.app import EntryConfig, create_entry_app
from areal_actors_service.entry.hosting import HostPeers, create_host_app


class EntryServer(Actor[Serving]):
    """Forwards requests to several proxies. It has no keys; the proxies check theirs.

    Raises:
        ConfigError: at spawn, if the address cannot be used.
    """

    def __init__(self, config: EntryConfig) -> None:
        self._config = config
        self._url = ""

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Bind the socket and serve it in the background until the actor stops."""
        async with _served(context, self._config, partial(create_entry_app, self._config), prefix="--") as self._url:
            yield

    @DescribeEndpoint.handler
    async def describe(self, message: DescribeEndpoint) -> Endpoint:  # noqa: ARG002 - the message says it all
        """Return the URL at which the entry point listens; it has no key."""
        return Endpoint(url=self._url, admin_key="")


class HostServer(Actor[Serving]):
    """Forwards requests to services that are borrowed for each request.

    ``config`` has the address to listen on; its admin key is not used.

    Raises:
        ConfigError: at spawn, if the address cannot be used.
    """

    def __init__(self, peers: HostPeers, *, config: ProxyConfig) -> None:
        self._peers = peers
        self._config = config
        self._url = ""

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Bind the socket and serve it in the background until the actor stops."""
        async with _served(
            context, self._config, partial(create_host_app, self._peers, config=self._config), prefix="host."
        ) as self._url:
            yield

    @DescribeEndpoint.handler
    async def describe(self, message: DescribeEndpoint) -> Endpoint:  # noqa: ARG002 - the message says it all
        """Return the URL at which the host listens, and its admin key."""
        return Endpoint(url=self._url, admin_key=self._peers.admin_key)


class _CreateApp(Protocol):
    def __call__(self, *, client: httpx.AsyncClient, traffic: Traffic) -> ASGIApp: ...


@asynccontextmanager
async def _served(
    context: Context, config: EntryConfig | ProxyConfig, create_app: _CreateApp, *, prefix: str
) -> AsyncIterator[str]:
    """Bind a socket and serve an application with a new HTTP client for the duration of the block; yields the URL."""
    listener = listen(config.host, config.port, prefix=prefix)
    async with create_http_client() as client:
        try:
            traffic = Traffic()
            app = create_app(client=client, traffic=traffic)
            serve = partial(serve_until_cancelled, app, listener, traffic, drain_seconds=config.drain_seconds)
            url = url_of(listener, config.public_host)
            context.tasks.start_soon(serve)
            yield url
        finally:
            # The server detaches the socket once it serves it, so this closes only an unserved one.
            listener.close()


def parse_backends(words: Iterable[str]) -> dict[str, str]:
    """Parse words such as ``a=http://host:port`` into a mapping from name to URL. Raises ``ConfigError``."""
    backends: dict[str, str] = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} names no service; write NAME=URL, as in a=http://127.0.0.1:8001")
        if name in backends:
            raise ConfigError(f"{name} is given twice; each service has another sessions.service_name")
        backends[name] = url
    return backends


def run_entry(backends: Mapping[str, str], *, host: str, port: int, announce: Callable[[str], object]) -> None:
    """Forward requests until SIGINT or SIGTERM. Raises ``ConfigError`` for addresses that cannot be used."""
    try:
        config = EntryConfig(backends=backends, host=host, port=port)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    anyio.run(_run, config, announce)


async def _run(config: EntryConfig, announce: Callable[[str], object]) -> None:
    async with ActorSystem.open() as system:
        serving = await system.spawn(EntryServer(config), name="entry")
        endpoint = await serving.ask(DescribeEndpoint())
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            announce(f"Listening at {endpoint.url} for {', '.join(sorted(config.backends))}")
            async for _ in signals:
                break
