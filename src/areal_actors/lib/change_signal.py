"""A signal for tasks that wait until shared state has changed."""

from __future__ import annotations

import anyio


class ChangeSignal:
    """Wakes all tasks that wait for the next change of some state.

    Waiters check the state in a loop: ``while not condition(): await changed.wait()``. No change is missed as long as
    nothing is awaited between the check and the wait.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = anyio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait now. Tasks that start to wait later are woken by the next call."""
        # An event cannot be cleared, so each change uses up one. This is what anyio and trio recommend over
        # a condition variable, which would have to be awaited here.
        changed, self._next = self._next, anyio.Event()
        changed.set()

    async def wait(self) -> None:
        """Wait for the next ``notify``."""
        await self._next.wait()
