"""Ctrl-C: the first one finishes the step, writes a checkpoint and stops; the second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus

from areal_actors.core import Ref
from areal_actors.messages import RequestStop, Training
from areal_actors.telemetry import get_logger

__all__ = ["stop_on_signals"]

EXIT_INTERRUPTED = 130

_log = get_logger(__name__)


@asynccontextmanager
async def stop_on_signals(training: Ref[Training]) -> AsyncIterator[None]:
    """Turn SIGINT and SIGTERM into ``RequestStop`` for the length of the block.

    Signals reach the main thread only: a run inside somebody's own thread leaves them to its owner.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    async with anyio.create_task_group() as tasks:
        await tasks.start(_listen, training, tasks)
        yield
        tasks.cancel_scope.cancel()


async def _listen(training: Ref[Training], tasks: TaskGroup, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        is_first = True
        async for number in signals:
            if not is_first:
                # Nothing is waited for: whoever asks twice means now, and the last checkpoint is complete on disk.
                os._exit(EXIT_INTERRUPTED)
            is_first = False
            name = signal.Signals(number).name
            _log.warning("stopping", reason=name, detail="finishing the step; once more to leave at once")
            # Not waited for: the trainer may be out of reach for long, and the second signal is not to wait with it.
            tasks.start_soon(training.tell, RequestStop(reason=f"interrupted by {name}"))
