"""A thread of one's own for work that blocks: the same thread each time, for what should not wander between threads.

A pool hands each call to whichever thread is idle. An allocator with arenas per thread then keeps the peak memory of
a large computation once for every thread that ever ran it. ``OwnThread`` is for such work; ``anyio.to_thread`` is right
for everything else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import anyio
from anyio import CapacityLimiter, from_thread, to_thread

__all__ = ["OwnThread"]

R = TypeVar("R")
Work = Callable[[], None]


class OwnThread:
    """Runs functions one after another on one thread. Made by ``open``."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Work | None] = SimpleQueue()

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[OwnThread]:
        """A thread for the length of a block; leaving it waits for the function that runs."""
        thread = cls()
        async with anyio.create_task_group() as tasks:
            # A limiter of its own: the thread is occupied for good and must not count against the pool's.
            tasks.start_soon(partial(to_thread.run_sync, thread._loop, limiter=CapacityLimiter(1)))
            try:
                yield thread
            finally:
                thread._work.put(None)

    async def run(self, function: Callable[[], R]) -> R:
        """Call ``function`` on the thread and wait for what it returns or raises.

        Cancelling the caller does not interrupt the function: its result is dropped when it comes.
        """
        done = anyio.Event()
        outcome: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                outcome.append((function(), None))
            except BaseException as error:  # noqa: BLE001 - it is raised where the function was asked for
                outcome.append((None, error))
            from_thread.run_sync(done.set)

        self._work.put(work)
        await done.wait()
        result, error = outcome[0]
        if error is not None:
            raise error
        return cast("R", result)

    def post(self, function: Callable[[], None]) -> None:
        """Call ``function`` on the thread after everything that was asked for before, and do not wait for it.

        Any thread may post. What ``function`` raises ends the block that opened the thread.
        """
        self._work.put(function)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()
