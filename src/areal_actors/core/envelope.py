"""Work in progress: frames, which wait for one another, and the asks and streams among them.

A *frame* is one piece of work of an actor. While an actor handles an ask, the ask's envelope is its frame; told
messages and the lifespan run in the cell's own frame. A frame records what it waits for, which forms the graph that
``deadlock`` searches, and who asked for it, which forms the chain that an error can print.

``current_frame`` is the frame that the running task works for; background tasks have none.
"""

from __future__ import annotations

import math
from collections import deque
from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from areal_actors.core.loops import Scope, Signal
from areal_actors.errors import ActorStopped, ArealError, DeadlineExceeded

if TYPE_CHECKING:
    from areal_actors.core.cell import Cell
    from areal_actors.core.contract import Handler

__all__ = ["PENDING", "Ask", "Frame", "Phase", "StreamCall", "current_frame"]

PENDING: Any = object()
"""Placeholder for the reply of an ask that has not been answered yet."""


class Phase(IntEnum):
    """Progress of an envelope: queued, running or done."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2


# Module constants: an attribute of an enum class costs a look-up through its metaclass on every ask.
_QUEUED, _RUNNING, _DONE = Phase.QUEUED, Phase.RUNNING, Phase.DONE


class Frame:
    """One piece of work of ``cell``, the frames it waits for, and the frame (``parent``) that asked for it."""

    __slots__ = ("cell", "parent", "phase", "waits")

    def __init__(self, cell: Cell, parent: Frame | None = None, phase: Phase = _RUNNING) -> None:
        self.cell = cell
        self.parent = parent
        self.phase = phase
        self.waits: set[Frame] = set()


class Ask(Frame):
    """A message whose sender waits for a reply. It ends exactly once, in a reply, an error, or abandonment."""

    __slots__ = ("deadline", "error", "handler", "message", "reply", "scope", "signal")

    def __init__(self, message: Any, handler: Handler, cell: Cell, parent: Frame | None, deadline: float) -> None:
        self.cell = cell
        self.parent = parent
        # Assigned here instead of by ``Frame.__init__``, which saves a call on every ask.
        self.phase = _QUEUED
        self.waits = set()
        self.message = message
        self.handler = handler
        self.deadline = deadline
        self.signal: Signal = cell.loop.new_signal()
        self.scope: Scope | None = None
        self.reply: Any = PENDING
        self.error: ArealError | None = None

    def finish(self) -> None:
        """Mark the work as done and wake the asker, which then reads the reply or the error."""
        self.phase = _DONE
        if self.reply is PENDING and self.error is None:
            self.error = self.unanswered()
        # Release the message: timers that the handler started keep their context, and with it this envelope, alive.
        self.message = None
        self.signal.set()

    def fail(self, error: ArealError) -> None:
        """End with ``error``, unless the ask has already ended."""
        if self.phase is not _DONE:
            self.error = error
            self.finish()

    def claim_reply(self) -> Any:
        """Return the reply, once, and drop the reference so that only the asker owns it."""
        # Not kept here: the reply may hold large arrays, and this envelope may live on in a timer's context.
        reply, self.reply = self.reply, None
        return reply

    def claim_error(self) -> ArealError:
        """Return the error, once, to be raised.

        Its traceback refers to this object, so keeping it would make a reference cycle.
        """
        assert self.error is not None, "it has ended in a reply"
        error, self.error = self.error, None
        return error

    def overdue(self) -> DeadlineExceeded:
        """Create the error for an ask whose deadline has passed."""
        state = "its handler was running" if self.scope is not None else "it was still queued"
        return DeadlineExceeded(
            f"{self.handler.message.__name__} to actor {self.cell.name!r} was not answered before its deadline; "
            f"{state}. Allow more time, or see the actor's statistics for what it is busy with."
        )

    def unanswered(self) -> ArealError:
        """Create the error for an ask whose handler was cancelled."""
        if self.deadline < math.inf and self.cell.loop.now() >= self.deadline:
            return self.overdue()
        return ActorStopped(
            f"actor {self.cell.name!r} ended while it handled {self.handler.message.__name__}; no reply will come"
        )


class StreamCall(Ask):
    """An ask that is answered by many items, through a bounded buffer between the handler and the consumer."""

    __slots__ = ("arrival", "buffer", "limit", "room")

    def __init__(
        self, message: Any, handler: Handler, cell: Cell, parent: Frame | None, deadline: float, *, limit: int
    ) -> None:
        super().__init__(message, handler, cell, parent, deadline)
        self.buffer: deque[Any] = deque()
        self.limit = limit
        self.arrival: Signal | None = None
        """Set by the handler's side when the consumer waits for an item."""
        self.room: Signal | None = None
        """Set by the consumer's side when the handler waits for room."""

    def finish(self) -> None:
        """Mark the work as done; items that are still buffered can be read."""
        super().finish()
        if self.arrival is not None:
            self.arrival.set()

    async def put(self, item: Any) -> None:
        """Append one item to the buffer; waits while the buffer is full, which gives the stream its back-pressure."""
        while len(self.buffer) >= self.limit:
            self.room = self.cell.loop.new_signal()
            await self.room.wait()
        self.buffer.append(item)
        if self.arrival is not None:
            self.arrival.set()


current_frame: ContextVar[Frame | None] = ContextVar("current_frame", default=None)
