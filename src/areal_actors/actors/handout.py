"""Finished sessions for whoever asks, one each: a plain object of its one owner, the intake.

A session is lent before it is given: who was cancelled between the two loses nothing, because the next one gets it.
"""

from __future__ import annotations

from collections import deque

import anyio

from areal_actors.messages import TakenSession

__all__ = ["Handout"]


class Handout:
    """A queue with loans."""

    def __init__(self) -> None:
        self._offered: deque[TakenSession] = deque()
        self._lent: dict[str, TakenSession] = {}
        self._changed = anyio.Event()

    def offer(self, taken: TakenSession) -> None:
        """Put a session at the end of the queue."""
        self._offered.append(taken)
        self._notify()

    async def lend(self, taker: str) -> TakenSession:
        """Wait for a session; asking again under the same name, before it was settled, gives the same."""
        while taker not in self._lent:
            if self._offered:
                self._lent[taker] = self._offered.popleft()
            else:
                await self._changed.wait()
        return self._lent[taker]

    def settle(self, taker: str, *, is_kept: bool) -> TakenSession | None:
        """End a loan; returns what is kept. What is not kept goes to the next who asks, before all others."""
        taken = self._lent.pop(taker, None)
        if taken is None or is_kept:
            return taken
        self._offered.appendleft(taken)
        self._notify()
        return None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
