"""A ref to an actor in this process: messages and replies are passed by reference."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from anyio.lowlevel import checkpoint

from areal_actors.core.contract import Handler
from areal_actors.core.deadlock import asking_frame, refuse_deadlock, refuse_self_stop
from areal_actors.core.envelope import Ask, Frame, Phase, StreamCall
from areal_actors.core.mailbox import Ticket
from areal_actors.core.message import Address, Message, StreamMessage
from areal_actors.core.ref import Ref
from areal_actors.core.statistics import ActorStatistics
from areal_actors.core.stream import Stream
from areal_actors.core.visits import VisitedStream, answer_in_visit
from areal_actors.errors import ActorStopped, DeadlineExceeded, MailboxFull, ProtocolError

if TYPE_CHECKING:
    from areal_actors.core.cell import Cell
    from areal_actors.core.serving import Serving

__all__ = ["LocalRef"]

P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")


class LocalRef(Ref[P_contra], Generic[P_contra]):
    """A ref to an actor in this process. See ``Ref`` for the contract."""

    __slots__ = ("_address", "_offer", "_tellable", "cell")

    def __init__(self, cell: Cell, address: Address) -> None:
        self.cell = cell
        self._address = address
        # Cached for ``tell``, to save attribute look-ups on its fast path.
        self._offer = cell.mailbox.offer
        self._tellable = frozenset(message for message, handler in cell.handlers.items() if not handler.is_stream)

    @property
    def address(self) -> Address:
        """The address of the actor, with its present incarnation."""
        if self._address.incarnation != self.cell.incarnation:
            # The cell's incarnation is 0 until its task has started.
            self._address = Address(
                node=self._address.node, name=self._address.name, incarnation=max(self.cell.incarnation, 1)
            )
        return self._address

    @property
    def life(self) -> Cell:
        """The cell, which reports the end of each incarnation."""
        return self.cell

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``."""
        handler = self._handler(message, is_stream=False)
        serving = self._visited(handler)
        if serving is not None:
            # The caller's own scopes surround the visit already, so only ``timeout`` has to be added.
            deadline = math.inf if timeout is None else self.cell.loop.now() + timeout
            ask = Ask(message, handler, self.cell, asking_frame(), deadline)
            return await answer_in_visit(ask, serving)  # type: ignore[no-any-return]
        ask = Ask(message, handler, self.cell, asking_frame(), self.cell.loop.effective_deadline())
        if timeout is None:
            return await self._await_reply(ask)  # type: ignore[no-any-return]
        loop = self.cell.loop
        deadline = loop.now() + timeout
        ask.deadline = min(ask.deadline, deadline)
        with loop.new_scope(deadline=deadline):
            return await self._await_reply(ask)  # type: ignore[no-any-return]
        # Reached only if the deadline has cancelled the wait: the scope then swallows its cancellation.
        raise ask.overdue()

    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Put ``message`` in the mailbox; see ``Ref.tell``."""
        if message.__class__ not in self._tellable:
            raise self._unhandled(message)
        if not self._offer(message):
            await self._tell_slowly(message)

    def tell_nowait(self, message: Message[P_contra, Any]) -> None:
        """Put ``message`` in the mailbox without waiting; see ``Ref.tell_nowait``."""
        cell = self.cell
        if message.__class__ not in self._tellable:
            raise self._unhandled(message)
        if self._offer(message):
            return
        if cell.mailbox.closed:
            raise self._stopped(message)
        raise MailboxFull(
            f"the mailbox of actor {cell.name!r} holds {cell.mailbox.bound} messages and is full; "
            f"use 'await tell' to wait for room, or spawn it with a larger mailbox_size"
        )

    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; see ``Ref.stream``."""
        if buffer_size < 0:
            raise ValueError(f"buffer_size={buffer_size} is no number of items; give 0 or more")
        return Stream(self, message, buffer_size) if buffer_size else self._stream_unbuffered(message)

    @asynccontextmanager
    async def _stream_unbuffered(self, message: StreamMessage[P_contra, Item]) -> AsyncIterator[AsyncIterator[Item]]:
        handler = self._handler(message, is_stream=True)
        serving = self._visited(handler)
        if serving is None:
            stream: AbstractAsyncContextManager[AsyncIterator[Item]] = Stream(self, message, 1)
        else:
            stream = VisitedStream(Ask(message, handler, self.cell, asking_frame(), math.inf), serving)
        async with stream as items:
            yield items

    def _visited(self, handler: Handler) -> Serving | None:
        """Return the incarnation in which ``handler`` may run in this task; ``None``: use the mailbox."""
        if handler.concurrency == 1:
            return None
        serving = self.cell.serving
        return serving if serving is not None and serving.can_be_visited(handler) else None

    async def stop(self, *, grace: float | None = None) -> None:
        """End the actor and wait until it is gone; see ``Ref.stop``."""
        refuse_self_stop(self.cell)
        self.cell.request_stop(grace)
        await self.cell.gone.wait()

    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the actor's statistics."""
        return self.cell.statistics()

    def accept(self, entry: Any, decided: Callable[[bool], object]) -> None:
        """Accept an ask or a told message that arrived over a connection; never waits.

        ``decided`` is called with ``True`` once the mailbox has admitted the entry, or with ``False`` if it was refused
        because the actor ends. It is not called for an ask that ends while it waits for room.

        Raises:
            ActorStopped: the actor no longer takes messages.
        """
        mailbox = self.cell.mailbox
        if mailbox.closed:
            raise self._stopped(entry.message if isinstance(entry, Ask) else entry)
        if not isinstance(entry, Ask):
            mailbox.queue(Ticket(entry, decided))
            return
        serving = self._visited(entry.handler)
        if serving is not None:
            # No visit: there is no asker's task here, so the handler gets a task at once.
            serving.start(entry)
            decided(True)
        else:
            mailbox.queue(Ticket(entry, lambda admitted: self._note_admission(entry, decided, admitted=admitted)))

    def open_call(self, message: StreamMessage[P_contra, Any], buffer_size: int) -> StreamCall:
        """Send a stream message and return its call; the caller reads from it and must pass it to ``close_call``."""
        handler = self._handler(message, is_stream=True)
        call = StreamCall(
            message, handler, self.cell, asking_frame(), self.cell.loop.effective_deadline(), limit=buffer_size
        )
        serving = self._visited(handler)
        if serving is None:
            self._send(call)
        else:
            if call.parent is not None:
                call.parent.waits.add(call)
            serving.start(call)
        return call

    def close_call(self, call: StreamCall) -> None:
        """Remove ``call`` from the wait graph, because its consumer has left."""
        if call.parent is not None:
            call.parent.waits.discard(call)

    async def _await_reply(self, ask: Ask) -> Any:
        self._send(ask)
        try:
            await ask.signal.wait()
            if ask.error is not None and type(ask.error) is DeadlineExceeded:
                # A scope of the caller with the same deadline must expire first: it expects its own cancellation.
                await checkpoint()
        except BaseException:
            self.cell.abandon(ask)
            raise
        finally:
            if ask.parent is not None:
                ask.parent.waits.discard(ask)
        if ask.error is not None:
            raise ask.claim_error()
        return ask.claim_reply()

    def _send(self, ask: Ask) -> None:
        cell = self.cell
        if cell.mailbox.closed:
            raise self._stopped(ask.message)
        if ask.parent is not None:
            refuse_deadlock(ask.parent, cell, type(ask.message).__name__)
            ask.parent.waits.add(ask)
        if not cell.mailbox.offer(ask):
            # An ask waits for its reply anyway, so its ticket only has to report a refusal, not an admission.
            cell.mailbox.queue(Ticket(ask, lambda admitted: None if admitted else ask.fail(self._stopped(ask.message))))

    def _note_admission(self, ask: Ask, decided: Callable[[bool], object], *, admitted: bool) -> None:
        decided(admitted)
        if not admitted:
            ask.fail(self._stopped(ask.message))

    async def _tell_slowly(self, message: Any) -> None:
        cell = self.cell
        # ``wait`` represents the message in the wait graph, because a told message has no envelope.
        waiter, wait = asking_frame(), Frame(cell, phase=Phase.QUEUED)
        if waiter is not None and not cell.mailbox.closed:
            refuse_deadlock(waiter, cell, f"telling {type(message).__name__} to a full mailbox")
            waiter.waits.add(wait)
        decided = cell.loop.new_signal()
        ticket = Ticket(message, lambda _: decided.set())
        cell.mailbox.queue(ticket)
        try:
            await decided.wait()
        except BaseException:
            cell.mailbox.discard_ticket(ticket)
            raise
        finally:
            if waiter is not None:
                waiter.waits.discard(wait)
        if not ticket.admitted:
            raise self._stopped(message)

    def _handler(self, message: Any, *, is_stream: bool) -> Handler:
        handler = self.cell.handlers.get(message.__class__)
        if handler is None or handler.is_stream is not is_stream:
            raise self._unhandled(message)
        return handler

    def _unhandled(self, message: object) -> ProtocolError:
        known = ", ".join(sorted(known.__name__ for known in self.cell.handlers)) or "nothing"
        return ProtocolError(
            f"actor {self.cell.name!r} does not take {type(message).__name__} this way; it handles {known}. "
            "Ask or tell a Message, stream a StreamMessage."
        )

    def _stopped(self, message: object) -> ActorStopped:
        return ActorStopped(
            f"actor {self.cell.name!r} takes no more messages ({self.cell.state}); "
            f"{type(message).__name__} was not sent"
        )
