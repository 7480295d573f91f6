"""Refs to actors that move: a connection to a node is kept up, wherever its process runs at present.

::

    async def locate() -> str:
        return await directory.ask(Locate(worker="worker-3"))          # its address, as of listen

    async with reconnecting(locate, secret=secret, target="worker-3") as connection:
        generation = connection.ref(Generation, "generation")      # Ref[Generation], valid across incarnations
        scores = connection.ref(Scores, "scores")                  # over the same connection

A connection of ``peer`` belongs to one incarnation of one node, and ends with it. A reconnecting connection then
connects to the node's new address. Its refs wait for that, within the deadline of the ask; a message that may have been
received is never sent again.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from typing import Any, Generic, TypeVar
from uuid import uuid4

import anyio
from attrs import evolve

from areal_actors.errors import ActorStopped, ArealError, DeadlineExceeded, Unreachable
from areal_actors.kernel.message import Address, AnyMessage, Message, StreamMessage
from areal_actors.kernel.ref import ActorState, ActorStatistics, Down, DownReason, Life, Ref, Watched
from areal_actors.kernel.remote.frames import Limits
from areal_actors.kernel.remote.hello import check_secret
from areal_actors.kernel.remote.peer import Peer
from areal_actors.kernel.remote.transport import connect
from areal_actors.kernel.stream import check_buffer_size
from areal_actors.lib.backoff import backoff_seconds
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger

__all__ = ["Locate", "ReconnectingConnection", "reconnecting"]

_log = get_logger(__name__)

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")


# ----------------------------------------------------------------------------------------------------------------------
# The connection


Locate = Callable[[], Awaitable[str]]
"""Returns the present address of a node. It may wait.

If it raises ``ArealError`` or ``OSError``, it is called again.
"""


class ReconnectingConnection:
    """A connection that is re-established whenever it is lost. Made by ``reconnecting``."""

    def __init__(self, name: str, open_peer: Callable[[], AbstractAsyncContextManager[Peer]], limits: Limits) -> None:
        self.name = name
        """The node that the connection leads to, as named in refs and errors."""
        self.cause = "it has not been connected yet"
        """The reason why the connection is down; the most recent one while it is."""
        self.limits = limits
        self.peer: Peer | None = None
        """The node's present incarnation, while it is connected."""
        self.is_closed = False
        self._open_peer = open_peer
        self._newest = ("", 0)
        self._exposed: dict[str, Ref[Any]] = {}
        self._refs: dict[tuple[type, str], ReconnectingRef[Any]] = {}
        self._change = ChangeSignal()
        self._over = anyio.Event()
        self._random = Random(name)  # noqa: S311 - not for security: spreads the reconnects of connections that broke together

    @property
    def is_connected(self) -> bool:
        """True if an ask would be sent at once, as far as is known."""
        return self.peer is not None

    def ref(self, protocol: type[P], name: str) -> Ref[P]:
        """Return a ref to the actor that the node exposes as ``name``, valid across incarnations of the node.

        It raises what a ref of ``Peer`` raises, with these differences. While the connection is down, an ask, a tell,
        the opening of a stream and ``stop`` wait until their deadline, and ``tell_nowait`` raises ``Unreachable``. A
        call that was pending when the connection went down ends as ``Unreachable(sent=True)``, or keeps waiting if the
        other side cannot have received it. The ref also waits for an actor that is not exposed yet; after
        ``Limits.hello_seconds`` that raises ``ActorStopped``.

        Watchers receive ``Down`` with ``is_restarting=True`` at each loss, and with ``False`` at the close.
        """
        known = self._refs.get((protocol, name))
        if known is None:
            known = self._refs[protocol, name] = ReconnectingRef(self, protocol, name)
            known.attach()
            if self.is_closed:
                known.go_down(self.cause, is_restarting=False)
        return known

    async def wait_connected(self) -> Peer:
        """Wait until the connection is up.

        Raises:
            Unreachable: the connection has been closed.
        """
        while self.peer is None:
            if self.is_closed:
                raise Unreachable(f"the connection to {self.name!r} is closed", sent=False)
            await self._change.wait()
        return self.peer

    async def wait_exposed(self, name: str) -> Peer:
        """Wait until the connection is up and the node exposes an actor ``name``.

        Raises:
            ActorStopped: the node does not expose it within ``Limits.hello_seconds``.
            Unreachable: the connection has been closed.
        """
        while True:
            peer = await self.wait_connected()
            with anyio.move_on_after(self.limits.hello_seconds) as patience:
                try:
                    await peer.wait_exposed(name)
                except Unreachable:
                    continue  # wait for the next connection
                return peer
            if patience.cancelled_caught:
                known = ", ".join(sorted(peer.exposed)) or "none"
                raise ActorStopped(f"node {self.name!r} exposes no actor {name!r}; it exposes {known}")

    def expose(self, name: str, ref: Ref[Any]) -> None:
        """Make an actor of this process reachable to the node, now and after each reconnect.

        Raises:
            ConfigError: a running actor has the name, or the actor does not run in this process.
        """
        if self.peer is not None:
            self.peer.expose(name, ref)
        self._exposed[name] = ref

    def close(self) -> None:
        """Stop reconnecting and notify waiters and watchers. Called when the block is left."""
        if self.is_closed:
            return
        self.is_closed = True
        self._over.set()
        self._lose("the connection is closed")
        for ref in self._refs.values():
            ref.go_down(self.cause, is_restarting=False)
        self._change.notify()

    async def keep(self) -> None:
        """Connect again and again until the connection is closed; runs in a background task."""
        num_failures = 0
        while not self.is_closed:
            try:
                async with self._open_peer() as peer:
                    node, newest = self._newest
                    if peer.node == node and peer.incarnation < newest:
                        # The address may still lead to an earlier incarnation that has not noticed its replacement.
                        raise Unreachable(
                            f"node {node!r} lives as incarnation {newest}; incarnation {peer.incarnation} is over",
                            sent=False,
                        )
                    num_failures = 0
                    await self._stay(peer)
            except (ArealError, OSError) as error:
                num_failures += 1
                self._note(str(error) or type(error).__name__)
            if not self.is_closed:
                limits = self.limits
                seconds = backoff_seconds(
                    max(num_failures, 1), first=limits.redial_seconds, longest=limits.max_redial_seconds
                )
                await anyio.sleep(seconds * self._random.uniform(0.5, 1.0))

    async def _stay(self, peer: Peer) -> None:
        self._over = anyio.Event()
        # Follow the peer before it is used, so that a cut in between is not missed.
        follower = partial(self._on_news, peer)
        peer.follow(follower)
        try:
            for name, ref in self._exposed.items():
                peer.expose(name, ref)
            # Expose before announcing the connection, so that waiters find everything in place.
            self.peer, self._newest = peer, (peer.node, peer.incarnation)
            self._change.notify()
            follower()
            await self._over.wait()
        finally:
            peer.unfollow(follower)
            self._lose(peer.connection.cause or "this side has left the connection")

    def _on_news(self, peer: Peer) -> None:
        """Watch actors that have become exposed; when the connection is lost, mark it as down."""
        if peer.is_connected:
            for ref in self._refs.values():
                ref.attach()
        else:
            self._lose(peer.connection.cause or "")
            self._over.set()

    def _lose(self, cause: str) -> None:
        if self.peer is None:
            return
        self.peer = None
        self._note(cause)
        if not self.is_closed:
            for ref in self._refs.values():
                ref.go_down(cause, is_restarting=True)

    def _note(self, cause: str) -> None:
        if cause != self.cause and not self.is_closed:
            _log.warning("connection_lost", node=self.name, reason=cause)
        self.cause = cause


