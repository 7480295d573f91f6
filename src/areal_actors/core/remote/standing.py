"""Refs to actors that move: a line is kept connected to a node, wherever its process runs at present.

::

    async def locate() -> str:
        return await directory.ask(Locate(worker="worker-3"))          # its address, as of listen

    async with standing(locate, secret=secret, target="worker-3") as line:
        generation = line.ref(Generation, "generation")                # Ref[Generation], good for all of its lives
        scores = line.ref(Scores, "scores")                            # over the same connection

A connection belongs to one incarnation of one node, and ends with it (see ``peer``). A line then reconnects to the
node's new address. Its refs wait for that, within the deadline of the ask; a message that may have been received is
never sent again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from random import Random
from typing import Any, TypeVar
from uuid import uuid4

import anyio

from areal_actors.core.ref import Ref
from areal_actors.core.remote.hello import check_secret
from areal_actors.core.remote.limits import Limits
from areal_actors.core.remote.peer import Peer
from areal_actors.core.remote.standing_ref import StandingRef
from areal_actors.core.remote.transport import Listener, connect, unwrapped
from areal_actors.errors import ActorStopped, ArealError, Unreachable

__all__ = ["Line", "Locate", "standing", "standing_from"]

logger = logging.getLogger(__name__)

P = TypeVar("P")
Locate = Callable[[], Awaitable[str]]
"""Returns the present address of a node. It may wait.

