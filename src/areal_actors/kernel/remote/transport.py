"""Establishes connections over unix sockets and TCP: listening and connecting.

``sockets`` defines addresses, ``hello`` the handshake, and ``peer`` everything that follows on a connection.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketListener, SocketStream, TaskGroup
from anyio.streams.stapled import MultiListener

from areal_actors.errors import ActorError, ProtocolError, Unreachable
from areal_actors.kernel.ref import Ref
from areal_actors.kernel.remote.connection import LOST, Connection
from areal_actors.kernel.remote.frames import Limits
from areal_actors.kernel.remote.hello import check_secret, greet, receive_hello, send_hello, send_packet
from areal_actors.kernel.remote.peer import Exposed, Peer, check_free
from areal_actors.kernel.remote.peer import expose as expose_actor
from areal_actors.kernel.remote.sockets import UnixStream, check_directory, parse_address
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_SECONDS = 0.1
"""Delay before accepting again when resources are exhausted; clients wait in the backlog meanwhile."""

_MAX_STRANGERS = 64
"""Connections that may be in the handshake at once.

A further one takes the place of one that is silent, or is closed.
"""
_SILENT_SECONDS = 1.0
"""Age at which a connection in the handshake counts as silent.

A handshake takes milliseconds, and a thousand workers that connect at once must not throw each other out.
"""


class Listener:
    """Accepts connections. Made by ``listen``."""

    def __init__(self, node: str, incarnation: int, secret: bytes, exposed: dict[str, Exposed], limits: Limits) -> None:
        check_secret(secret)
        self.node, self.incarnation = node, incarnation
        self.address = ""
        """The address it listens at, with the actual port; empty if it does not listen."""
        self._secret, self._exposed, self._limits = secret, exposed, limits
        self._peers: dict[str, Peer] = {}
        self._newest: dict[str, int] = {}
        self._strangers: dict[anyio.CancelScope, float] = {}
        self._arrival = ChangeSignal()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers that are connected."""
        return tuple(self._peers.values())

    async def wait_for(self, node: str) -> Peer:
        """Wait until a node of this name is connected."""
        while (peer := self._peers.get(node)) is None or not peer.is_connected:
            await self._arrival.wait()
        return peer

    def expose(self, name: str, ref: Ref[Any]) -> None:
        """Make another actor reachable, also over existing connections.

        Raises:
            ConfigError: a running actor has the name, or the actor does not run in this process.
        """
        exposed = expose_actor(name, ref)
        check_free(self._exposed, name)
        self._exposed[name] = exposed
        for peer in self._peers.values():
            peer.add(exposed)

    async def serve(self, stream: ByteStream) -> None:
        """Accept one connection and serve it until it is cut. Errors of the handshake are logged, not raised."""
        now = anyio.current_time()
        # Bounds the resources that unauthenticated clients can occupy.
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest, began_at = next(iter(self._strangers.items()))
            if now - began_at < _SILENT_SECONDS:
                await anyio.aclose_forcefully(stream)
                return
            del self._strangers[oldest]
            oldest.cancel()
        peer: Peer | None = None
        scope = anyio.CancelScope()
        self._strangers[scope] = now
        try:
            with scope:
                peer = await self._introduced(stream)
        except (ProtocolError, TimeoutError, *LOST) as error:
            _log.warning("connection_refused", reason=str(error) or type(error).__name__)
            await anyio.aclose_forcefully(stream)
            return
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise
        finally:
            self._strangers.pop(scope, None)
        if peer is None:
            _log.warning("connection_refused", reason="it was silent, and others want to connect")
            await anyio.aclose_forcefully(stream)
            return
        try:
            async with anyio.create_task_group() as tasks:
                peer.connection.start(peer, tasks)
                self._arrival.notify()
                await peer.connection.closed.wait()
        finally:
            self._forget(peer)

    async def _introduced(self, stream: ByteStream) -> Peer:
        with anyio.fail_after(self._limits.hello_seconds):
            other = await receive_hello(
                stream, greet(node=self.node, incarnation=self.incarnation, limits=self._limits), self._secret
            )
            newest, refusal = self._newest.get(other.node, 1), ""
            if other.incarnation < newest:
                refusal = f"node {other.node!r} lives as incarnation {newest}; incarnation {other.incarnation} is over"
            elif other.incarnation == newest and other.node in self._peers:
                refusal = f"node {other.node!r} is connected already, as incarnation {newest}"
            if refusal:
                await send_packet(stream, {"refused": refusal})
                raise ProtocolError(refusal)
            # Reserve the name before the next ``await``, so that one of two simultaneous connections is refused.
            old = self._peers.pop(other.node, None)
            # Incarnation 1 is the default of ``_newest``, and most names are used only once.
            if other.incarnation > 1:
                self._newest[other.node] = other.incarnation
            if old is not None:
                old.close(f"incarnation {other.incarnation} of node {other.node!r} has taken its place")
            connection = Connection(stream, self._limits)
            peer = self._peers[other.node] = Peer(connection, other, self._limits, self._exposed, ())
            try:
                await send_packet(stream, {"welcome": [one.to_data() for one in self._exposed.values()]})
            except BaseException:
                self._forget(peer)
                raise
            return peer

    def _forget(self, peer: Peer) -> None:
        peer.close()
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]