@asynccontextmanager
async def reconnecting(
    locate: Locate,
    *,
    secret: bytes,
    target: str = "",
    node: str = "",
    incarnation: int = 1,
    expose: Mapping[str, Ref[Any]] | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[ReconnectingConnection]:
    """Keep a connection to the node that ``locate`` finds, for the duration of the block.

    The block starts without waiting for the first connection.

    Args:
        locate: returns the present address of the node; called before each connection.
        secret: the shared secret, at least 16 bytes.
        target: the name that the node must have; a connection to any other node is closed. Empty: any name.
        node: the name of this side; two connections of one name to one node replace each other instead of both being
            connected.
        incarnation: the incarnation of this side.
        expose: actors of this process that the node may reach, by name; see ``ReconnectingConnection.expose``.
        limits: limits of each connection, and the delays before reconnecting.

    Raises:
        ConfigError: the secret is too short.
    """
    check_secret(secret)
    limits = limits or Limits()
    name = node or f"connection-{uuid4().hex[:12]}"

    @asynccontextmanager
    async def dial() -> AsyncIterator[Peer]:
        address = await locate()
        async with connect(address, secret=secret, node=name, incarnation=incarnation, limits=limits) as peer:
            if target and peer.node != target:
                raise Unreachable(f"at {address} answers node {peer.node!r}, not {target!r}", sent=False)
            yield peer

    connection = ReconnectingConnection(target or f"via-{name}", dial, limits)
    for exposed, ref in (expose or {}).items():
        connection.expose(exposed, ref)
    async with open_tasks() as tasks:
        tasks.start_soon(connection.keep, name=f"connection to {connection.name}")
        try:
            yield connection
            if not connection.is_connected:
                # A connected connection writes its queue first, then ends.
                tasks.cancel_scope.cancel()
        finally:
            connection.close()


# ----------------------------------------------------------------------------------------------------------------------
# Its refs


class ReconnectingRef(Watched, Ref[P_contra], Generic[P_contra]):
    """A ref over a connection. See ``Ref`` for the contract, and ``ReconnectingConnection.ref`` for the differences."""

    __slots__ = ("_connection", "_incarnation", "_name", "_near", "_peer", "_protocol")

    def __init__(self, connection: ReconnectingConnection, protocol: type[P_contra], name: str) -> None:
        super().__init__()
        self._connection, self._protocol, self._name = connection, protocol, name
        self._peer: Peer | None = None
        self._near: Ref[P_contra] | None = None
        self._incarnation = 1

    @property
    def address(self) -> Address:
        """The address of the actor on the connection's node, with the last known incarnation."""
        if self._near is not None:
            self._incarnation = self._near.address.incarnation
        return Address(node=self._connection.name, name=self._name, incarnation=self._incarnation)

    @property
    def life(self) -> Life:
        """This ref itself, which reports the ends of the actor and each loss of the connection."""
        return self

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``.

        ``timeout`` includes the wait for the connection.
        """
        if timeout is None:
            return await self._retry_until(message, lambda near: near.ask(message))
        until = anyio.current_time() + timeout
        return await self._retry_until(
            message, lambda near: near.ask(message, timeout=max(until - anyio.current_time(), 0.0)), until
        )

    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Send ``message``; see ``Ref.tell``."""
        await self._retry_until(message, lambda near: near.tell(message))

    def tell_nowait(self, message: Message[P_contra, Any]) -> None:
        """Send ``message`` without waiting; see ``Ref.tell_nowait``."""
        near = self._present()
        if near is None:
            raise Unreachable(f"{self._describe(message)} was not sent: {self._connection.cause}", sent=False)
        near.tell_nowait(message)

    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; see ``Ref.stream``."""
        check_buffer_size(buffer_size)
        return self._stream(message, buffer_size)

    async def stop(self, *, grace: float | None = None) -> None:
        """End the present incarnation, or the next one that is found; see ``Ref.stop``."""
        await self._retry_until(None, lambda near: near.stop(grace=grace))

    def statistics(self) -> ActorStatistics:
        """Return what this side knows of the present incarnation."""
        near = self._present()
        if near is not None:
            return near.statistics()
        return ActorStatistics(
            name=self._name,
            state=ActorState.STARTING,
            incarnation=self._incarnation,
            num_queued=0,
            num_parked=0,
            num_waiting_senders=0,
            num_running=0,
            mailbox_size=0,
            num_handled=0,
            num_failed=0,
            num_cancelled=0,
            num_dropped=0,
            mailbox_peak=0,
        )

    # ------------------------------------------------------------------------------------------------ incarnations

    def attach(self) -> None:
        """Use the actor of the present connection, if it is exposed there.

        Called whenever the connection reports a change.
        """
        peer = self._connection.peer
        if peer is None or peer is self._peer or not peer.has(self._protocol, self._name):
            return
        self._peer, self._near = peer, peer.ref(self._protocol, self._name)
        self._near.life.watch(self._pass_on)

    def go_down(self, cause: str, *, is_restarting: bool) -> None:
        """Notify watchers that the connection is down."""
        down = Down(
            ref=self,
            incarnation=self.address.incarnation,
            reason=DownReason.UNREACHABLE,
            error=cause,
            is_restarting=is_restarting,
        )
        self._peer = self._near = None
        if not is_restarting:
            self.final_down = down
        self.report(down)

    def _pass_on(self, down: Down) -> None:
        if down.reason is not DownReason.UNREACHABLE:  # the connection reports that itself
            self.report(evolve(down, ref=self))

    # ------------------------------------------------------------------------------------------------ the connection

    def _present(self) -> Ref[P_contra] | None:
        return self._near if self._peer is not None and self._peer.is_connected else None

    async def _retry_until(
        self, message: AnyMessage[Any] | None, act: Callable[[Ref[P_contra]], Awaitable[R]], until: float = math.inf
    ) -> R:
        """Call ``act`` with the present ref, and retry after a reconnect.

        It is retried only if the other side cannot have received the message.
        """
        while True:
            near = self._present()
            if near is None:
                with anyio.CancelScope(deadline=until):
                    peer = await self._connection.wait_exposed(self._name)
                    self.attach()
                    # ``attach`` ignores an actor that does not speak the protocol; ``Peer.ref`` raises the error that
                    # says so.
                    near = self._near or peer.ref(self._protocol, self._name)
            if near is None:
                raise DeadlineExceeded(
                    f"{self._describe(message)} was not sent before its deadline: "
                    f"the connection is down ({self._connection.cause})"
                )
            try:
                return await act(near)
            except Unreachable as error:
                # A message that may have been received must not be sent twice: delivery is at most once.
                if error.sent or self._connection.is_closed:
                    raise

    @asynccontextmanager
    async def _stream(
        self, message: StreamMessage[P_contra, Item], buffer_size: int
    ) -> AsyncIterator[AsyncIterator[Item]]:
        async with AsyncExitStack() as stack:
            yield await self._retry_until(
                message,
                lambda near: stack.enter_async_context(near.stream(message, buffer_size=buffer_size)),
            )

    def _describe(self, message: AnyMessage[Any] | None) -> str:
        name = "its end" if message is None else type(message).__name__
        return f"{name} to actor {self._name!r} on {self._connection.name!r}"
