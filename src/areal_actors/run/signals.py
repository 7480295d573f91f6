"""SIGINT and SIGTERM: the first one finishes the step, saves a checkpoint and stops; the second one exits at once.

Until training has started, Python's default handling applies, since nothing is worth saving. From then on signals are
received until the last part of the run has ended. Otherwise a ``KeyboardInterrupt`` would be raised in any callback
that happens to run, and the other tasks would wait for it forever.

Workers end on a signal, or when their parent process is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import TaskGroup, TaskStatus

from areal_actors.errors import ArealError
from areal_actors.kernel import Ref
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import RequestStop, Training

EXIT_INTERRUPTED = 130

_log = get_logger(__name__)


class Interrupts:
    """Turns SIGINT, SIGTERM and requests of the program into ``RequestStop``. Created by ``open_interrupts``."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._training: Ref[Training] | None = None
        self._asked: str | None = None
        self._is_asked = anyio.Event()
        self._is_listening = False
        self._is_ending = False
        self.is_cut_off = False
        """Whether a signal cancelled the run because no training could be asked to stop."""

    def request(self, name: str) -> None:
        """Ask the training to stop as a first signal does. If none runs yet, the next one is asked when it starts."""
        if self._asked is None:
            self._stop(name)

    def _stop(self, name: str) -> None:
        self._asked = name
        self._is_asked.set()
        if self._training is not None:
            # In the background: the trainer may be out of reach for long, and a second signal must still be received.
            self._tasks.start_soon(self._tell, self._training, name)

    async def listen(self) -> None:
        """Handle signals from now on. Until there is training to be told, the first one ends the run."""
        # Only the main thread: Python delivers signals to no other.
        if not self._is_listening and threading.current_thread() is threading.main_thread():
            self._is_listening = True
            await self._tasks.start(self._listen)

    @asynccontextmanager
    async def telling(self, training: Ref[Training], *, is_handling_signals: bool = True) -> AsyncIterator[None]:
        """Ask ``training`` to stop on the first signal or request, while the block runs or received before it."""
        if is_handling_signals:
            await self.listen()
        self._training = training
        if self._asked is not None:
            self._tasks.start_soon(self._tell, training, self._asked)
        try:
            yield
            self._is_ending = True
        finally:
            self._training = None

    async def wait(self) -> str:
        """Wait for the first signal, and return its name."""
        await self._is_asked.wait()
        assert self._asked is not None
        return self._asked

    async def _listen(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self._asked is not None:
                    # Exit without cleanup: a second signal asks for that, and the last checkpoint is complete on disk.
                    os._exit(EXIT_INTERRUPTED)
                name = signal.Signals(number).name
                self._stop(name)
                if self._training is not None:
                    _log.warning("stopping", reason=name, detail="finishing the step; once more to leave at once")
                elif self._is_ending:
                    _log.warning("stopping", reason=name, detail="ending what is left; once more to leave at once")
                else:  # between two attempts
                    self.is_cut_off = True
                    self._tasks.cancel_scope.cancel()

    @staticmethod
    async def _tell(training: Ref[Training], name: str) -> None:
        with suppress(ArealError):  # training has just ended
            await training.tell(RequestStop(reason=f"interrupted by {name}"))


class RunControl:
    """The events between a run and the program that holds it: the run has begun, and it is asked to stop."""

    def __init__(self) -> None:
        self.begun, self.stopping = anyio.Event(), anyio.Event()

    async def forward(self, interrupts: Interrupts) -> None:
        """Ask the run to stop when the program does."""
        await self.stopping.wait()
        interrupts.request("its program")


@asynccontextmanager
async def open_interrupts() -> AsyncIterator[Interrupts]:
    """Open the signal receiver. Open it before everything that a signal has to end.

    Raises ``KeyboardInterrupt`` on exit if a signal cancelled the run.
    """
    async with open_tasks() as tasks:
        interrupts = Interrupts(tasks)
        yield interrupts
        tasks.cancel_scope.cancel()
    if interrupts.is_cut_off:
        raise KeyboardInterrupt


async def until_orphaned(scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` when standard input reaches its end, which means that the parent process is gone.

    Waits on the file descriptor instead of reading in a thread, because a blocked thread would keep the process from
    exiting for another reason.
    """
    descriptor = sys.stdin.fileno()
    try:
        while True:
            await anyio.wait_readable(descriptor)
            if not os.read(descriptor, 4096):
                break
    except PermissionError:
        # epoll refuses regular files, whose end says nothing about the parent.
        return
    scope.cancel()


async def until_signalled(scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` on SIGTERM or SIGINT.

    A proxy then drains: running requests may finish, and new ones are asked to retry.
    """
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
