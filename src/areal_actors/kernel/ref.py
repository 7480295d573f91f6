"""The public interface of an actor: a ``Ref``, with methods to ask, tell, stream from and stop it.

The actor may run in any process: ``runtime.LocalRef`` reaches one in this process, ``remote.peer.RemoteRef`` one at the
other end of a connection. This module documents the guarantees that callers may rely on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from attrs import frozen

from areal_actors.errors import ActorError
from areal_actors.kernel.message import Address, Message, StreamMessage


class ActorState(StrEnum):
    """The phase of an actor's lifecycle."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CRASHED = "crashed"


@frozen(kw_only=True)
class ActorStatistics:
    """Statistics of one actor: first its present state, then counters since its first start."""

    name: str
    state: ActorState
    incarnation: int

    num_queued: int = 0
    """Messages in the mailbox, including those that wait for a concurrent handler below its limit."""
    num_parked: int = 0
    """Those queued messages whose concurrent handler is at its limit."""
    num_waiting_senders: int = 0
    """Senders that wait for room in the mailbox, because of back-pressure."""
    num_running: int = 0
    """Handlers that run now."""
    mailbox_size: int = 0
    """The bound of the mailbox."""

    num_handled: int = 0
    """Handlers that have ended, with a reply, with an error or, for told messages, with neither."""
    num_failed: int = 0
    """Those handled messages whose handler raised."""
    num_cancelled: int = 0
    """Asks and streams whose asker left or whose deadline passed, queued or running."""
    num_dropped: int = 0
    """Told messages that were still unhandled when the actor ended."""


@frozen(kw_only=True)
class SystemStatistics:
    """Statistics of all running actors of a system, in order of their start."""

    name: str
    actors: tuple[ActorStatistics, ...]

    @property
    def num_queued(self) -> int:
        """Messages in all mailboxes."""
        return sum(actor.num_queued for actor in self.actors)


P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")


Watcher: TypeAlias = "Callable[[Down], object]"


class Ref(ABC, Generic[P_contra]):
    """A handle on an actor that speaks ``P_contra``. It stays valid across restarts, and compares by address.

    Messages of one sender arrive in the order in which it sent them. Handlers with ``concurrency`` are started in that
    order, and from then on the event loop schedules them. There is no ordering guarantee across senders. Delivery is at
    most once; nothing is retried silently.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def address(self) -> Address:
        """The address of the actor, with its present incarnation."""

    @property
    def name(self) -> str:
        """The actor's name within its system."""
        return self.address.name

    def watch(self, watcher: Watcher) -> None:  # noqa: ARG002 - for those that can be
        """Report the end of each incarnation to ``watcher``; immediately if the actor has ended for good.

        Raises:
            ActorError: this ref cannot be watched.
        """
        raise ActorError(f"{self!r} cannot be watched")

    def unwatch(self, watcher: Watcher) -> None:
        """Remove ``watcher``, if it is registered."""

    @abstractmethod
    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply.

        Args:
            message: the request; it is shared, not copied, so it must not change afterwards.
            timeout: seconds for the whole ask, including the time in the queue. The deadline of an enclosing cancel
                scope also applies; the handler runs under the earlier of the two.

        Cancelling the caller withdraws the ask: if it was queued, it is never handled; otherwise its handler is
        cancelled.

        Raises:
            ArealError: raised by the handler on purpose (any ``ArealError`` that is not an ``ActorError``): the same
                class with the same attributes.
            RemoteError: any other exception that the handler raised, as text.
            ActorStopped: the actor has ended, or ended before it could answer.
            DeadlineExceeded: ``timeout`` passed.
            DeadlockError: the ask would wait for itself.
            ProtocolError: the actor has no handler for this message.
        """

    @abstractmethod
    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Put ``message`` in the mailbox; waits, in order, while the mailbox is full.

        Returning does not mean that the message was handled. If the handler raises, the actor crashes. If there is
        room, this returns immediately, without a checkpoint.

        Raises:
            ActorStopped: the actor no longer takes messages.
            DeadlockError: the mailbox is full, and only the caller itself could make room.
            ProtocolError: the actor has no handler for this message.
        """

    @abstractmethod
    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; the handler is at most ``buffer_size`` items ahead of the consumer.

        ``async with`` sends the message and ``async for`` reads the items. When the block is left, normally or not, the
        handler has finished, failed or been cancelled. Iterating raises the same errors as ``ask``.
        """

    @abstractmethod
    async def stop(self, *, grace: float | None = None) -> None:
        """End the actor and wait until it is gone; stopping it twice is allowed.

        The mailbox closes at once. Accepted messages are handled for up to ``grace`` seconds (default: the system's),
        then handlers are cancelled, and the lifespan is left, shielded for a bounded time. Cancelling the caller only
        stops its waiting.

        Raises:
            DeadlockError: called by a handler of the actor itself, which would wait for its own end.
            ActorError: the actor is in another process, which stops it.
        """

    @abstractmethod
    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the actor's state and counters."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ref):
            return NotImplemented
        return (self.address.node, self.address.name) == (other.address.node, other.address.name)

    def __hash__(self) -> int:
        return hash((self.address.node, self.address.name))

    def __repr__(self) -> str:
        return f"<Ref {self.address.node}/{self.address.name}>"


# ------------------------------------------------------------------------------------------------------------ watching


class DownReason(StrEnum):
    """The reason why an incarnation of an actor has ended."""

    STOPPED = "stopped"
    CRASHED = "crashed"
    UNREACHABLE = "unreachable"


@frozen(kw_only=True)
class Down:
    """Notification that an incarnation of a watched actor has ended.

    ``is_restarting`` tells whether the same ref will answer again, with fresh state, as the next incarnation.
    """

    ref: Ref[Any]
    incarnation: int
    reason: DownReason
    error: str | None = None
    is_restarting: bool = False


class Watched:
    """The watchers of one actor. Its ``final_down``, the final ``Down``, are delivered to later watchers."""

    __slots__ = ("_watchers", "final_down")

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}
        self.final_down: Down | None = None

    def watch(self, watcher: Watcher) -> None:
        """Report the end of each incarnation to ``watcher``; immediately if the actor has ended for good."""
        if self.final_down is None:
            self._watchers[watcher] = None
        else:
            watcher(self.final_down)

    def unwatch(self, watcher: Watcher) -> None:
        """Remove ``watcher``, if it is registered."""
        self._watchers.pop(watcher, None)

    def report(self, down: Down) -> None:
        """Notify all watchers."""
        # Copied, because a watcher may unregister itself when it is called.
        for watcher in tuple(self._watchers):
            watcher(down)
