"""Serving on a socket that this module binds: with uvicorn on asyncio, with Hypercorn on trio.

The socket is bound before anything is served, so that its port is known, a port in use gives a clear error, and early
clients wait in its backlog. Neither server handles signals or decides when it ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, cast

import anyio
import uvicorn
from hypercorn.config import Config as HypercornConfig
from hypercorn.typing import ASGIFramework
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from areal_actors.errors import ConfigError
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.proxy.config import HttpServer, ProxyConfig
from areal_actors.proxy.limits import MAX_HEAD_BYTES, SERVER_LOG, LimitedProtocol, reading_bodies

_BACKLOG = 4096
_CLOSE_SECONDS = 3.0
"""How long a server may take to end."""
_IDLE_SECONDS = 75.0
"""How long a connection may be idle. Clients keep idle connections for less, so that they close first."""
_HYPERCORN_IDLE_SECONDS = 20.0
"""Hypercorn 0.18 keeps the descriptor of a client that has left an idle connection for so long."""
_GRACE_SECONDS = 1.0
"""How long connections may go on when a server ends."""
_VANISHED_SECONDS = 60
"""Approximate time after which a client whose machine has disappeared is noticed."""


def check_access(config: ProxyConfig) -> None:
    """Raise ``ConfigError`` for an address that other machines can reach without a key, or with open sessions."""
    if not is_loopback(config.host) and not config.admin_key:
        raise ConfigError(
            f"proxy.host: {config.host} can be reached from other machines; set proxy.admin_key, or listen on 127.0.0.1"
        )
    if config.open_sessions and not is_loopback(config.host):
        raise ConfigError(
            f"proxy.open_sessions: {config.host} can be reached from other machines, where a session takes a key; "
            "listen on 127.0.0.1, or create keys with 'areal-actors keys create'"
        )


def bind(config: ProxyConfig) -> socket.socket:
    """Return a listening socket for the configured address.

    Raises:
        ConfigError: the address is in use, not allowed or not of this machine; or as ``check_access``.
    """
    check_access(config)
    return listen(config.host, config.port, prefix="proxy.")


def listen(host: str, port: int, *, prefix: str) -> socket.socket:
    """Return a listening socket.

    Raises ``ConfigError``, which names the setting: ``host`` or ``port`` behind ``prefix``, such as ``proxy.``.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _open_listener(family, address)
    except OSError as error:
        place = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            hint = f"{place} is in use; stop the process that listens there, choose another port, or 0 for any free one"
            raise ConfigError(f"{prefix}port: {hint}") from error
        if error.errno == errno.EACCES:
            hint = f"this user may not listen on {place}; choose a port above 1023"
            raise ConfigError(f"{prefix}port: {hint}") from error
        reason = error.strerror or error
        raise ConfigError(
            f"{prefix}host: cannot listen on {place}: {reason}; choose an address of this machine"
        ) from error


def _open_listener(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted proxy can bind at once although old connections are still in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Streams consist of small events, which Nagle's algorithm would delay.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
            # Keep-alive probes detect a vanished peer on a silent connection, the user timeout one on a connection with
            # data that is not acknowledged.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_SECONDS)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_SECONDS * 1000)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, public_host: str | None = None) -> str:
    """Return the URL under which clients reach ``listener``; for a wildcard address, it has this machine's name."""
    host, port = listener.getsockname()[:2]
    if public_host is not None:
        host = public_host
    elif host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    shutdown: Callable[[], Awaitable[None]],
    server: HttpServer = HttpServer.UVICORN,
    idle_seconds: float | None = None,
) -> None:
    """Serve on asyncio or trio until ``shutdown`` returns, which closes the listener.

    ``server`` is the server on asyncio; trio has Hypercorn only. A client that sends no whole head of a request for
    ``idle_seconds`` is disconnected; by default after 75 by uvicorn, and after 20 by Hypercorn.
    """
    # Ask anyio which event loop runs: trio may be a guest on asyncio's loop, and then both are detectable.
    if anyio.get_cancelled_exc_class() is not asyncio.CancelledError:
        await _serve_with_hypercorn_on_trio(app, listener, shutdown, idle_seconds)
    elif server is HttpServer.HYPERCORN:
        from hypercorn.asyncio import serve as serve_with_hypercorn

        config = _create_hypercorn_config(idle_seconds)
        config.bind = [f"fd://{listener.detach()}"]
        # Starlette and Hypercorn name the same interface differently.
        framework = cast("ASGIFramework", reading_bodies(app))
        await serve_with_hypercorn(framework, config, shutdown_trigger=shutdown, mode="asgi")
    else:
        await _serve_with_uvicorn(app, listener, shutdown, idle_seconds)