@asynccontextmanager
async def listen(
    address: str | None,
    *,
    secret: bytes,
    expose: Mapping[str, Ref[Any]] | None = None,
    node: str = "",
    incarnation: int = 1,
    limits: Limits | None = None,
) -> AsyncIterator[Listener]:
    """Accept connections at ``address`` for the duration of the block.

    Leaving it writes what is queued, then closes them.

    Args:
        address: ``unix:PATH`` or ``tcp://HOST:PORT`` (port 0: any free one); ``None`` if the caller provides the
            streams (``Listener.serve``).
        secret: the shared secret, at least 16 bytes.
        expose: actors of this process that connected nodes may reach, by name.
        node: the name of this side.
        incarnation: the incarnation of this node, 1 or more; greater than all earlier ones.
        limits: limits of each connection.

    Raises:
        ConfigError: the address is invalid or unsafe, or the secret is too short.
        ActorError: the address is already in use.
    """
    limits = limits or Limits()
    exposed = {name: expose_actor(name, ref) for name, ref in (expose or {}).items()}
    listener = Listener(node or _unique_name(), incarnation, secret, exposed, limits)
    async with open_tasks() as tasks:
        async with _accepting(address, listener, tasks):
            yield listener
        async with anyio.create_task_group() as closing:
            # Concurrently, because each may take up to ``cleanup_seconds``.
            for peer in listener.peers:
                closing.start_soon(peer.connection.aclose)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def connect(
    address: str,
    *,
    secret: bytes,
    expose: Mapping[str, Ref[Any]] | None = None,
    node: str = "",
    incarnation: int = 1,
    limits: Limits | None = None,
) -> AsyncIterator[Peer]:
    """Connect to the listener at ``address`` for the duration of the block. The arguments are those of ``listen``.

    Raises:
        Unreachable: the listener does not answer, does not know the secret, or refuses the connection; the message says
            which.
        ConfigError: the address is invalid, or the secret is too short.
    """
    limits = limits or Limits()
    check_secret(secret)
    path, host, port = parse_address(address)
    try:
        with anyio.fail_after(limits.hello_seconds):
            stream = _own(await (anyio.connect_tcp(host, port) if path is None else anyio.connect_unix(path)))
    except TimeoutError:
        raise Unreachable(f"no answer at {address} within {limits.hello_seconds:g} s", sent=False) from None
    except OSError as error:
        # anyio only says that all attempts failed, and has the reason as its cause.
        raise Unreachable(f"no answer at {address}: {error.__cause__ or error}", sent=False) from None
    async with connect_stream(
        stream, secret=secret, expose=expose, node=node, incarnation=incarnation, limits=limits
    ) as peer:
        yield peer


