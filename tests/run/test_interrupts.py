"""The effect of the first signal in each phase of a run. ``test_signals`` interrupts whole runs."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from areal_actors.errors import ActorStopped
from areal_actors.run.signals import Interrupts, open_interrupts

pytestmark = pytest.mark.anyio


class TrainingRef:
    """Receives the message."""

    def __init__(self, *, is_over: bool = False) -> None:
        self.is_over = is_over
        self.told = anyio.Event()

    async def tell(self, message: Any) -> None:
        assert "SIGINT" in message.reason
        self.told.set()
        if self.is_over:
            raise ActorStopped("it is over")


def training(*, is_over: bool = False) -> Any:
    """Return a stand-in for the ref of a training."""
    return TrainingRef(is_over=is_over)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def fail(interrupts: Interrupts) -> None:
    with pytest.raises(OSError, match="a node"):
        async with interrupts.telling(training()):
            raise OSError("a node is gone")


@pytest.mark.parametrize("is_over", [False, True])
async def test_interrupt_is_sent_to_training_once(*, is_over: bool) -> None:
    """A training that has just ended raises no error."""
    told = training(is_over=is_over)
    async with open_interrupts() as interrupts, interrupts.telling(told):
        interrupt()
        await told.told.wait()


async def test_interrupt_between_attempts_ends_run() -> None:
    """There is no trainer to ask; open resources are closed in order."""
    closed = []
    with pytest.raises(KeyboardInterrupt):
        async with open_interrupts() as interrupts:
            try:
                await fail(interrupts)
                interrupt()
                await anyio.sleep_forever()
            finally:
                closed.append("premises")

    assert ["premises"] == closed


async def test_interrupt_is_sent_to_next_attempt() -> None:
    """The signal reached a trainer that is gone; it counts for the next one."""
    first, second = training(), training()
    async with open_interrupts() as interrupts:
        with pytest.raises(OSError, match="a node"):
            async with interrupts.telling(first):
                interrupt()
                await first.told.wait()
                raise OSError("a node is gone")
        async with interrupts.telling(second):
            await second.told.wait()