async def _serve_with_uvicorn(
    app: ASGIApp,
    listener: socket.socket,
    shutdown: Callable[[], Awaitable[None]],
    idle_seconds: float | None,
) -> None:
    # Not ``uvicorn.Server``, which takes the signal handlers of the process, and looks for its end ten times a second.
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", interface="asgi3", ws="none", proxy_headers=False, backlog=_BACKLOG
    )
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    limit = _IDLE_SECONDS if idle_seconds is None else idle_seconds

    def create_protocol() -> LimitedProtocol:
        return LimitedProtocol(config, state, idle_seconds=limit)

    server = await loop.create_server(create_protocol, sock=listener, backlog=_BACKLOG)
    try:
        await shutdown()
    finally:
        server.close()
        with anyio.CancelScope(shield=True):
            await _close_connections(state)


async def _close_connections(state: ServerState) -> None:
    """Close idle connections at once, and the others after their answers, which may take ``_GRACE_SECONDS``."""
    for connection in tuple(state.connections):
        connection.shutdown()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=_GRACE_SECONDS)
    for task in tuple(state.tasks):
        task.cancel()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=_GRACE_SECONDS)
    for connection in tuple(state.connections):
        connection.transport.close()


async def _serve_with_hypercorn_on_trio(
    app: ASGIApp,
    listener: socket.socket,
    shutdown: Callable[[], Awaitable[None]],
    idle_seconds: float | None,
) -> None:
    import trio
    from hypercorn.trio.tcp_server import TCPServer
    from hypercorn.trio.worker_context import WorkerContext

    config, context = _create_hypercorn_config(idle_seconds), WorkerContext(None)
    framework = wrap_app(cast("ASGIFramework", reading_bodies(app)), config.wsgi_max_body_size, "asgi")

    async def answer(stream: Any) -> None:  # Any: Hypercorn's annotation admits encrypted streams only
        # Hypercorn 0.18 lets errors of a connection end the server: a client that sends malformed bytes behind a
        # request and leaves can cause ``BusyResourceError``. That is why its own ``serve`` is not used.
        try:
            await TCPServer(framework, config, context, {}, stream)
        except Exception as error:  # noqa: BLE001 - any client can cause it, and it must not end other connections
            logging.getLogger(SERVER_LOG).warning("A connection ended by an error: %r", error)

    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
    async with trio.open_nursery() as connections:
        try:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(partial(trio.serve_listeners, answer, listeners, handler_nursery=connections))
                await shutdown()
                accepting.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + _GRACE_SECONDS


def _create_hypercorn_config(idle_seconds: float | None) -> HypercornConfig:
    config = HypercornConfig()
    # Paths name sessions, which are secrets.
    config.accesslog = None
    config.errorlog = logging.getLogger(SERVER_LOG)
    config.backlog = _BACKLOG
    config.keep_alive_timeout = _HYPERCORN_IDLE_SECONDS if idle_seconds is None else idle_seconds
    config.keep_alive_max_requests = 2**31
    config.h11_max_incomplete_size = MAX_HEAD_BYTES
    config.include_server_header = False
    config.alpn_protocols = ["http/1.1"]
    config.graceful_timeout = _GRACE_SECONDS
    return config


class Drains(Protocol):
    """The requests in flight of an application, as ``Traffic`` counts them."""

    async def drain(self, *, seconds: float) -> None:
        """Refuse or end requests, so that those in flight are over after about ``seconds``."""
        ...


async def serve_until_cancelled(
    app: ASGIApp,
    listener: socket.socket,
    traffic: Drains,
    *,
    drain_seconds: float,
    server: HttpServer = HttpServer.UVICORN,
) -> None:
    """Serve until cancelled, then stop without interrupting requests that can still finish.

    Stopping takes three steps: new requests are refused with 503 while those in flight may finish for
    ``drain_seconds``; the remaining ones are cancelled, each with an answer that says so; then the server closes idle
    connections.
    """
    stopping = anyio.Event()
    async with anyio.create_task_group() as tasks:
        # The server is shielded until all steps are done, because a cancelled server leaves its connections open.
        shield = anyio.CancelScope(shield=True)
        tasks.start_soon(partial(serve_shielded, app, listener, stopping, shield, server=server))
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await traffic.drain(seconds=drain_seconds)
            stopping.set()
            shield.deadline = anyio.current_time() + _CLOSE_SECONDS


async def serve_shielded(
    app: ASGIApp,
    listener: socket.socket,
    stopping: anyio.Event,
    shield: anyio.CancelScope,
    *,
    server: HttpServer = HttpServer.UVICORN,
) -> None:
    """Serve within ``shield`` until ``stopping`` is set. A cancelled server would leave its connections open."""
    with shield:
        await serve(app, listener, shutdown=stopping.wait, server=server)