@asynccontextmanager
async def connect_stream(
    stream: ByteStream,
    *,
    secret: bytes,
    expose: Mapping[str, Ref[Any]] | None = None,
    node: str = "",
    incarnation: int = 1,
    limits: Limits | None = None,
) -> AsyncIterator[Peer]:
    """Connect as ``connect`` does, over an existing byte stream."""
    limits = limits or Limits()
    exposed = {name: expose_actor(name, ref) for name, ref in (expose or {}).items()}
    own = greet(node=node or _unique_name(), incarnation=incarnation, limits=limits)
    try:
        with anyio.fail_after(limits.hello_seconds):
            other, welcome = await send_hello(stream, own, secret)
        peer = Peer(Connection(stream, limits), other, limits, exposed, welcome)
    except TimeoutError:
        await anyio.aclose_forcefully(stream)
        raise Unreachable(f"no introduction within {limits.hello_seconds} s", sent=False) from None
    except (ProtocolError, *LOST) as error:
        await anyio.aclose_forcefully(stream)
        raise Unreachable(f"the introduction failed: {str(error) or type(error).__name__}", sent=False) from None
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise
    async with open_tasks() as tasks:
        peer.connection.start(peer, tasks)
        for one in exposed.values():
            peer.announce(one)
        try:
            yield peer
            await peer.connection.aclose()
        finally:
            peer.connection.cut("this side has closed the connection")


# ------------------------------------------------------------------------------------------------- addresses


@asynccontextmanager
async def _accepting(address: str | None, listener: Listener, tasks: TaskGroup) -> AsyncIterator[None]:
    """Accept connections at ``address`` for the duration of the block, and serve them in ``tasks``."""
    if address is None:
        yield
        return
    path, host, port = parse_address(address)
    try:
        if path is None:
            listening = await anyio.create_tcp_listener(local_host=host, local_port=port)
            shown = f"[{host}]" if ":" in host else host
            listener.address = f"tcp://{shown}:{listening.extra(SocketAttribute.local_port)}"  # noqa: S610 - anyio's, not Django's
        else:
            check_directory(path.parent)
            await _check_unused(path)
            # anyio replaces the file that a dead listener left.
            listening = MultiListener([await anyio.create_unix_listener(path, mode=0o600)])
            listener.address = address
    except OSError as error:
        raise ActorError(f"cannot listen at {address}: {error}") from None
    try:
        async with open_tasks() as accepting:
            for one in listening.listeners:
                assert isinstance(one, SocketListener), "as anyio makes them"
                accepting.start_soon(_accept, one, listener, tasks, name=f"listen at {listener.address}")
            yield
            accepting.cancel_scope.cancel()
    finally:
        # After the tasks that wait on its sockets.
        await anyio.aclose_forcefully(listening)
        if path is not None:
            path.unlink(missing_ok=True)


async def _accept(sockets: SocketListener, listener: Listener, tasks: TaskGroup) -> None:
    """Serve each connection in ``tasks``.

    When descriptors or memory are exhausted, accepting is retried after a delay, and a warning is logged once: a lack
    of descriptors is temporary and must not end the listener.
    """
    is_told = False
    while True:
        try:
            tasks.start_soon(listener.serve, _own(await sockets.accept()))
        except (OSError, anyio.BrokenResourceError) as error:
            # Depending on the event loop and the kind of socket, anyio raises the system's error or one of its own.
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, ConnectionError):
                continue  # it broke before it was accepted
            if not isinstance(cause, OSError) or cause.errno not in _EXHAUSTED:
                raise
            if not is_told:
                remedy = "raise the limit of open files (ulimit -n)"
                _log.warning("connections_wait", reason=cause.strerror, remedy=remedy)
            is_told = True
            await anyio.sleep(_EXHAUSTED_SECONDS)


def _own(stream: SocketStream) -> ByteStream:
    """Return the stream with which a connection uses the socket of ``stream``."""
    raw = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - anyio's, not Django's
    return UnixStream(raw) if raw.family == socket.AF_UNIX else stream


async def _check_unused(path: Path) -> None:
    try:
        stream = await anyio.connect_unix(path)
    except OSError:
        return
    await anyio.aclose_forcefully(stream)
    raise ActorError(f"another process already listens at unix:{path}; choose another path")


def _unique_name() -> str:
    return f"node-{uuid4().hex[:12]}"
