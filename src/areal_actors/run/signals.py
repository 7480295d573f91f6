"""Ctrl-C: the first one finishes the step, writes a checkpoint and stops; the second one leaves at once.

Until there is a training to be asked, an interrupt is Python's own: nothing has been begun that is worth a wait. From
then on signals are listened to until the last part of the run has ended, so that no KeyboardInterrupt comes up in
whatever callback happens to run, and leaves the rest waiting for it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import TaskGroup, TaskStatus

from areal_actors.core import Ref
from areal_actors.core.remote.transport import unwrapped
from areal_actors.errors import ArealError
from areal_actors.messages import RequestStop, Training
from areal_actors.telemetry import get_logger

__all__ = ["Interrupts", "open_interrupts"]

EXIT_INTERRUPTED = 130

_log = get_logger(__name__)


class Interrupts:
    """SIGINT and SIGTERM as ``RequestStop``. Made by ``open_interrupts``."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._training: Ref[Training] | None = None
        self._asked: str | None = None
        self._is_listening = False
        self._is_ending = False
        self.is_cut_off = False
        """Whether the run was ended because there was no training that could be asked to stop."""

    @asynccontextmanager
    async def telling(self, training: Ref[Training]) -> AsyncIterator[None]:
        """While the block runs, the first signal asks ``training`` to stop; so does one that came before."""
        await self._begin()
        self._training = training
        if self._asked is not None:
            self._tell(training, self._asked)
        try:
            yield
            self._is_ending = True
        finally:
            self._training = None

    async def _begin(self) -> None:
        """Signals reach the main thread only: a run inside somebody's own thread leaves them to its owner."""
        if not self._is_listening and threading.current_thread() is threading.main_thread():
            await self._tasks.start(self._listen)
            self._is_listening = True

    async def _listen(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self._asked is not None:
                    # Nothing is waited for: whoever asks twice means now, and the last checkpoint is complete on disk.
                    os._exit(EXIT_INTERRUPTED)
                self._asked = signal.Signals(number).name
                self._stop(self._asked)

    def _stop(self, name: str) -> None:
        if self._training is not None:
            _log.warning("stopping", reason=name, detail="finishing the step; once more to leave at once")
            self._tell(self._training, name)
        elif self._is_ending:
            _log.warning("stopping", reason=name, detail="ending what is left; once more to leave at once")
        else:  # between two attempts
            self.is_cut_off = True
            self._tasks.cancel_scope.cancel()

    def _tell(self, training: Ref[Training], name: str) -> None:
        """Not waited for: the trainer may be out of reach for long, and the second signal is not to wait with it."""
        self._tasks.start_soon(_request_stop, training, f"interrupted by {name}")


async def _request_stop(training: Ref[Training], reason: str) -> None:
    with suppress(ArealError):  # it has just ended
        await training.tell(RequestStop(reason=reason))


@asynccontextmanager
async def open_interrupts() -> AsyncIterator[Interrupts]:
    """What listens to signals, to be opened before all that has to be ended when one comes.

    Raises ``KeyboardInterrupt`` at its end if the run was cut off.
    """
    body: list[BaseException] = []
    tasks = anyio.create_task_group()
    interrupts = Interrupts(tasks)
    with unwrapped(body):
        async with tasks:
            try:
                yield interrupts
            except BaseException as error:
                body.append(error)
                raise
            tasks.cancel_scope.cancel()
    if interrupts.is_cut_off:
        raise KeyboardInterrupt
