"""Watching actors: notifications of their ends."""

from __future__ import annotations

import anyio
import pytest
from tests.kernel.life.recorder import Name, Recorder, Watch, Watcher, Work

from areal_actors.kernel import ActorSystem, DownReason, Restart, Stop
from areal_actors.kernel.runtime import LocalRef

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


async def test_watcher_is_told_of_each_end_before_its_queue():
    """The news overtakes what was queued, and says which life it was and whether another follows."""
    watcher = Watcher()
    async with ActorSystem.open() as system:
        mourner = await system.spawn(watcher)
        cat = await system.spawn(
            Recorder, name="cat", supervision=Restart(backoff_seconds=1, max_restarts=1, then=Stop())
        )
        await mourner.ask(Watch(ref=cat))
        await mourner.tell(Work(seconds=10))
        await mourner.tell(Work())
        await cat.tell(Work(error=ValueError("odd")))
        await cat.tell(Work(error=ValueError("odd")))
        await anyio.sleep(60)

        assert [
            "enters 1",
            "works",
            "cat 1 crashed restarting ValueError: odd",
            "cat 2 crashed ValueError: odd",
            "works",
        ] == watcher.events


async def test_watch_of_an_ended_actor_answers_at_once():
    """From inside and from outside."""
    watcher = Watcher()
    async with ActorSystem.open() as system:
        mourner, cat = await system.spawn(watcher), await system.spawn(Recorder(), name="cat")
        await cat.stop()
        await mourner.ask(Watch(ref=cat))
        await mourner.ask(Name())

        assert "cat 1 stopped None" in watcher.events
        assert (await system.watch(cat)).reason is DownReason.STOPPED


async def test_watch_without_a_handler_for_down_is_refused():
    """A watcher that could not on_down is refused."""
    async with ActorSystem.open() as system:
        deaf, cat = await system.spawn(Recorder(), supervision=Stop()), await system.spawn(Recorder(), name="cat")
        await deaf.tell(Watch(ref=cat))

        assert "add a method under @Down.handler" in str((await system.watch(deaf)).error)


async def test_watch_that_is_cancelled_is_forgotten():
    """Waiting for an end that does not come leaves nothing behind."""
    async with ActorSystem.open() as system:
        cat = await system.spawn(Recorder())
        with anyio.move_on_after(1):
            await system.watch(cat)

        assert isinstance(cat, LocalRef)
        assert not cat.cell._watchers
