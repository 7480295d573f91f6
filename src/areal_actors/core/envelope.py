"""Work in flight: frames, which wait for one another, and the asks and streams among them.

A *frame* is one piece of work of an actor. While an actor handles an ask, the ask's envelope is its frame; what it
tells and what its lifespan does happens in the cell's own frame. A frame knows what it waits for, which makes the
graph that ``deadlock`` searches, and who asked for it, which makes the chain that an error can print.

``current_frame`` is the frame on whose behalf the running task acts; background tasks act on nobody's behalf.
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
"""The reply of an ask that has none yet."""


class Phase(IntEnum):
    """How far an envelope has come."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2


# Module constants: an attribute of an enum class costs a look-up through its metaclass on every ask.
_QUEUED, _RUNNING, _DONE = Phase.QUEUED, Phase.RUNNING, Phase.DONE


class Frame:
    """One piece of work of ``cell``, what it waits for, and on whose behalf (``parent``) it is done."""

    __slots__ = ("cell", "parent", "phase", "waits")

    def __init__(self, cell: Cell, parent: Frame | None = None, phase: Phase = _RUNNING) -> None:
        self.cell = cell
        self.parent = parent
        self.phase = phase
        self.waits: set[Frame] = set()


class Ask(Frame):
    """A message with somebody waiting for its reply. It ends exactly once, in a reply, an error, or abandonment."""

    __slots__ = ("deadline", "error", "handler", "message", "reply", "scope", "signal")

    def __init__(self, message: Any, handler: Handler, cell: Cell, parent: Frame | None, deadline: float) -> None:
        self.cell = cell
        self.parent = parent
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
        """Mark the end of the work and wake the asker, who finds the reply or the error."""
        self.phase = _DONE
        if self.reply is PENDING and self.error is None:
            self.error = self.unanswered()
        # Timers that the handler has started keep their context, and with it this envelope, even when they are over.
        self.message = None
        self.signal.set()

    def fail(self, error: ArealError) -> None:
        """End with ``error``, unless it has ended already."""
        if self.phase is not _DONE:
            self.error = error
            self.finish()

    def claim_reply(self) -> Any:
        """The reply, once: it is the asker's then, and nobody else's."""
        reply, self.reply = self.reply, None
        return reply

    def claim_error(self) -> ArealError:
        """The error, to be raised, once: its traceback leads back here, and would make a circle."""
        assert self.error is not None, "it has ended in a reply"
        error, self.error = self.error, None
        return error

    def overdue(self) -> DeadlineExceeded:
        """The error of an ask whose time is up."""
        state = "its handler was running" if self.scope is not None else "it was still queued"
        return DeadlineExceeded(
            f"{self.handler.message.__name__} to actor {self.cell.name!r} was not answered before its deadline; "
            f"{state}. Allow more time, or see the actor's statistics for what it is busy with."
        )

    def unanswered(self) -> ArealError:
        """The error of an ask whose handler was cut off."""
        if self.deadline < math.inf and self.cell.loop.now() >= self.deadline:
            return self.overdue()
        return ActorStopped(
            f"actor {self.cell.name!r} ended while it handled {self.handler.message.__name__}; no reply will come"
        )


class StreamCall(Ask):
    """An ask whose answer is many items: a bounded buffer between the handler and the consumer."""

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
        """Mark the end; items that are still buffered can be read."""
        super().finish()
        if self.arrival is not None:
            self.arrival.set()

    async def put(self, item: Any) -> None:
        """Hand one item over; waits while the buffer is full, which is the back-pressure of the stream."""
        while len(self.buffer) >= self.limit:
            self.room = self.cell.loop.new_signal()
            await self.room.wait()
        self.buffer.append(item)
        if self.arrival is not None:
            self.arrival.set()


current_frame: ContextVar[Frame | None] = ContextVar("current_frame", default=None)
