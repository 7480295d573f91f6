"""A ref that outlives its connections; made by ``standing.Line.ref``, which documents its guarantees."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
from attrs import evolve

from areal_actors.core.message import Address, AnyMessage, Message, StreamMessage
from areal_actors.core.ref import Down, DownReason, Life, Ref, Watched
from areal_actors.core.statistics import ActorState, ActorStatistics
from areal_actors.errors import DeadlineExceeded, Unreachable

if TYPE_CHECKING:
    from areal_actors.core.remote.peer import Peer
    from areal_actors.core.remote.standing import Line

__all__ = ["StandingRef"]

P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")


class StandingRef(Watched, Ref[P_contra], Generic[P_contra]):
    """A ref over a line. See ``Ref`` for the contract, and ``Line.ref`` for the differences."""

    __slots__ = ("_incarnation", "_line", "_name", "_near", "_peer", "_protocol")

    def __init__(self, line: Line, protocol: type[P_contra], name: str) -> None:
        super().__init__()
        self._line, self._protocol, self._name = line, protocol, name
        self._peer: Peer | None = None
        self._near: Ref[P_contra] | None = None
        self._incarnation = 1

    @property
    def address(self) -> Address:
        """The address of the actor on the line's node, with the last known incarnation."""
        if self._near is not None:
            self._incarnation = self._near.address.incarnation
        return Address(node=self._line.name, name=self._name, incarnation=self._incarnation)

    @property
    def life(self) -> Life:
        """This ref itself, which reports the ends of the actor and each loss of the line."""
        return self

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``. ``timeout`` includes the wait for the line."""
        if timeout is None:
            return await self._insist(message, lambda near: near.ask(message))
        until = anyio.current_time() + timeout
        return await self._insist(
            message, lambda near: near.ask(message, timeout=max(until - anyio.current_time(), 0.0)), until
        )

    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Send ``message``; see ``Ref.tell``."""
        await self._insist(message, lambda near: near.tell(message))

    def tell_nowait(self, message: Message[P_contra, Any]) -> None:
        """Send ``message`` without waiting; see ``Ref.tell_nowait``."""
        near = self._present()
        if near is None:
            raise Unreachable(f"{self._describe(message)} was not sent: {self._line.cause}", sent=False)
        near.tell_nowait(message)

    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; see ``Ref.stream``."""
        if buffer_size < 0:
            raise ValueError(f"buffer_size={buffer_size} is no number of items; give 0 or more")
        return self._stream(message, buffer_size)

    async def stop(self, *, grace: float | None = None) -> None:
        """End the present incarnation, or the next one that is found; see ``Ref.stop``."""
        await self._insist(None, lambda near: near.stop(grace=grace))

    def statistics(self) -> ActorStatistics:
        """Return what this side knows of the present incarnation."""
        near = self._present()
        return _unknown(self._name, self._incarnation) if near is None else near.statistics()

    # ------------------------------------------------------------------------------------------------ incarnations

    def attach(self) -> None:
        """Use the actor of the present connection, if it is exposed there.

        Called whenever the line reports a change.
        """
        peer = self._line.peer
        if peer is None or peer is self._peer or not peer.has(self._protocol, self._name):
            return
        self._peer, self._near = peer, peer.ref(self._protocol, self._name)
        self._near.life.watch(self._pass_on)

    def go_down(self, cause: str, *, is_restarting: bool) -> None:
        """Notify watchers that the line is down."""
        down = Down(
            ref=self,
            incarnation=self.address.incarnation,
            reason=DownReason.UNREACHABLE,
            error=cause,
            is_restarting=is_restarting,
        )
        self._peer = self._near = None
        if not is_restarting:
            self.last_words = down
        self.report(down)

    def _pass_on(self, down: Down) -> None:
        if down.reason is not DownReason.UNREACHABLE:  # the line reports that itself
            self.report(evolve(down, ref=self))

    # ------------------------------------------------------------------------------------------------ the line

    def _present(self) -> Ref[P_contra] | None:
        return self._near if self._peer is not None and self._peer.is_connected else None

    async def _insist(
        self, message: AnyMessage[Any] | None, act: Callable[[Ref[P_contra]], Awaitable[R]], until: float = math.inf
    ) -> R:
        """Call ``act`` with the present ref, and retry after a reconnect.

        It is retried only if the other side cannot have received the message.
        """
        while True:
            near = self._present() or await self._reach(message, until)
            try:
                return await act(near)
            except Unreachable as error:
                # A message that may have been received must not be sent twice: delivery is at most once.
                if error.sent or self._line.is_closed:
                    raise

    async def _reach(self, message: AnyMessage[Any] | None, until: float) -> Ref[P_contra]:
        with anyio.CancelScope(deadline=until):
            peer = await self._line.wait_exposed(self._name)
            self.attach()
            # ``attach`` ignores an actor that does not speak the protocol; ``Peer.ref`` raises the error that says so.
            return self._near or peer.ref(self._protocol, self._name)
        raise DeadlineExceeded(
            f"{self._describe(message)} was not sent before its deadline: the line is down ({self._line.cause})"
        )

    @asynccontextmanager
    async def _stream(
        self, message: StreamMessage[P_contra, Item], buffer_size: int
    ) -> AsyncIterator[AsyncIterator[Item]]:
        async with AsyncExitStack() as stack:
            yield await self._insist(
                message,
                lambda near: stack.enter_async_context(near.stream(message, buffer_size=buffer_size)),
            )

    def _describe(self, message: AnyMessage[Any] | None) -> str:
        name = "its end" if message is None else type(message).__name__
        return f"{name} to actor {self._name!r} on {self._line.name!r}"


def _unknown(name: str, incarnation: int) -> ActorStatistics:
    return ActorStatistics(
        name=name,
        state=ActorState.STARTING,
        incarnation=incarnation,
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
