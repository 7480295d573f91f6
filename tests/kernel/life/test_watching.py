"""Watching actors: notifications of their ends."""

from __future__ import annotations

import anyio
import pytest
from tests.kernel.life.recorder import Recorder, Work

from areal_actors.kernel import ActorSystem, Down, DownReason, Restart, Stop
from areal_actors.kernel.runtime import LocalRef

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


async def test_watcher_is_told_of_each_end():
    """Which incarnation it was, and whether another follows; a watcher that comes later, the last one."""
    ends: list[Down] = []
    async with ActorSystem.open() as system:
        cat = await system.spawn(
            Recorder, name="cat", supervision=Restart(backoff_seconds=1, max_restarts=1, then=Stop())
        )
        cat.watch(ends.append)
        await cat.tell(Work(error=ValueError("odd")))
        await cat.tell(Work(error=ValueError("odd")))
        await anyio.sleep(60)
        last = await system.watch(cat)

    assert [(1, True), (2, False)] == [(down.incarnation, down.is_restarting) for down in ends]
    assert {(DownReason.CRASHED, "ValueError: odd")} == {(down.reason, down.error) for down in ends}
    assert ends[-1] == last


async def test_watch_that_is_cancelled_is_forgotten():
    """Waiting for an end that does not come leaves nothing behind."""
    async with ActorSystem.open() as system:
        cat = await system.spawn(Recorder())
        with anyio.move_on_after(1):
            await system.watch(cat)

        assert isinstance(cat, LocalRef)
        assert not cat.cell._watchers
