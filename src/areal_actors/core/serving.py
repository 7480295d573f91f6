"""How one incarnation of an actor works through its mailbox: in turn, in tasks, or later.

* A told message with a serial handler is awaited in the loop, with nothing around it: this path is the fast one.
* An ask or a stream runs under a cancel scope of its own, which its asker's leaving and its deadline cancel.
* A message whose handler declares ``concurrency`` gets a task; at the limit it is parked in the mailbox.

The life around it (lifespan, supervision, stopping) is in ``cell``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from areal_actors.core.contract import Handler
from areal_actors.core.envelope import Ask, Frame, Phase, StreamCall, current_frame
from areal_actors.core.failure import is_stray_cancellation, transferred
from areal_actors.core.stream import produce
from areal_actors.errors import ActorError

if TYPE_CHECKING:
    from areal_actors.core.actor import Actor
    from areal_actors.core.cell import Cell

__all__ = ["FAIRNESS", "Serving"]

FAIRNESS = 64
"""Messages handled in a row before the event loop gets its turn; a checkpoint costs as much as several tells."""


class Serving:
    """The messages of one incarnation."""

    def __init__(self, cell: Cell, actor: Actor[Any], tasks: TaskGroup) -> None:
        self.num_concurrent = 0
        self._cell, self._actor, self._tasks = cell, actor, tasks
        self._mailbox, self._counters = cell.mailbox, cell.counters
        self._places: Counter[Handler] = Counter()
        self._num_tasks = 0
        self._all_ended: anyio.Event | None = None

    async def serve(self) -> None:
        """Handle messages until the mailbox is closed and empty and nothing runs; raises what a told one raises."""
        mailbox, actor, counters, serial = self._mailbox, self._actor, self._counters, self._cell.serial
        mailbox.restore()
        streak = 0
        while True:
            entry = mailbox.take()
            if entry is None:
                if mailbox.closed and not self.num_concurrent:
                    return
                await self._sleep()
                streak = 0
                continue
            streak += 1
            if streak == FAIRNESS:
                streak = 0
                await anyio.lowlevel.checkpoint()
            function = serial.get(entry.__class__)
            if function is None:
                await self._dispatch(entry)
                continue
            if mailbox.senders:
                mailbox.admit()
            try:
                await function(actor, entry)
            except BaseException as error:
                self._fail_tell(entry, error)
            counters.handled += 1

    def start_background(self, function: Callable[[], Awaitable[Any]], name: str) -> None:
        """Run ``function`` on nobody's behalf until it returns or the incarnation ends."""
        self._num_tasks += 1
        self._tasks.start_soon(self._run_background, function, name=f"{self._cell.name}.{name}")

    async def end_tasks(self) -> None:
        """Cancel every task of this incarnation and wait for them; the caller has shielded itself."""
        self._tasks.cancel_scope.cancel()
        if self._num_tasks:
            self._all_ended = self._cell.new_event()
            await self._all_ended.wait()

    async def _sleep(self) -> None:
        event = self._cell.new_event()
        self._mailbox.wake = event.set
        try:
            await event.wait()
        finally:
            self._mailbox.wake = None

    async def _dispatch(self, entry: Any) -> None:
        handler = entry.handler if isinstance(entry, Ask) else self._cell.handlers[entry.__class__]
        if handler.concurrency == 1:
            self._mailbox.admit()
            await self._answer_in_turn(entry)
        elif self._places[handler] >= handler.concurrency:
            self._mailbox.park(handler, entry)
        else:
            self._mailbox.admit()
            self._start_concurrent(handler, entry)

    async def _answer_in_turn(self, ask: Ask) -> None:
        cell = self._cell
        cell.occupying = ask
        current_frame.set(ask)
        try:
            await self._answer(ask)
        finally:
            current_frame.set(cell.frame)
            cell.occupying = cell.frame

    async def _answer(self, ask: Ask) -> None:
        """Run the handler of one ask, and end the ask, whatever happens."""
        if ask.phase is Phase.DONE:
            return
        counters = self._counters
        if ask.deadline < math.inf and anyio.current_time() >= ask.deadline:
            counters.cancelled += 1
            ask.fail(ask.overdue())
            return
        ask.phase = Phase.RUNNING
        ask.scope = scope = self._cell.new_scope(deadline=ask.deadline)
        try:
            with scope:
                if ask.handler.is_stream:
                    assert isinstance(ask, StreamCall)
                    await produce(ask, ask.handler.function(self._actor, ask.message))
                else:
                    ask.reply = await ask.handler.function(self._actor, ask.message)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_stray_cancellation(error):
                raise
            counters.failed += 1
            ask.error = transferred(error, self._cell.name)
        finally:
            counters.handled += 1
            if scope.cancel_called:
                counters.cancelled += 1
            ask.finish()

    def _start_concurrent(self, handler: Handler, entry: object) -> None:
        self._places[handler] += 1
        self.num_concurrent += 1
        self._num_tasks += 1
        self._tasks.start_soon(self._run_concurrent, handler, entry, name=self._cell.name)

    async def _run_concurrent(self, handler: Handler, entry: object) -> None:
        try:
            if isinstance(entry, Ask):
                current_frame.set(entry)
                await self._answer(entry)
            else:
                current_frame.set(Frame(self._cell))
                await self._handle_told(handler, entry)
        finally:
            self._places[handler] -= 1
            self.num_concurrent -= 1
            self._start_next(handler)
            self._leave()

    async def _handle_told(self, handler: Handler, message: object) -> None:
        try:
            await handler.function(self._actor, message)
        except BaseException as error:
            self._fail_tell(message, error)
        self._counters.handled += 1

    async def _run_background(self, function: Callable[[], Awaitable[Any]]) -> None:
        current_frame.set(None)
        try:
            await function()
        finally:
            self._leave()

    def _start_next(self, handler: Handler) -> None:
        """Give the free place to a parked message, unless this incarnation is over: then the next one shall have it."""
        if not self._tasks.cancel_scope.cancel_called:
            entry = self._mailbox.unpark(handler)
            if entry is not None:
                self._start_concurrent(handler, entry)
        if self._mailbox.closed and not self.num_concurrent:
            self._mailbox.arouse()

    def _leave(self) -> None:
        self._num_tasks -= 1
        if self._all_ended is not None and not self._num_tasks:
            self._all_ended.set()

    def _fail_tell(self, message: object, error: BaseException) -> NoReturn:
        """Let ``error`` crash the actor, with a note that names the message; cancellations pass unchanged."""
        where = f"while actor {self._cell.name!r} handled {type(message).__name__}"
        if is_stray_cancellation(error):
            error = ActorError(f"something that was awaited had been cancelled by a stranger, {where}")
        if isinstance(error, Exception):
            self._counters.handled += 1
            self._counters.failed += 1
            error.add_note(where)
        raise error
