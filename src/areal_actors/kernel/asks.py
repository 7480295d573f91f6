"""Work in progress: asks, streams, and the chain of who asked for what.

A *frame* is one piece of work of an actor. While an actor handles an ask, the ask is its frame; told messages and the
lifespan run in the actor's own frame. A frame records who asked for it, which forms the chain that the deadlock check
searches. ``current_frame`` is the frame that the running task works for; background tasks have none.
"""

from __future__ import annotations

import math
from collections import deque
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, Protocol

from areal_actors.errors import ActorStopped, ArealError, DeadlineExceeded, DeadlockError
from areal_actors.kernel.message import Handler
from areal_actors.lib.loops import Loop, Scope, Signal

PENDING: Any = object()
"""Placeholder for the reply of an ask that has not been answered yet."""


class Receiver(Protocol):
    """The actor that a frame belongs to, as ``runtime.Cell`` implements it."""

    name: str
    loop: Loop

    def occupant(self) -> Frame | None:
        """Return the frame that keeps the loop from taking the next message; ``None`` while the loop is idle."""

    def abandon(self, ask: Ask) -> None:
        """Discard ``ask`` if it is queued, or cancel its handler if it runs."""


class Phase(IntEnum):
    """Progress of a piece of work: queued, running or done."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2


# Module constants: an attribute of an enum class costs a look-up through its metaclass on every ask.
_QUEUED, _RUNNING, _DONE = Phase.QUEUED, Phase.RUNNING, Phase.DONE


class Frame:
    """One piece of work of ``cell``, and the frame (``parent``) that asked for it."""

    __slots__ = ("cell", "parent", "phase")

    def __init__(self, cell: Receiver, parent: Frame | None = None, phase: Phase = _RUNNING) -> None:
        self.cell = cell
        self.parent = parent
        self.phase = phase


class Ask(Frame):
    """A message whose sender waits for a reply. It ends exactly once, in a reply, an error, or abandonment."""

    __slots__ = ("deadline", "error", "handler", "message", "reply", "scope", "signal")

    def __init__(
        self, message: object, handler: Handler, cell: Receiver, parent: Frame | None, deadline: float
    ) -> None:
        super().__init__(cell, parent, _QUEUED)
        self.message = message
        self.handler = handler
        self.deadline = deadline
        self.signal: Signal = cell.loop.new_signal()
        """Set when the ask has ended."""
        self.scope: Scope | None = None
        """The scope of the running handler."""
        self.reply: Any = PENDING
        self.error: ArealError | None = None

    @property
    def is_done(self) -> bool:
        """True if the ask has ended."""
        return self.phase is _DONE

    @property
    def is_overdue(self) -> bool:
        """True if the ask has ended because its deadline passed."""
        return type(self.error) is DeadlineExceeded

    def finish(self) -> None:
        """Mark the work as done and wake the asker, which then claims the outcome."""
        self.phase = _DONE
        if self.reply is PENDING and self.error is None:
            self.error = self._unanswered()
        # Release the message: timers that the handler started keep their context, and with it this ask, alive.
        self.message = None
        self.signal.set()

    def fail(self, error: ArealError) -> None:
        """End with ``error``, unless the ask has already ended."""
        if self.phase is not _DONE:
            self.error = error
            self.finish()

    def claim(self) -> Any:
        """Return the reply, or raise the error.

        Works once: the reply may hold large arrays, and this object may live on in a timer's context.
        """
        reply, self.reply = self.reply, None
        if self.error is None:
            return reply
        error, self.error = self.error, None
        try:
            raise error
        finally:
            # The traceback refers to this frame; a local variable would make a reference cycle.
            del error

    def overdue(self) -> DeadlineExceeded:
        """Create the error for an ask whose deadline has passed."""
        state = "its handler was running" if self.scope is not None else "it was still queued"
        return DeadlineExceeded(
            f"{self.handler.message.__name__} to actor {self.cell.name!r} was not answered before its deadline; "
            f"{state}. Allow more time, or see the actor's statistics for what it is busy with."
        )

    def _unanswered(self) -> ArealError:
        """Create the error for an ask whose handler was cancelled."""
        if self.deadline < math.inf and self.cell.loop.now() >= self.deadline:
            return self.overdue()
        return ActorStopped(
            f"actor {self.cell.name!r} ended while it handled {self.handler.message.__name__}; no reply will come"
        )


class StreamCall(Ask):
    """An ask that is answered by many items, through a bounded buffer between the handler and the consumer."""

    __slots__ = ("arrival", "buffer", "limit", "room")

    def __init__(  # noqa: PLR0917 - an ask, and the size of its buffer
        self, message: object, handler: Handler, cell: Receiver, parent: Frame | None, deadline: float, limit: int
    ) -> None:
        super().__init__(message, handler, cell, parent, deadline)
        self.buffer: deque[Any] = deque()
        self.limit = limit
        self.arrival: Signal | None = None
        self.room: Signal | None = None
        """Set by the consumer's side when the handler waits for room."""

    def finish(self) -> None:
        """Mark the work as done; items that are still buffered can be read."""
        super().finish()
        if self.arrival is not None:
            self.arrival.set()

    async def put(self, item: object) -> None:
        """Append one item to the buffer; waits while the buffer is full, which gives the stream its back-pressure."""
        while len(self.buffer) >= self.limit:
            self.room = self.cell.loop.new_signal()
            await self.room.wait()
        self.buffer.append(item)
        if self.arrival is not None:
            self.arrival.set()

    def make_room(self) -> None:
        """Wake the handler if it waits at its ``yield``."""
        room, self.room = self.room, None
        if room is not None:
            room.set()

    def cancel(self) -> None:
        """Discard the call if it is queued, or cancel its handler."""
        self.cell.abandon(self)


current_frame: ContextVar[Frame | None] = ContextVar("current_frame", default=None)


def asking_frame() -> Frame | None:
    """Return the frame that this task works for; ``None`` outside actors and for work that outlived its frame."""
    frame = current_frame.get()
    return None if frame is None or frame.phase is _DONE else frame


# ----------------------------------------------------------------------------------------------------------------------
# Deadlocks
#
# An ask that could never end is refused before it starts to wait: A asks B, whose handler asks A, which can take no
# message before its handler has ended. A concurrent handler occupies nothing, so that its actor may be asked back.
# Independent requests that cross (A asks B while B asks A) and chains through other processes are not detected; use
# deadlines there.


def refuse_deadlock(waiter: Frame, target: Receiver, what: str) -> None:
    """Check that ``waiter`` may wait until ``target`` takes its next message.

    Raises:
        DeadlockError: the target's present message waits for ``waiter``; the error shows the way from one to the other.
    """
    blocker, frame, names = target.occupant(), waiter, [repr(target.name)]
    while blocker is not None:
        names.append(repr(frame.cell.name))
        if frame is blocker:
            raise DeadlockError(
                f"{what} would wait for itself: {' → '.join(reversed(names))}. "
                "Tell instead of asking, or declare the handler that waits with concurrency=2 or more."
            )
        if frame.parent is None:
            return
        frame = frame.parent


def refuse_self_stop(target: Receiver) -> None:
    """Check that this task does not work, directly or through a chain of asks, for a handler of ``target``.

    Raises:
        DeadlockError: the stop would wait for the handler that waits for it.
    """
    frame = asking_frame()
    while frame is not None:
        if frame.cell is target:
            raise DeadlockError(
                f"a handler of actor {target.name!r} would wait for its own end; call context.stop() and return"
            )
        frame = frame.parent
