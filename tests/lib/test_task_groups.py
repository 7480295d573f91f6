"""Task groups behind blocks: the error of the block comes out as it is, wherever a package opens such a group."""

from __future__ import annotations

import anyio
import pytest

from areal_actors.lib.task_groups import open_tasks

pytestmark = pytest.mark.anyio


async def test_open_tasks_raises_the_error_of_the_block():
    """Its tasks are cancelled."""
    was_cancelled = False

    async def wait() -> None:
        nonlocal was_cancelled
        try:
            await anyio.sleep_forever()
        finally:
            was_cancelled = True

    with pytest.raises(KeyError, match="mine"):
        async with open_tasks() as tasks:
            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            raise KeyError("mine")
    assert was_cancelled


async def test_open_tasks_raises_errors_of_tasks_in_a_group():
    """The block was only cancelled, and would not show the cause."""

    async def fail() -> None:
        raise KeyError("of a task")

    with pytest.raises(ExceptionGroup) as raised:
        async with open_tasks() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()
    assert raised.group_contains(KeyError)
