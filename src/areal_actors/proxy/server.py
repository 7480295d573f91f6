"""Serving with Hypercorn on a socket that this module binds.

The socket is bound before anything is served, so that its port is known, a port in use gives a clear error, and early
clients wait in its backlog. Hypercorn receives the descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import anyio
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.typing import ASGIFramework
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp

from areal_actors.errors import ConfigError
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.lib.loops import running_loop
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.connections import AsyncioConnection, Connection, TrioConnection, with_bodies_read
from areal_actors.proxy.exchange import Traffic
from areal_actors.proxy.handover import Handover, ServeConnection, serve_connections

__all__ = ["bind", "check_access", "listen", "serve", "serve_shielded", "serve_until_cancelled", "url_of"]

_BACKLOG = 4096
_MAX_READ = 2**20
"""More than an asyncio stream takes before it pauses its transport."""
_CLOSE_SECONDS = 3.0
"""How long Hypercorn may take to close idle connections."""
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
    return listen(config.host, config.port, prefix="proxy.", is_shared=config.num_processes > 1)


def listen(host: str, port: int, *, prefix: str, is_shared: bool = False) -> socket.socket:
    """Return a listening socket. If ``is_shared``, other processes of this user may listen on the same port.

    The kernel then distributes connections between them. Raises ``ConfigError``, which names the setting: ``host`` or
    ``port`` behind ``prefix``, such as ``proxy.``.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _open_listener(family, address, is_shared=is_shared)
    except OSError as error:
        place = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            hint = f"{place} is in use; stop who listens there, choose another port, or 0 for any free one"
            raise ConfigError(f"{prefix}port: {hint}") from error
        if error.errno == errno.EACCES:
            hint = f"this user may not listen on {place}; choose a port above 1023"
            raise ConfigError(f"{prefix}port: {hint}") from error
        reason = error.strerror or error
        raise ConfigError(
            f"{prefix}host: cannot listen on {place}: {reason}; choose an address of this machine"
        ) from error


def _open_listener(family: int, address: tuple[object, ...], *, is_shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
    handover: Handover | None = None,
) -> None:
    """Serve on asyncio or trio until ``shutdown`` returns, which closes the listener.

    With ``handover``, connections are passed to and taken from other processes.
    """
    # Starlette and Hypercorn name the same interface differently.
    framework = cast("ASGIFramework", with_bodies_read(app))
    log = logging.getLogger("areal_actors.proxy.hypercorn")
    log.setLevel(logging.WARNING)
    config = _Config(app)
    # Paths name sessions, which are secrets.
    config.accesslog = None
    config.errorlog = log
    config.backlog = _BACKLOG
    # Longer than clients keep idle connections, so that they close first.
    config.keep_alive_timeout = 75.0
    config.keep_alive_max_requests = 2**31
    config.h11_max_incomplete_size = 64 * 1024
    config.include_server_header = False
    config.alpn_protocols = ["http/1.1"]
    config.graceful_timeout = 1.0

    async def closing() -> None:
        await shutdown()
        config.is_closing = True
        for connection in tuple(config.connections):
            connection.close_when_idle()

    # Ask anyio which event loop runs: trio may be a guest on asyncio's loop, and then both are detectable.
    is_asyncio = anyio.get_cancelled_exc_class() is asyncio.CancelledError
    serve_on: Any
    if is_asyncio:
        from hypercorn.asyncio import run as asyncio_run
        from hypercorn.asyncio import serve as serve_on

        _replace_server(asyncio_run, _AsyncioServer)
    else:
        from hypercorn.trio import run as trio_run
        from hypercorn.trio import serve as serve_on

        _replace_server(trio_run, _TrioServer)
    if handover is not None:
        # Hypercorn accepts connections itself, so only its handling of one is used.
        prepare = _prepare_on_asyncio if is_asyncio else _prepare_on_trio
        serve_one, close_idle = prepare(framework, config)

        async def closing_all() -> None:
            await closing()
            await close_idle()

        seconds = config.graceful_timeout
        await serve_connections(listener, handover, serve_one, shutdown=closing_all, grace_seconds=seconds)
        return
    config.bind = [f"fd://{listener.detach()}"]
    await serve_on(framework, config, shutdown_trigger=closing, mode="asgi")


