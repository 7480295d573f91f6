"""The signal of ``lib.loops`` on trio, in a module that is imported only where trio runs."""

from __future__ import annotations

from typing import Any

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

__all__ = ["ParkedSignal", "wait_until"]


class ParkedSignal:
    """A signal on trio: a parked task."""

    __slots__ = ("_is_set", "_task")

    def __init__(self) -> None:
        self._is_set = False
        self._task: Task | None = None

    def set(self) -> None:
        """See ``Signal.set``."""
        self._is_set = True
        task, self._task = self._task, None
        if task is not None:
            reschedule(task)

    async def wait(self) -> None:
        """See ``Signal.wait``."""
        if not self._is_set:
            self._task = current_task()
            await wait_task_rescheduled(self._abort)

    def _abort(self, _: Any) -> Abort:  # Any: the function that raises trio's cancellation
        self._task = None
        return Abort.SUCCEEDED


async def wait_until(signal: ParkedSignal, deadline: float) -> None:
    """Wait until ``signal`` is set, or the deadline has passed."""
    with trio.CancelScope(deadline=deadline):
        await signal.wait()
