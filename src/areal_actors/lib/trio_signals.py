"""Signals on trio, and waits for them until a time, of which several end with one timer.

Each timer is a cancel scope that is entered, cancelled at its deadline and left by an exception. A streamed answer
waits up to 40 times a second for its next tokens; that took a tenth of the CPU time of 16 of them, without the
cancellations.
"""

from __future__ import annotations

from typing import Any

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

__all__ = ["ParkedSignal", "SharedTimers"]

_MAX_TOGETHER = 32
"""Waits that end with one timer. The tasks that it wakes run before the loop looks for input again."""


class ParkedSignal:
    """A signal on trio: a parked task."""

    __slots__ = ("_task", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._task: Task | None = None

    def set(self) -> None:
        """See ``Signal.set``."""
        self.is_set = True
        self.wake()

    def wake(self) -> None:
        """Let ``wait`` return, whether the signal is set or not."""
        task, self._task = self._task, None
        if task is not None:
            reschedule(task)

    async def wait(self) -> None:
        """See ``Signal.wait``."""
        if not self.is_set:
            self._task = current_task()
            await wait_task_rescheduled(self._abort)

    def _abort(self, _: Any) -> Abort:  # Any: the function that raises trio's cancellation
        self._task = None
        return Abort.SUCCEEDED


class SharedTimers:
    """The waits of a loop that end at a time."""

    def __init__(self) -> None:
        self._timers: list[_Timer] = []

    async def wait_until(self, signal: ParkedSignal, deadline: float) -> None:
        """Wait until ``signal`` is set, or the deadline has passed; up to a quarter earlier if another ends then."""
        earliest = deadline - (deadline - trio.current_time()) / 4
        for timer in self._timers:
            if earliest <= timer.at <= deadline and len(timer.waiting) < _MAX_TOGETHER:
                break
        else:
            timer = _Timer(self._timers, deadline)
            self._timers.append(timer)
        timer.waiting[signal] = None
        try:
            while not (signal.is_set or timer.has_expired):
                if timer.owner is None:
                    await timer.keep(signal)
                else:
                    await signal.wait()
        finally:
            timer.leave(signal)


class _Timer:
    """Waits that end at one time. One of them, the owner, has a scope with that deadline and wakes the others."""

    __slots__ = ("_timers", "at", "has_expired", "owner", "waiting")

    def __init__(self, timers: list[_Timer], at: float) -> None:
        self._timers = timers
        self.at = at
        self.waiting: dict[ParkedSignal, None] = {}
        self.owner: ParkedSignal | None = None
        self.has_expired = False

    async def keep(self, signal: ParkedSignal) -> None:
        """Wait for ``signal``, and wake all waits at their time."""
        self.owner = signal
        with trio.CancelScope(deadline=self.at) as scope:
            await signal.wait()
        if scope.cancelled_caught:
            self.has_expired = True
            self._timers.remove(self)
            for other in self.waiting:
                other.wake()

    def leave(self, signal: ParkedSignal) -> None:
        """End a wait. If it was the owner, another one takes its place."""
        del self.waiting[signal]
        if self.owner is signal:
            self.owner = None
        if self.has_expired:
            return
        if not self.waiting:
            self._timers.remove(self)
        elif self.owner is None:
            # It keeps the time from now on, or leaves in its turn.
            next(iter(self.waiting)).wake()
