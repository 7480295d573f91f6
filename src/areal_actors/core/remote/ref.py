"""A ref to an actor at the other end of a connection, with the guarantees of ``Ref``.

There are three differences from a local ref. A message is encoded when it is sent, so that values that cannot be
encoded are refused at once. ``tell`` returns when the message is within the credit that the other side granted, and
does not report what happens to it afterwards. A deadlock across processes is not detected; use deadlines there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from anyio.lowlevel import checkpoint

from areal_actors.core.message import Address, Message, StreamMessage
from areal_actors.core.ref import Life, Ref
from areal_actors.core.remote.frames import Kind
from areal_actors.core.statistics import ActorStatistics
from areal_actors.errors import DeadlineExceeded, MailboxFull

if TYPE_CHECKING:
    from areal_actors.core.remote.calls import Call, Channel

__all__ = ["RemoteRef"]

P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")


class RemoteRef(Ref[P_contra], Generic[P_contra]):
    """A ref to a remote actor.

    See ``Ref`` for the contract; also raises ``Unreachable``, which says if the message was sent.
    """

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def address(self) -> Address:
        """The address of the actor, with its present incarnation as far as is known here."""
        return self._channel.address

    @property
    def life(self) -> Life:
        """The channel, which reports the end of each incarnation and of the connection."""
        return self._channel

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``."""
        channel = self._channel
        call = channel.create(Kind.ASK, message)
        loop = channel.peer.connection.loop
        call.deadline = loop.effective_deadline()
        if timeout is None:
            return await self._await(call)  # type: ignore[no-any-return]
        deadline = loop.now() + timeout
        call.deadline = min(call.deadline, deadline)
        with loop.new_scope(deadline=deadline):
            return await self._await(call)  # type: ignore[no-any-return]
        state = "the actor had it" if call.is_sent else "it was not sent yet"
        raise DeadlineExceeded(
            f"{type(message).__name__} to actor {channel.name!r} on {channel.peer.node!r} was not answered before its "
            f"deadline; {state}. Allow more time, or see the actor's statistics for what it is busy with."
        )

    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Send ``message``; waits while there is no credit. See ``Ref.tell``."""
        channel = self._channel
        call = channel.create(Kind.TELL, message)
        if channel.submit(call):
            return
        try:
            await call.signal.wait()
        except BaseException:
            channel.withdraw(call)
            raise
        if call.error is not None:
            raise call.claim_error()

    def tell_nowait(self, message: Message[P_contra, Any]) -> None:
        """Send ``message`` without waiting; see ``Ref.tell_nowait``."""
        channel = self._channel
        call = channel.create(Kind.TELL, message)
        if not channel.submit(call):
            channel.withdraw(call)
            raise MailboxFull(
                f"actor {channel.name!r} on {channel.peer.node!r} gives no credit for another message now; "
                f"use 'await tell' to wait for it, or let it listen with a larger window"
            )

    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; see ``Ref.stream``. A ``buffer_size`` of 0 is treated as 1."""
        if buffer_size < 0:
            raise ValueError(f"buffer_size={buffer_size} is no number of items; give 0 or more")
        return _RemoteStream(self._channel, message, max(buffer_size, 1))

    async def stop(self, *, grace: float | None = None) -> None:
        """End the actor and wait until it is gone; see ``Ref.stop``.

        Raises:
            Unreachable: the connection was cut before the actor was gone.
        """
        channel = self._channel
        call = channel.create_stop()
        channel.peer.stop(call, grace)
        try:
            await call.signal.wait()
        except BaseException:
            channel.peer.forget(call)
            raise
        if call.error is not None:
            raise call.claim_error()

    def statistics(self) -> ActorStatistics:
        """Return what this side knows: the counts of its own calls, and whether the actor runs."""
        return self._channel.statistics()

    async def _await(self, call: Call) -> Any:
        channel = self._channel
        channel.submit(call)
        try:
            await call.signal.wait()
            if type(call.error) is DeadlineExceeded:
                await checkpoint()  # a scope of the caller with the same deadline must expire first
        except BaseException:
            channel.withdraw(call)
            raise
        if call.error is not None:
            raise call.claim_error()
        return call.reply


class _RemoteStream(AbstractAsyncContextManager["_RemoteStream[Item]"], AsyncIterator[Item], Generic[Item]):
    """The consumer's end of a remote stream. It reports consumed items in batches, as credit for more."""

    def __init__(self, channel: Channel, message: Any, limit: int) -> None:
        self._channel, self._message, self._limit = channel, message, limit
        self._call: Call | None = None
        self._num_taken = 0

    async def __aenter__(self) -> Self:
        """Send the message."""
        channel = self._channel
        call = channel.create(Kind.STREAM, self._message, self._limit)
        call.limit = self._limit
        call.deadline = channel.peer.connection.loop.effective_deadline()
        channel.submit(call)
        self._call = call
        return self

    async def __anext__(self) -> Item:
        """Return the next item."""
        call = self._opened()
        while not call.buffer:
            if call.is_done:
                if call.error is None:
                    raise StopAsyncIteration
                if type(call.error) is DeadlineExceeded:
                    await checkpoint()  # a scope of the consumer with the same deadline must expire first
                raise call.claim_error()
            call.arrival = self._channel.peer.connection.loop.new_signal()
            await call.arrival.wait()
            call.arrival = None
        item: Item = call.buffer.popleft()
        self._num_taken += 1
        if self._num_taken * 4 >= self._limit and not call.is_done and call.outgoing is not None:
            self._channel.peer.connection.send(Kind.TAKEN, call.outgoing.id, seconds=float(self._num_taken))
            self._num_taken = 0
        return item

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the handler, unless it has ended, and wait for its end; shielded, with a deadline."""
        call, channel = self._opened(), self._channel
        if call.is_done:
            return
        channel.withdraw(call)
        connection = channel.peer.connection
        with connection.loop.new_scope(deadline=connection.loop.now() + connection.limits.cleanup_seconds, shield=True):
            await call.signal.wait()
        channel.peer.forget(call)
        if not call.is_done and error is None:
            raise DeadlineExceeded(
                f"the handler of {type(self._message).__name__} in actor {channel.name!r} still runs "
                f"{connection.limits.cleanup_seconds} s after its cancellation; shorten what it shields"
            )

    def _opened(self) -> Call:
        if self._call is None:
            raise RuntimeError("a stream is opened by 'async with ref.stream(...) as items'")
        return self._call
