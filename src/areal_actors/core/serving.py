"""Message handling of one incarnation: serially in the loop, concurrently in tasks, or parked for later.

* A told message with a serial handler is awaited directly in the loop, without a scope or task: this is the fast path.
* An ask or a stream runs under a cancel scope, which is cancelled when its asker leaves or its deadline passes.
* A message whose handler declares ``concurrency`` gets a task; at the limit it is parked in the mailbox.
* While the queue is empty, such a message may be handled in its asker's own task instead (``visits``).

Lifespan, supervision and stopping are in ``cell``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from areal_actors.core.contract import Handler
from areal_actors.core.envelope import PENDING, Ask, Frame, Phase, StreamCall, current_frame
from areal_actors.core.failure import is_stray_cancellation, transferred
from areal_actors.core.loops import Scope, Signal
from areal_actors.core.stream import produce
from areal_actors.errors import ActorError

if TYPE_CHECKING:
    from areal_actors.core.actor import Actor
    from areal_actors.core.cell import Cell

__all__ = ["FAIRNESS", "Serving"]

FAIRNESS = 64
"""Messages handled in a row before the loop yields to other tasks; a checkpoint costs as much as several tells."""

# Module constants: an attribute of an enum class costs a look-up through its metaclass on every ask.
_RUNNING, _DONE = Phase.RUNNING, Phase.DONE


class Serving:
    """The message loop and the tasks of one incarnation."""

    def __init__(self, cell: Cell, actor: Actor[Any], tasks: TaskGroup) -> None:
        self.num_concurrent = 0
        self._cell, self._actor, self._tasks = cell, actor, tasks
        self._mailbox, self._counters = cell.mailbox, cell.counters
        self._places: Counter[Handler] = Counter()
        self._num_tasks = 0
        self._num_visits = 0
        self._visits: set[Scope] = set()
        self._all_ended: Signal | None = None

    async def serve(self) -> None:
        """Handle messages until the mailbox is closed and empty and no handler runs.

        Raises the error of a told message.
        """
        # After a restart: messages that the previous incarnation had parked.
        self._mailbox.restore()
        while not await self._serve_under_one_scope():
            pass

    async def _serve_under_one_scope(self) -> bool:
        """Handle messages until an ask in the loop is cancelled (returns ``False``), or to the end (returns ``True``).

        Serial handlers share one cancel scope, because only one of them runs at a time; a cancelled scope is replaced.
        A separate scope for each ask would cost as much as the rest of its handling.
        """
        cell, mailbox, actor, counters = self._cell, self._mailbox, self._actor, self._counters
        data, control, serial = mailbox.data, mailbox.control, cell.serial
        cell.occupying = cell.frame
        current_frame.set(cell.frame)
        with cell.loop.new_scope() as scope:
            while True:
                for _ in range(FAIRNESS):
                    # Inlines ``Mailbox.take`` for the common case, because every message passes here.
                    entry = data.popleft() if data and not control else mailbox.take()
                    if entry is None:
                        if mailbox.closed and not self.num_concurrent:
                            return True
                        await self._sleep()
                        continue
                    function = serial.get(entry.__class__)
                    if function is not None:
                        if mailbox.senders:
                            mailbox.admit()
                        try:
                            await function(actor, entry)
                        except BaseException as error:  # noqa: BLE001 - raised again, with a note
                            self._fail_tell(entry, error)
                        counters.handled += 1
                    elif await self._dispatch(entry, scope):
                        return False
                await checkpoint()
        return False

    def start_background(self, function: Callable[[], Awaitable[Any]], name: str) -> None:
        """Run ``function`` in a task without a frame, until it returns or the incarnation ends."""
        self._num_tasks += 1
        self._tasks.start_soon(self._run_background, function, name=f"{self._cell.name}.{name}")

    async def end_tasks(self) -> None:
        """Cancel every task and visit of this incarnation and wait for them. The caller must be shielded."""
        self._tasks.cancel_scope.cancel()
        for visit in self._visits:
            visit.cancel()
        if self._num_tasks:
            self._all_ended = self._cell.loop.new_signal()
            await self._all_ended.wait()

    async def _sleep(self) -> None:
        event = self._cell.loop.new_signal()
        self._mailbox.wake = event.set
        try:
            await event.wait()
        finally:
            self._mailbox.wake = None

    async def _dispatch(self, entry: Any, scope: Scope) -> bool:
        """Handle an ask serially, start a task, or park it.

        Return ``True`` if ``scope`` was cancelled and must be replaced.
        """
        cell = self._cell
        handler = entry.handler if isinstance(entry, Ask) else cell.handlers[entry.__class__]
        if handler.concurrency != 1:
            self._place(handler, entry)
            return False
        if self._mailbox.senders:
            self._mailbox.admit()
        cell.occupying = entry
        current_frame.set(entry)
        if entry.deadline == math.inf:
            await self.answer(entry, scope)
        else:
            scope.deadline = entry.deadline
            await self.answer(entry, scope)
            # The scope is shared with the following messages.
            scope.deadline = math.inf
        current_frame.set(cell.frame)
        cell.occupying = cell.frame
        return scope.cancel_called

    async def answer(self, ask: Ask, scope: Scope) -> None:
        """Run the handler of one ask inside ``scope``, and end the ask in every case."""
        if ask.phase is _DONE:
            return
        counters = self._counters
        # Do not start work whose asker has timed out.
        if ask.deadline < math.inf and self._cell.loop.now() >= ask.deadline:
            counters.cancelled += 1
            ask.fail(ask.overdue())
            return
        ask.phase = _RUNNING
        ask.scope = scope
        try:
            if ask.handler.is_stream:
                assert isinstance(ask, StreamCall)
                await produce(ask, ask.handler.function(self._actor, ask.message))
            else:
                ask.reply = await ask.handler.function(self._actor, ask.message)
        except BaseException as error:
            # A stray ``CancelledError`` is a failure of the handler; a real cancellation has to propagate.
            if not isinstance(error, Exception) and not is_stray_cancellation(error):
                counters.cancelled += 1
                raise
            counters.failed += 1
            ask.error = transferred(error, self._cell.name)
        finally:
            counters.handled += 1
            ask.finish()

    def _place(self, handler: Handler, entry: object) -> None:
        # Parked instead of waited for, so that messages of other kinds are not delayed.
        if self._places[handler] >= handler.concurrency:
            self._mailbox.park(handler, entry)
        else:
            self._mailbox.admit()
            self._start_concurrent(handler, entry)

    def _start_concurrent(self, handler: Handler, entry: object) -> None:
        self._places[handler] += 1
        self.num_concurrent += 1
        self._num_tasks += 1
        self._tasks.start_soon(self._run_concurrent, handler, entry, name=self._cell.name)

    async def _run_concurrent(self, handler: Handler, entry: object) -> None:
        try:
            if isinstance(entry, Ask):
                current_frame.set(entry)
                with self._cell.loop.new_scope(deadline=entry.deadline) as scope:
                    await self.answer(entry, scope)
            else:
                # A separate frame, because a concurrent handler does not occupy the loop.
                current_frame.set(Frame(self._cell))
                await self._handle_told(handler, entry)
        finally:
            self._give_place_back(handler)

    def _give_place_back(self, handler: Handler) -> None:
        self._places[handler] -= 1
        self.num_concurrent -= 1
        self._start_next(handler)
        self._leave()

    # ------------------------------------------------------------------------------------------------ visits

    def can_be_visited(self, handler: Handler) -> bool:
        """Return whether a concurrent handler may run in its asker's task now.

        The queue must be empty and the handler below its limit.
        """
        mailbox = self._mailbox
        return mailbox.wake is not None and not mailbox.closed and self._places[handler] < handler.concurrency

    def start(self, ask: Ask) -> None:
        """Start a concurrent handler without queueing it in the mailbox.

        Requires that ``can_be_visited`` returned ``True``.
        """
        self._start_concurrent(ask.handler, ask)

    def is_turn_over(self) -> bool:
        """Return whether a visitor should first yield to the event loop.

        Consecutive visits may contain no checkpoint.
        """
        self._num_visits += 1
        return self._num_visits % FAIRNESS == 0

    def begin_visit(self, ask: Ask, scope: Scope) -> None:
        """Register a visit, which runs inside ``scope``."""
        self._places[ask.handler] += 1
        self.num_concurrent += 1
        self._num_tasks += 1
        self._visits.add(scope)

    def end_visit(self, ask: Ask, scope: Scope) -> None:
        """Unregister a visit and start the next parked message, if any."""
        self._visits.discard(scope)
        self._give_place_back(ask.handler)

    def open_generator(self, ask: Ask, scope: Scope) -> AsyncGenerator[Any, None]:
        """Mark a visited stream as running and return the handler's generator."""
        ask.phase = _RUNNING
        ask.scope = scope
        generator: AsyncGenerator[Any, None] = ask.handler.function(self._actor, ask.message)
        return generator

    def end_stream(self, ask: Ask) -> None:
        """Count a visited stream that has ended normally, failed, or been left by its consumer."""
        ask.phase = _DONE
        ask.message = None
        self._counters.handled += 1
        self._counters.failed += ask.error is not None
        self._counters.cancelled += ask.error is None and ask.reply is PENDING

    # ------------------------------------------------------------------------------------------------ tasks

    async def _handle_told(self, handler: Handler, message: object) -> None:
        try:
            await handler.function(self._actor, message)
        except BaseException as error:  # noqa: BLE001 - raised again, with a note
            self._fail_tell(message, error)
        self._counters.handled += 1

    async def _run_background(self, function: Callable[[], Awaitable[Any]]) -> None:
        # The task inherits the context of its starter, whose frame it must not keep.
        current_frame.set(None)
        try:
            await function()
        finally:
            self._leave()

    def _start_next(self, handler: Handler) -> None:
        """Start the next parked message. If this incarnation has ended, leave it for the next one."""
        if not self._tasks.cancel_scope.cancel_called:
            entry = self._mailbox.unpark(handler)
            if entry is not None:
                self._start_concurrent(handler, entry)
        # Wake ``serve``, which returns when the mailbox is closed and no concurrent handler runs.
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
