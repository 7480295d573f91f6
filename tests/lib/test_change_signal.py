"""A signal wakes all tasks that wait for the next change."""

from __future__ import annotations

import anyio
import pytest

from areal_actors.lib.change_signal import ChangeSignal

pytestmark = pytest.mark.anyio


async def test_change_signal_wakes_all_waiters() -> None:
    """And tasks whose condition still does not hold wait for the next one."""
    changed, count, seen = ChangeSignal(), 0, []

    async def wait_for(number: int) -> None:
        while count < number:
            await changed.wait()
        seen.append(number)

    async with anyio.create_task_group() as tasks:
        for number in (1, 2, 1, 0):
            tasks.start_soon(wait_for, number)
        await anyio.wait_all_tasks_blocked()
        assert sorted(seen) == [0]
        count = 1
        changed.notify()
        await anyio.wait_all_tasks_blocked()
        assert sorted(seen) == [0, 1, 1]
        count = 2
        changed.notify()
    assert sorted(seen) == [0, 1, 1, 2]


async def test_change_signal_ignores_earlier_changes() -> None:
    """A task checks its condition first, so the change has been seen already."""
    changed = ChangeSignal()
    changed.notify()
    with anyio.move_on_after(0) as scope:
        await changed.wait()
    assert scope.cancelled_caught
