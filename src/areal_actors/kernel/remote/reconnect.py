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

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any, TypeVar
from uuid import uuid4

import anyio

from areal_actors.errors import ActorStopped, ArealError, Unreachable
from areal_actors.kernel.ref import Ref
from areal_actors.kernel.remote.frames import Limits
from areal_actors.kernel.remote.hello import check_secret
from areal_actors.kernel.remote.peer import Peer, RemoteRef
from areal_actors.kernel.remote.transport import connect
from areal_actors.lib.backoff import backoff_seconds
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

P = TypeVar("P")

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
        self._refs: dict[str, RemoteRef[Any]] = {}
        self._change = ChangeSignal()
        self._random = Random(name)  # noqa: S311 - not for security: spreads the reconnects of connections that broke together

    @property
    def is_connected(self) -> bool:
        """True if an ask would be sent at once, as far as is known."""
        return self.peer is not None and self.peer.is_connected

    def ref(self, protocol: type[P], name: str) -> Ref[P]:  # noqa: ARG002 - it types the ref; messages are checked when they are sent
        """Return a ref to the actor that the node exposes as ``name``, valid across incarnations of the node.

        It raises what a ref of ``Peer`` raises, with these differences. While the connection is down, an ask, a tell
        and the opening of a stream wait until their deadline. A call that was pending when the connection went down
        ends as ``Unreachable(sent=True)``, or keeps waiting if the other side cannot have received it. The ref also
        waits for an actor that is not exposed yet; after ``Limits.hello_seconds`` that raises ``ActorStopped``.

        Watchers receive ``Down`` with ``is_restarting=True`` at each loss, and with ``False`` at the close.
        """
        if name not in self._refs:
            ref: RemoteRef[P] = RemoteRef(name, self.name, self.limits, source=self)
            self._refs[name] = ref
            if self.peer is not None:
                self.peer.adopt(ref)
            if self.is_closed:
                ref.lose(self.cause)
        return self._refs[name]

    async def wait_connected(self) -> Peer:
        """Wait until the connection is up.

        Raises:
            Unreachable: the connection has been closed.
        """
        while True:
            if self.is_closed:
                raise Unreachable(f"the connection to {self.name!r} is closed", sent=False)
            if self.peer is not None and self.peer.is_connected:
                return self.peer
            await self._change.wait()

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

    def close(self) -> None:
        """Stop reconnecting and notify waiters and watchers. Called when the block is left."""
        if self.is_closed:
            return
        self.is_closed = True
        self.cause = "the connection is closed"
        for ref in self._refs.values():
            ref.lose(self.cause)
        self._change.notify()
        if self.peer is not None:
            # Wakes ``_stay``, which leaves the connection once it has written its queue.
            self.peer.changed.notify()

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
        """Use ``peer`` until its connection is lost, or this one is closed."""
        try:
            self.peer, self._newest = peer, (peer.node, peer.incarnation)
            self._change.notify()
            while peer.is_connected and not self.is_closed:
                for remote in self._refs.values():
                    peer.adopt(remote)
                await peer.changed.wait()
        finally:
            self.peer = None
            self._note(peer.connection.cause or "this side has left the connection")

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
    async with open_tasks() as tasks:
        tasks.start_soon(connection.keep, name=f"connection to {connection.name}")
        try:
            yield connection
            if not connection.is_connected:
                # A connected connection writes its queue first, then ends.
                tasks.cancel_scope.cancel()
        finally:
            connection.close()
