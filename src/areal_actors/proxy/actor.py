"""The proxy as an actor: it binds a socket, serves the application, and drains requests in flight when it stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from attrs import evolve

from areal_actors.kernel import Actor, Context, Ref
from areal_actors.messages import (
    Accounts,
    Capacity,
    DescribeEndpoint,
    Endpoint,
    Exports,
    Generation,
    Intake,
    Models,
    Serving,
    Sessions,
)
from areal_actors.proxy.access import create_admin_key
from areal_actors.proxy.app import create_app
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.dialects.base import TokenBytes
from areal_actors.proxy.exchange import Traffic
from areal_actors.proxy.metrics import ReadRun
from areal_actors.proxy.server import bind, serve_until_cancelled, url_of


class ProxyServer(Actor[Serving]):
    """An actor that serves the HTTP application and forwards requests as messages.

    The arguments are those of ``create_app``.

    Raises:
        ConfigError: at spawn, if the address cannot be used.
    """

    def __init__(
        self,
        *,
        sessions: Ref[Sessions],
        exports: Ref[Exports],
        capacity: Ref[Capacity],
        generation: Ref[Generation] | None = None,
        intake: Ref[Intake] | None = None,
        accounts: Ref[Accounts] | None = None,
        models: Ref[Models] | None = None,
        config: ProxyConfig | None = None,
        token_bytes: TokenBytes | None = None,
        model: str = "policy",
        read_run: ReadRun | None = None,
    ) -> None:
        config = config or ProxyConfig()
        self._config = config
        self._admin_key = config.admin_key or create_admin_key()
        self._traffic = Traffic()
        self._url = ""
        self._app = create_app(
            sessions=sessions,
            exports=exports,
            capacity=capacity,
            generation=generation,
            intake=intake,
            accounts=accounts,
            models=models,
            config=evolve(config, admin_key=self._admin_key),
            token_bytes=token_bytes,
            model=model,
            traffic=self._traffic,
            read_run=read_run,
        )

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Bind the socket and serve it in the background until the actor stops."""
        listener = bind(self._config)
        self._url = url_of(listener, self._config.public_host)
        try:
            seconds = self._config.drain_seconds
            context.tasks.start_soon(
                partial(
                    serve_until_cancelled,
                    self._app,
                    listener,
                    self._traffic,
                    drain_seconds=seconds,
                    server=self._config.server,
                )
            )
            yield
        finally:
            # The server detaches the socket once it serves it, so this closes only an unserved one.
            listener.close()

    @DescribeEndpoint.handler
    async def describe(self, message: DescribeEndpoint) -> Endpoint:  # noqa: ARG002 - the message says it all
        """Return the URL at which the proxy listens, and its admin key."""
        return Endpoint(url=self._url, admin_key=self._admin_key)