def _prepare_on_asyncio(
    framework: ASGIFramework, config: Config
) -> tuple[ServeConnection, Callable[[], Awaitable[None]]]:
    """Return functions that serve one connection, and close idle ones, as Hypercorn's ``worker_serve`` does."""
    from hypercorn.asyncio import run as asyncio_run
    from hypercorn.asyncio.worker_context import WorkerContext
    from hypercorn.utils import wrap_app

    server: Any = asyncio_run  # it does not export TCPServer, which is replaced
    app, context = wrap_app(framework, config.wsgi_max_body_size, "asgi"), WorkerContext(None)

    async def serve_one(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        await server.TCPServer(app, loop, config, context, {}, reader, writer)

    return serve_one, context.terminated.set


def _prepare_on_trio(framework: ASGIFramework, config: Config) -> tuple[ServeConnection, Callable[[], Awaitable[None]]]:
    """Return functions that serve one connection, and close idle ones, as Hypercorn's ``worker_serve`` does."""
    import trio
    from hypercorn.trio import run as trio_run
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.utils import wrap_app

    server: Any = trio_run  # as on asyncio
    app, context = wrap_app(framework, config.wsgi_max_body_size, "asgi"), WorkerContext(None)

    async def serve_one(connection: socket.socket) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        await server.TCPServer(app, config, context, {}, stream)

    return serve_one, context.terminated.set


async def serve_until_cancelled(
    app: ASGIApp,
    listener: socket.socket,
    traffic: Traffic,
    *,
    drain_seconds: float,
    handover: Handover | None = None,
) -> None:
    """Serve until cancelled, then stop without interrupting requests that can still finish.

    Stopping takes three steps: new requests are refused with 503 while those in flight may finish for
    ``drain_seconds``; the remaining ones are cancelled, each with an answer that says so; then Hypercorn closes idle
    connections.
    """
    stopping = anyio.Event()
    async with anyio.create_task_group() as tasks:
        # Hypercorn is shielded until all steps are done, because a cancelled server leaves its connections open.
        shield = anyio.CancelScope(shield=True)
        tasks.start_soon(partial(serve_shielded, app, listener, stopping, shield, handover=handover))
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
    handover: Handover | None = None,
) -> None:
    """Serve within ``shield`` until ``stopping`` is set. A cancelled server would leave its connections open."""
    with shield:
        await serve(app, listener, shutdown=stopping.wait, handover=handover)


