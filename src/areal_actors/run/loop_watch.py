"""Find code of an agent that keeps the event loop waiting, by looking at the loop's stack while it is late.

A loop is late on a busy machine as well, and while modules are imported. Only a function of the agent that is on the
stack for the whole time is named, and the time for which the loop's thread waited for a core does not count.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import anyio
from attrs import frozen

import areal_actors
from areal_actors.lib.task_groups import open_tasks

_INTERVAL_SECONDS = 0.05
_MIN_SAMPLES = 3
"""Samples that must have the same function. A watching thread that is late itself has few."""
_OURS = str(Path(areal_actors.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")


@frozen(kw_only=True)
class BlockedLoop:
    """A function of an agent, and for how long it kept the event loop waiting."""

    seconds: float = 0.0
    place: str = ""
    """``file.py:12, in run``."""


class LoopWatch:
    """The longest time for which an agent has kept the loop waiting. ``watch_loop`` creates it."""

    def __init__(self) -> None:
        self.longest = BlockedLoop()
        self._thread = threading.current_thread()
        self._turn = 0
        self._turned_at = time.monotonic()

    async def _turn_loop(self) -> None:
        while True:
            self._turn += 1
            self._turned_at = time.monotonic()
            await anyio.sleep(_INTERVAL_SECONDS)

    def _look(self, stopped: threading.Event) -> None:
        """Sample the stack of the loop's thread until ``stopped``."""
        seen, num_samples, began = (0, 0), 0, (0.0, 0.0)
        looked = time.monotonic(), self._queued_seconds()
        while not stopped.wait(_INTERVAL_SECONDS):
            before, looked = looked, (time.monotonic(), self._queued_seconds())
            turn = self._turn
            if looked[0] - self._turned_at < 2 * _INTERVAL_SECONDS:
                continue
            assert self._thread.ident is not None
            frame = find_agent_frame(sys._current_frames().get(self._thread.ident))  # noqa: SLF001 - the public way
            sample = (turn, id(frame))
            if sample != seen:
                seen, num_samples, began = sample, 0, before
            num_samples += 1
            seconds = looked[0] - began[0] - (looked[1] - began[1])
            if frame is not None and num_samples >= _MIN_SAMPLES and seconds > self.longest.seconds:
                code = frame.f_code
                self.longest = BlockedLoop(
                    seconds=seconds, place=f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
                )

    def _queued_seconds(self) -> float:
        """Return for how long the loop's thread has waited for a core, as Linux counts it; 0 elsewhere."""
        try:
            counts = Path(f"/proc/self/task/{self._thread.native_id}/schedstat").read_text(encoding="ascii").split()
        except OSError:
            return 0.0
        return int(counts[1]) / 1e9


@asynccontextmanager
async def watch_loop() -> AsyncIterator[LoopWatch]:
    """Watch the running event loop from a thread, which ends with the block."""
    watch, stopped = LoopWatch(), threading.Event()
    thread = threading.Thread(target=watch._look, args=(stopped,), name="loop-watch", daemon=True)  # noqa: SLF001 - ours
    async with open_tasks() as tasks:
        tasks.start_soon(watch._turn_loop)  # noqa: SLF001 - ours
        thread.start()
        try:
            yield watch
        finally:
            stopped.set()
            thread.join()
            tasks.cancel_scope.cancel()


def find_agent_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of an agent's code that ``frame`` was called by, without library code.

    Code that called this library is no agent's, and importing modules is none of its doing.
    """
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return None
        if not file.startswith((_STANDARD, "<frozen", "<string>")) and "/site-packages/" not in file:
            return frame
        frame = frame.f_back
    return None