If it raises ``ArealError`` or ``OSError``, it is called again.
"""


class Line:
    """A connection that is re-established whenever it is lost. Made by ``standing`` and ``standing_from``."""

    def __init__(self, name: str, open_peer: Callable[[], AbstractAsyncContextManager[Peer]], limits: Limits) -> None:
        self.name = name
        """The node that the line leads to, as named in refs and errors."""
        self.cause = "it has not been connected yet"
        """The reason why the line is not connected; the most recent one while it is."""
        self.limits = limits
        self.peer: Peer | None = None
        """The node's present incarnation, while it is connected."""
        self.is_closed = False
        self._open_peer = open_peer
        self._newest = ("", 0)
        self._exposed: dict[str, Ref[Any]] = {}
        self._refs: dict[tuple[type, str], StandingRef[Any]] = {}
        self._change = anyio.Event()
        self._over = anyio.Event()
        self._random = Random(name)  # noqa: S311 - not for security: spreads the reconnects of lines that broke together

    @property
    def is_connected(self) -> bool:
        """True if an ask would be sent at once, as far as is known."""
        return self.peer is not None

    def ref(self, protocol: type[P], name: str) -> Ref[P]:
        """Return a ref to the actor that the node exposes as ``name``, valid across incarnations of the node.

        It raises what a ref of ``Peer`` raises, with these differences. While the line is down, an ask, a tell, the
        opening of a stream and ``stop`` wait until their deadline, and ``tell_nowait`` raises ``Unreachable``. A call
        that was pending when the line went down ends as ``Unreachable(sent=True)``, or keeps waiting if the other side
        cannot have received it. The ref also waits for an actor that is not exposed yet; after ``Limits.hello_seconds``
        that raises ``ActorStopped``.

        Watchers receive ``Down`` with ``is_restarting=True`` at each loss, and with ``False`` when the line is closed.
        """
        known = self._refs.get((protocol, name))
        if known is None:
            known = self._refs[protocol, name] = StandingRef(self, protocol, name)
            known.attach()
            if self.is_closed:
                known.go_down(self.cause, is_restarting=False)
        return known

    async def wait_connected(self) -> Peer:
        """Wait until the line is up.

        Raises:
            Unreachable: the line has been closed.
        """
        while self.peer is None:
            if self.is_closed:
                raise Unreachable(f"the line to {self.name!r} is closed", sent=False)
            await self._change.wait()
        return self.peer

    async def wait_exposed(self, name: str) -> Peer:
        """Wait until the line is up and the node exposes an actor ``name``.

        Raises:
            ActorStopped: the node does not expose it within ``Limits.hello_seconds``.
            Unreachable: the line has been closed.
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

    def drop(self, cause: str) -> None:
        """Cut the present connection, if any, and locate the node again, because it is known to have moved."""
        if self.peer is not None:
            self.peer.close(cause)

    def close(self) -> None:
        """Stop reconnecting and notify waiters and watchers. Called when the block is left."""
        if self.is_closed:
            return
        self.is_closed = True
        self._over.set()
        self._lose("the line is closed")
        for ref in self._refs.values():
            ref.go_down(self.cause, is_restarting=False)
        self._announce()

    async def keep(self) -> None:
        """Connect again and again until the line is closed; runs in a background task."""
        num_failures = 0
        while not self.is_closed:
            try:
                async with self._open_peer() as peer:
                    self._check(peer)
                    num_failures = 0
                    await self._stay(peer)
            except (ArealError, OSError) as error:
                num_failures += 1
                self._note(str(error) or type(error).__name__)
            if not self.is_closed:
                await anyio.sleep(self._delay(num_failures))

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
            self._announce()
            follower()
            await self._over.wait()
        finally:
            peer.unfollow(follower)
            self._lose(peer.connection.cause or "this side has left the line")

    def _on_news(self, peer: Peer) -> None:
        """Watch actors that have become exposed; when the connection is lost, mark the line as down."""
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
            logger.warning("the line to %r is down: %s", self.name, cause)
        self.cause = cause

    def _check(self, peer: Peer) -> None:
        """Refuse a peer that is an earlier incarnation of the node.

        Raises:
            Unreachable: it is.
        """
        node, newest = self._newest
        # An address may still lead to an earlier incarnation that has not noticed its replacement.
        if peer.node == node and peer.incarnation < newest:
            raise Unreachable(
                f"node {node!r} lives as incarnation {newest}; incarnation {peer.incarnation} is over", sent=False
            )

    def _announce(self) -> None:
        self._change.set()
        self._change = anyio.Event()

    def _delay(self, num_failures: int) -> float:
        seconds = self.limits.redial_seconds * 2.0 ** min(max(num_failures - 1, 0), 64)
        return min(seconds, self.limits.max_redial_seconds) * self._random.uniform(0.5, 1.0)


@asynccontextmanager
async def standing(
    locate: Locate,
    *,
    secret: bytes,
    target: str = "",
    node: str = "",
    incarnation: int = 1,
    expose: Mapping[str, Ref[Any]] | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[Line]:
    """Keep a line to the node that ``locate`` finds, for the duration of the block.

    The block starts without waiting for the first connection.

    Args:
        locate: returns the present address of the node; called before each connection.
        secret: the shared secret, at least 16 bytes.
        target: the name that the node must have; a connection to any other node is closed. Empty: any name.
        node: the name of this side; two lines of one name to one node replace each other instead of both being
            connected.
        incarnation: the incarnation of this side.
        expose: actors of this process that the node may reach, by name; see ``Line.expose``.
        limits: limits of each connection, and the delays before reconnecting.

    Raises:
        ConfigError: the secret is too short.
    """
    check_secret(secret)
    limits = limits or Limits()
    name = node or f"line-{uuid4().hex[:12]}"

    @asynccontextmanager
    async def dial() -> AsyncIterator[Peer]:
        address = await locate()
        async with connect(address, secret=secret, node=name, incarnation=incarnation, limits=limits) as peer:
            if target and peer.node != target:
                raise Unreachable(f"at {address} answers node {peer.node!r}, not {target!r}", sent=False)
            yield peer

    async with _kept(Line(target or f"via-{name}", dial, limits), expose) as line:
        yield line


@asynccontextmanager
async def standing_from(
    listener: Listener, node: str, *, expose: Mapping[str, Ref[Any]] | None = None, limits: Limits | None = None
) -> AsyncIterator[Line]:
    """Keep a line to a node that itself connects to ``listener``, again after each loss. Otherwise as ``standing``."""

    @asynccontextmanager
    async def wait() -> AsyncIterator[Peer]:
        yield await listener.wait_for(node)

    async with _kept(Line(node, wait, limits or Limits()), expose) as line:
        yield line


@asynccontextmanager
async def _kept(line: Line, expose: Mapping[str, Ref[Any]] | None) -> AsyncIterator[Line]:
    for name, ref in (expose or {}).items():
        line.expose(name, ref)
    body: list[BaseException] = []
    with unwrapped(body):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(line.keep, name=f"line to {line.name}")
            try:
                yield line
                if not line.is_connected:
                    tasks.cancel_scope.cancel()  # a connected line writes its queue first, then ends
            except BaseException as error:
                body.append(error)
                raise
            finally:
                line.close()