class _Config(Config):
    """Hypercorn's settings, with which its connections reach ``app`` and ``connections``, the open ones of this server.

    Hypercorn itself serves ``with_bodies_read(app)``.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self.app = app
        self.connections: set[Connection] = set()
        self.is_closing = False


class _Server:
    """A mixin for Hypercorn's ``TCPServer`` of either event loop, which serves one connection.

    Requests in the common form are served by ``connections``, the first other one and all after it by Hypercorn. The
    mixin ends what Hypercorn leaves open or lets escape: it stops the idle timer when reading has ended.

    Hypercorn 0.18 (``asyncio/tcp_server.py`` and ``trio/tcp_server.py``) starts an idle timer for each connection, in
    the task group that the connection waits for. It stops the timer when a request arrives and in ``_close``, which
    runs after the task group. A client that disconnects while its connection is idle therefore leaves a socket in
    CLOSE_WAIT and its descriptor open until the timer ends: 75 seconds with our ``keep_alive_timeout``. At about 14 new
    clients a second, 1,020 descriptors were held, and a process with a limit of 1,024 accepted no more. Hypercorn has
    no setting for this. ``worker_serve`` looks its class up as a name of its module, so ``_replace_server`` replaces
    that name.
    """

    config: _Config
    context: Any  # WorkerContext of the event loop
    protocol: Any  # ProtocolWrapper
    idle_task: Any  # AsyncioSingleTask or TrioSingleTask
    _unread = b""

    async def run(self) -> None:
        """Serve the connection; an error ends this connection only.

        On trio it ended the server: the answer to malformed bytes behind a request is sent while ``_close`` sends the
        end of the stream, without the lock of other sends, and raises ``BusyResourceError``.
        """
        try:
            # Another Hypercorn in this process may use the replaced class, too.
            is_left = not isinstance(self.config, _Config)
            try:
                is_left = is_left or await self._serve_common()
            finally:
                # Hypercorn closes what it serves itself. Shielded, because it cancels what does not end in time.
                if not is_left:
                    with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                        await self._close()  # type: ignore[attr-defined]
            if is_left:
                await super().run()  # type: ignore[misc]  # of TCPServer, which comes next
        except Exception as error:  # noqa: BLE001 - any client can cause it, and it must not end other connections
            logging.getLogger("areal_actors.proxy.hypercorn").warning("A connection ended by an error: %r", error)

    async def _serve_common(self) -> bool:
        """Serve requests in the common form; return whether Hypercorn has to serve what follows."""
        raise NotImplementedError

    async def _serve(self, connection: Connection) -> bool:
        if self.config.is_closing:
            connection.close_when_idle()
        self.config.connections.add(connection)
        try:
            return await connection.serve()
        finally:
            self.config.connections.discard(connection)

    def _create_settings(self, sock: Any) -> dict[str, Any]:
        return {
            "client": parse_socket_addr(sock.family, sock.getpeername()),
            "server": parse_socket_addr(sock.family, sock.getsockname()),
            "idle_seconds": self.config.keep_alive_timeout,
        }

    async def _read_data(self) -> None:
        if self._unread:
            await self.protocol.handle(RawData(self._unread))
        await super()._read_data()  # type: ignore[misc]  # of TCPServer, which comes next
        await self.idle_task.stop()
        # An answer that completes after the client has left would start the timer again.
        self.idle_task = _EndedTimer()


class _AsyncioServer(_Server):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def _serve_common(self) -> bool:
        try:
            settings = self._create_settings(self.writer.get_extra_info("socket"))
            # uvloop reads before this task runs for the first time.
            unread = _take_read(self.reader)
        except OSError:  # the client has gone
            return False
        transport: Any = self.writer.transport
        connection = AsyncioConnection(
            self.config.app, asyncio.get_running_loop(), transport, transport.get_protocol(), **settings
        )
        connection.unread += unread
        if self.reader.at_eof():
            connection.eof_received()
        try:
            is_left = await self._serve(connection)
        finally:
            connection.end()
        if is_left:
            connection.give_back()
            self._unread = bytes(connection.unread)
        return is_left


def _take_read(reader: asyncio.StreamReader) -> bytes:
    """Return what ``reader`` has received, without waiting for more. Raises ``OSError`` if the connection is lost."""
    reading = reader.read(_MAX_READ)
    try:
        reading.send(None)
    except StopIteration as end:
        return bytes(end.value)
    reading.close()
    return b""


class _TrioServer(_Server):
    stream: Any  # trio.SocketStream

    async def _serve_common(self) -> bool:
        import trio

        try:
            settings = self._create_settings(self.stream.socket)
        except OSError:  # the client has gone
            return False
        errors = (trio.BrokenResourceError, trio.ClosedResourceError)
        descriptor = self.stream.socket.fileno()
        connection = TrioConnection(self.config.app, running_loop(), self.stream, descriptor, errors, **settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.keep_reading)
            nursery.start_soon(connection.keep_time)
            is_left = await self._serve(connection)
            nursery.cancel_scope.cancel()
        # After the last read, which may have ended together with ``serve``.
        self._unread = bytes(connection.unread)
        return is_left


class _EndedTimer:
    """The idle timer of a connection whose client has left: it cannot be started any more."""

    async def restart(self, task_group: object, action: object) -> None:
        """Start nothing."""

    async def stop(self) -> None:
        """Do nothing."""


def _replace_server(module: Any, mixin: type[_Server]) -> None:  # Any: Hypercorn does not export the name from here
    """Have Hypercorn serve connections as ``mixin`` does. Calling it again has no effect."""
    if not issubclass(module.TCPServer, _Server):
        module.TCPServer = type("TCPServer", (mixin, module.TCPServer), {})
