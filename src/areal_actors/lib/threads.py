"""A dedicated thread for blocking work that should always run on the same thread.

A thread pool hands each call to any idle thread. An allocator with per-thread arenas then retains the peak memory of a
large computation once for every thread that ever ran it. Use ``OwnThread`` for such work, and ``anyio.to_thread`` for
everything else.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import anyio
from anyio import from_thread
from anyio.lowlevel import EventLoopToken, current_token

from areal_actors.lib.task_groups import open_tasks

R = TypeVar("R")
Work = Callable[[], None]

NUM_CHECKS = 20
"""How often in a row a thread must be found without progress, within the time limit, to count as hung."""


class ThreadHangs(TimeoutError):
    """A function on a thread makes no progress."""


def describe_place(thread: threading.Thread) -> str:
    """Return the line at which ``thread`` is, as " in function (file, line 1)"; empty if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - documented, named for its danger only
    place = traceback.extract_stack(frame)[-1] if frame is not None else None
    return "" if place is None else f" in {place.name} ({place.filename}, line {place.lineno})"


class OwnThread:
    """Runs functions one after another on one thread. Made by ``open``."""

    def __init__(self, token: EventLoopToken) -> None:
        self._token = token
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._waiting = anyio.CancelScope(shield=True)
        # A daemon, so that one that hangs does not keep the process from exiting.
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._loop), name="areal-own-thread", daemon=True)
        self._ended = anyio.Event()
        self._error: BaseException | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[OwnThread]:
        """Start a thread for the duration of a block; leaving it waits for the functions that were queued."""
        thread = cls(current_token())
        async with open_tasks() as tasks:
            tasks.start_soon(thread._wait_ended)
            thread._thread.start()
            try:
                yield thread
            finally:
                # The sentinel ends the loop after everything that was queued before.
                thread._work.put(None)

    async def run(
        self,
        function: Callable[[], R],
        *,
        timeout_seconds: float | None = None,
        read_progress: Callable[[], object] = lambda: None,
    ) -> R:
        """Call ``function`` on the thread and return its result, or raise its exception.

        Cancelling the caller does not interrupt the function: its result is then discarded.

        Raises ``ThreadHangs`` if ``read_progress`` has returned the same for ``timeout_seconds``, and the function has
        not returned. Leaving the block does not wait for the thread from then on.
        """
        done = anyio.Event()
        outcome: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                outcome.append((function(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the task that called ``run``
                outcome.append((None, error))
            # ``anyio.Event`` is not thread-safe, so it is set in the event loop.
            from_thread.run_sync(done.set, token=self._token)

        self._work.put(work)
        if timeout_seconds is None:
            await done.wait()
        # Checks are counted and times not compared: a process that was stopped for an hour has not hung for an hour.
        progress, num_checks = read_progress(), 0
        while not done.is_set():
            with anyio.move_on_after((timeout_seconds or 0.0) / NUM_CHECKS):
                await done.wait()
            last, progress = progress, read_progress()
            num_checks = num_checks + 1 if progress == last else 0
            if num_checks >= NUM_CHECKS and not done.is_set():
                self._waiting.cancel()
                raise ThreadHangs(f"hangs{describe_place(self._thread)}")
        result, error = outcome[0]
        if error is not None:
            raise error
        return cast("R", result)

    def post(self, function: Callable[[], None]) -> None:
        """Queue ``function`` on the thread without waiting for it.

        Functions run in the order in which they were queued. Any thread may call this. An exception of ``function``
        ends the block that opened the thread.
        """
        self._work.put(function)

    def _loop(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - raised again in the block that opened the thread
            self._error = error
        with suppress(RuntimeError):  # it was given up, and the event loop has ended
            from_thread.run_sync(self._ended.set, token=self._token)

    async def _wait_ended(self) -> None:
        with self._waiting:
            await self._ended.wait()
        if self._error is not None:
            raise self._error
