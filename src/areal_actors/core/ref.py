"""The public face of an actor: a ``Ref`` that one can ask, tell, stream from and stop.

A ref is an address with verbs. The actor may live anywhere: ``local.LocalRef`` reaches one in this process,
``remote.ref.RemoteRef`` one at the other side of a connection. What callers may rely on is written here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from areal_actors.core.message import Address, Message, StreamMessage
from areal_actors.core.statistics import ActorStatistics
from areal_actors.errors import ActorError

if TYPE_CHECKING:
    from areal_actors.core.watching import Watcher

__all__ = ["Life", "Ref"]

P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")


class Life(Protocol):
    """What knows when an incarnation of an actor ends."""

    def watch(self, watcher: Watcher) -> None:
        """Report the end of each incarnation to ``watcher``; at once if there will be no more."""

    def unwatch(self, watcher: Watcher) -> None:
        """Forget a watcher, if it was one."""


class Ref(ABC, Generic[P_contra]):
    """A handle on an actor that speaks ``P_contra``. It stays valid across restarts, and compares by address.

    Messages of one sender arrive in the order in which it sent them; handlers with ``concurrency`` are given their
    tasks in that order, and from there on it is the event loop that chooses. Nothing is promised across senders.
    Delivery is at most once; nothing is retried in silence.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def address(self) -> Address:
        """Where the actor is found, with its present incarnation."""

    @property
    def name(self) -> str:
        """The actor's name within its system."""
        return self.address.name

    @property
    def life(self) -> Life:
        """What the kernel watches on behalf of ``ActorSystem.watch`` and ``Context.watch``.

        Raises:
            ActorError: this ref cannot be watched.
        """
        raise ActorError(f"{self!r} cannot be watched")

    @abstractmethod
    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply. Ends exactly once.

        Args:
            message: what is asked; it is shared, not copied, so it must not change afterwards.
            timeout: seconds for the whole ask, queueing included. The deadline of an enclosing cancel scope counts
                anyway; the earlier one is what the handler sees around itself.

        Cancelling the caller withdraws the ask: unhandled if it was queued, otherwise its handler is cancelled. A
        handler with ``concurrency`` may run in the caller's own task while its actor is idle; the caller is then back
        when the handler has cleaned up.

        Raises:
            ArealError: raised by the handler on purpose (any ``ArealError`` that is no ``ActorError``): the same class
                with the same attributes.
            RemoteError: anything else that the handler raised, as text.
            ActorStopped: the actor has ended, or ended before it could answer.
            DeadlineExceeded: ``timeout`` passed.
            DeadlockError: the ask would wait for itself.
            ProtocolError: the actor has no handler for this message.
        """

    @abstractmethod
    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Have ``message`` accepted into the mailbox; waits, in order, while the mailbox is full.

        That it returned does not mean that the message was handled. If the handler raises, the actor crashes.
        Where there is room it returns at once, without a checkpoint.

        Raises:
            ActorStopped: the actor no longer takes messages.
            DeadlockError: the mailbox is full, and the room would have to be made by the caller itself.
            ProtocolError: the actor has no handler for this message.
        """

    @abstractmethod
    def tell_nowait(self, message: Message[P_contra, Any]) -> None:
        """As ``tell``, but never waits.

        Raises:
            MailboxFull: there is no room, or others wait for it.
            ActorStopped: the actor no longer takes messages.
            ProtocolError: the actor has no handler for this message.
        """

    @abstractmethod
    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; the handler is at most ``buffer_size`` items ahead of the consumer.

        With 0 it makes an item when it is asked for one, in the consumer's own task if its actor is idle (otherwise it
        may be one ahead). That saves the task; it is for consumers that wait for nothing but the items, because what a
        handler opened around its ``yield`` would surround their waiting, too.

        ``async with`` sends the message and ``async for`` reads. When the block is left, the handler has finished,
        failed or been cancelled, whichever way the block was left. Iterating raises what ``ask`` raises.
        """

    @abstractmethod
    async def stop(self, *, grace: float | None = None) -> None:
        """End the actor and wait until it is gone; ending it twice is fine.

        The mailbox closes at once; what was accepted is handled for up to ``grace`` seconds (default: the system's);
        then handlers are cancelled; the lifespan is left, shielded for a bounded time. Cancelling the caller only stops
        its waiting.

        Raises:
            DeadlockError: called by a handler of the actor itself, which would wait for its own end.
        """

    @abstractmethod
    def statistics(self) -> ActorStatistics:
        """What the actor is doing, and has done."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ref):
            return NotImplemented
        return (self.address.node, self.address.name) == (other.address.node, other.address.name)

    def __hash__(self) -> int:
        return hash((self.address.node, self.address.name))

    def __repr__(self) -> str:
        return f"<Ref {self.address.node}/{self.address.name}>"
