"""The life of an actor, from its spawn to its end: lifespan, background tasks, stopping."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from tests.kernel.life.recorder import GoAway, Name, Recorder, Work

from areal_actors.errors import ActorError, ActorStopped
from areal_actors.kernel import ActorState, ActorSystem, Context, DownReason, Stop

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


async def test_actor_lifespan_surrounds_handlers_and_tasks():
    """Entered before spawn returns; background tasks end before the lifespan is left; nothing follows."""
    recorder = Recorder()
    async with ActorSystem.open() as system:
        ref = await system.spawn(recorder)
        assert ["enters 1"] == recorder.events
        await ref.tell(Work())
        await ref.stop()

        assert ["enters 1", "works", "background ends", "leaves"] == recorder.events
        assert ref.statistics().state is ActorState.STOPPED
        await ref.stop()


async def test_system_stops_the_last_actor_first():
    """What was started later may use what was started earlier."""
    events: list[str] = []

    class Named(Recorder):
        @asynccontextmanager
        async def lifespan(self, context: Context) -> AsyncIterator[None]:
            yield
            events.append(context.name)

    async with ActorSystem.open() as system:
        for name in "abc":
            await system.spawn(Named(), name=name)

    assert ["c", "b", "a"] == events


async def test_stop_handles_accepted_messages_within_the_grace_period():
    """What fits is handled; what does not is cancelled and counted."""
    recorder = Recorder()
    async with ActorSystem.open() as system:
        ref = await system.spawn(recorder)
        for seconds in (2, 2, 20, 1):
            await ref.tell(Work(seconds=seconds))
        start = anyio.current_time()
        await ref.stop(grace=10)

        assert anyio.current_time() - start == pytest.approx(10, abs=0.1)
        assert ["enters 1", "works", "works", "work cancelled", "background ends", "leaves"] == recorder.events
        assert ref.statistics().num_dropped == 1


async def test_stop_again_may_shorten_the_grace_period():
    """The shorter grace wins, and both callers return."""
    recorder = Recorder()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(recorder)
        await ref.tell(Work(seconds=1000))
        tasks.start_soon(lambda: ref.stop(grace=500))
        await wait_all_tasks_blocked()
        assert ref.statistics().state is ActorState.STOPPING
        start = anyio.current_time()
        await ref.stop(grace=1)

        assert anyio.current_time() - start == pytest.approx(1, abs=0.1)
        assert "work cancelled" in recorder.events


async def test_stop_continues_when_its_caller_is_cancelled():
    """The ladder belongs to the actor."""
    recorder = Recorder()
    async with ActorSystem.open() as system:
        ref = await system.spawn(recorder)
        await ref.tell(Work(seconds=5))
        with anyio.move_on_after(1):
            await ref.stop(grace=10)
        down = await system.watch(ref)

        assert down.reason is DownReason.STOPPED
        assert "works" in recorder.events


async def test_lifespan_exit_is_shielded_and_bounded():
    """A cancelled system still leaves its lifespans, but not for ever."""
    events: list[str] = []
    patient, endless = Recorder(events, leaving=3), Recorder(events, leaving=math.inf)
    with anyio.move_on_after(10) as scope:
        async with ActorSystem.open(cleanup_seconds=5) as system:
            await system.spawn(patient)
            await system.spawn(endless)
            await anyio.sleep(100)

    assert scope.cancelled_caught
    assert anyio.current_time() - scope.deadline == pytest.approx(5, abs=0.1)
    assert events.count("leaves") == 1


async def test_actor_stopped_error_while_stopping_is_not_a_crash():
    """An actor that tells one that was stopped before it ends quietly; in mid-life it crashes as by any error."""

    class Reporter(Recorder):
        @Work.handler
        async def work(self, message: Work) -> None:
            await anyio.sleep(message.seconds)
            await cat.tell(Work())

    async with ActorSystem.open() as system:
        reporter = await system.spawn(Reporter(), name="reporter", supervision=Stop())
        cat = await system.spawn(Recorder(), name="cat")
        await reporter.tell(Work(seconds=1))
    assert reporter.statistics().state is ActorState.STOPPED

    async with ActorSystem.open() as system:
        reporter = await system.spawn(Reporter(), name="reporter", supervision=Stop())
        await reporter.tell(Work())
        assert (await system.watch(reporter)).reason is DownReason.CRASHED


async def test_actor_may_stop_itself():
    """It finishes what it had accepted."""
    recorder = Recorder()
    async with ActorSystem.open() as system:
        ref = await system.spawn(recorder)
        await ref.tell(GoAway())
        await ref.tell(Work())
        await system.watch(ref)

        assert "works" in recorder.events
        assert system.statistics().actors == ()


async def test_spawn_raises_the_error_of_the_lifespan():
    """Plainly, and nothing of the actor remains."""

    class Broken(Recorder):
        @asynccontextmanager
        async def lifespan(self, context: Context) -> AsyncIterator[None]:
            raise OSError("no disk")
            yield

    async with ActorSystem.open() as system:
        with pytest.raises(OSError, match="no disk"):
            await system.spawn(Broken(), name="broken")
        with pytest.raises(ZeroDivisionError):
            await system.spawn(lambda: Recorder(leaving=1 / 0))

        assert await (await system.spawn(Recorder(), name="broken")).ask(Name()) == "broken 1"


async def test_spawn_that_is_cancelled_leaves_no_actor():
    """The half-born actor is cut off."""
    recorder = Recorder(entering=100)
    async with ActorSystem.open() as system:
        with anyio.move_on_after(1):
            await system.spawn(recorder)
        await wait_all_tasks_blocked()

        assert ["enters 1"] == recorder.events
        assert system.statistics().actors == ()


async def test_spawn_of_an_actor_stopped_meanwhile_raises():
    """Its spawner is told."""
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:

        async def spawn() -> None:
            with pytest.raises(ActorStopped, match="stopped before its lifespan was entered"):
                await system.spawn(Recorder(entering=100), name="slow")

        tasks.start_soon(spawn)
        await wait_all_tasks_blocked()
        await system.stop(grace=1)


async def test_spawn_refuses_the_name_of_a_running_actor():
    """A name is free again when its actor is gone; without a name one is made."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Recorder(), name="one")
        with pytest.raises(ActorError, match="an actor named 'one' lives in system 'local' already"):
            await system.spawn(Recorder(), name="one")
        await ref.stop()

        assert (await system.spawn(Recorder(), name="one")).name == "one"
        assert ["recorder", "recorder-2"] == [(await system.spawn(Recorder())).name for _ in range(2)]


async def test_spawn_in_a_closed_system_is_refused():
    """And says how to open one."""
    async with ActorSystem.open() as system:
        pass
    with pytest.raises(ActorStopped, match="is not open"):
        await system.spawn(Recorder())
