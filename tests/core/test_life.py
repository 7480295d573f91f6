"""The life of an actor: lifespan, background tasks, stopping, supervision and watching."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st
from tests.core.processes import fast_backend

from areal_actors.core import (
    Actor,
    ActorState,
    ActorSystem,
    Address,
    Context,
    Down,
    DownReason,
    Escalate,
    Message,
    Ref,
    Restart,
    Stop,
)
from areal_actors.core.supervision import RestartHistory
from areal_actors.errors import ActorError, ActorStopped, ConfigError
from areal_actors.testing import virtual_backend

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest, placement: str):
    """Both loops, in virtual time where the actors are in this process."""
    return (fast_backend if placement == "processes" else virtual_backend)(request.param)


class Life:
    """Address of an actor that writes a diary."""


FAULTS: list[Exception] = []


def keep(error: Exception | int | None) -> int | None:
    """Exceptions do not travel: the message holds the place of one."""
    if not isinstance(error, Exception):
        return error
    FAULTS.append(error)
    return len(FAULTS) - 1


@frozen(kw_only=True)
class Work(Message[Life, None]):
    seconds: float = 0.0
    error: int | None = field(default=None, converter=keep)


@frozen(kw_only=True)
class Name(Message[Life, str]):
    pass


@frozen(kw_only=True)
class GoAway(Message[Life, None]):
    pass


@frozen(kw_only=True)
class Watch(Message[Life, None]):
    ref: Ref[Life]


class Diarist(Actor[Life]):
    def __init__(self, diary: list[str] | None = None, *, leaving: float = 0.0, entering: float = 0.0) -> None:
        self.diary = [] if diary is None else diary
        self.leaving, self.entering = leaving, entering
        self.swallows = False
        self.background_error: Exception | None = None

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        self.context = context
        self.diary.append(f"enters {context.incarnation}")
        await anyio.sleep(self.entering)
        context.tasks.start_soon(self.run_beside)
        try:
            yield
        except ValueError as error:
            self.diary.append(f"saw {error}")
            if not self.swallows:
                raise
        finally:
            await anyio.sleep(self.leaving)
            self.diary.append("leaves")

    async def run_beside(self) -> None:
        try:
            if self.background_error is not None:
                await anyio.sleep(1)
                raise self.background_error
            await anyio.sleep_forever()
        finally:
            self.diary.append("background ends")

    @Work.handler
    async def work(self, message: Work) -> None:
        try:
            await anyio.sleep(message.seconds)
        except BaseException:
            self.diary.append("work cancelled")
            raise
        if message.error is not None:
            raise FAULTS[message.error]
        self.diary.append("works")

    @Name.handler
    async def name(self, message: Name) -> str:
        return f"{self.context.name} {self.context.incarnation}"

    @GoAway.handler
    async def go_away(self, message: GoAway) -> None:
        self.context.stop()

    @Watch.handler
    async def watch(self, message: Watch) -> None:
        self.context.watch(message.ref)


class Watcher(Diarist):
    @Down.handler
    async def mourn(self, message: Down) -> None:
        again = " restarting" if message.is_restarting else ""
        self.diary.append(f"{message.ref.name} {message.incarnation} {message.reason}{again} {message.error}")


# ------------------------------------------------------------------------------------------------------ stopping


async def test_a_life_in_order():
    """Entered before spawn returns; background tasks end before the lifespan is left; nothing follows."""
    diarist = Diarist()
    async with ActorSystem.open() as system:
        ref = await system.spawn(diarist)
        assert ["enters 1"] == diarist.diary
        await ref.tell(Work())
        await ref.stop()

        assert ["enters 1", "works", "background ends", "leaves"] == diarist.diary
        assert ref.statistics().state is ActorState.STOPPED
        await ref.stop()


async def test_leaving_the_block_stops_the_last_actor_first():
    """What was started later may use what was started earlier."""
    diary: list[str] = []

    class Named(Diarist):
        @asynccontextmanager
        async def lifespan(self, context: Context) -> AsyncIterator[None]:
            yield
            diary.append(context.name)

    async with ActorSystem.open() as system:
        for name in "abc":
            await system.spawn(Named(), name=name)

    assert ["c", "b", "a"] == diary


async def test_stopping_drains_up_to_the_grace():
    """What fits is handled; what does not is cancelled and counted."""
    diarist = Diarist()
    async with ActorSystem.open() as system:
        ref = await system.spawn(diarist)
        for seconds in (2, 2, 20, 1):
            await ref.tell(Work(seconds=seconds))
        start = anyio.current_time()
        await ref.stop(grace=10)

        assert anyio.current_time() - start == pytest.approx(10, abs=0.1)
        assert ["enters 1", "works", "works", "work cancelled", "background ends", "leaves"] == diarist.diary
        assert ref.statistics().num_dropped == 1


async def test_a_second_stop_may_be_less_patient():
    """The shorter grace wins, and both callers return."""
    diarist = Diarist()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(diarist)
        await ref.tell(Work(seconds=1000))
        tasks.start_soon(lambda: ref.stop(grace=500))
        await wait_all_tasks_blocked()
        assert ref.statistics().state is ActorState.STOPPING
        start = anyio.current_time()
        await ref.stop(grace=1)

        assert anyio.current_time() - start == pytest.approx(1, abs=0.1)
        assert "work cancelled" in diarist.diary


async def test_a_caller_that_stops_waiting_does_not_stop_the_stop():
    """The ladder belongs to the actor."""
    diarist = Diarist()
    async with ActorSystem.open() as system:
        ref = await system.spawn(diarist)
        await ref.tell(Work(seconds=5))
        with anyio.move_on_after(1):
            await ref.stop(grace=10)
        down = await system.watch(ref)

        assert down.reason is DownReason.STOPPED
        assert "works" in diarist.diary


async def test_leaving_a_lifespan_is_shielded_and_bounded():
    """A cancelled system still leaves its lifespans, but not for ever."""
    diary: list[str] = []
    patient, endless = Diarist(diary, leaving=3), Diarist(diary, leaving=math.inf)
    with anyio.move_on_after(10) as scope:
        async with ActorSystem.open(cleanup_seconds=5) as system:
            await system.spawn(patient)
            await system.spawn(endless)
            await anyio.sleep(100)

    assert scope.cancelled_caught
    assert anyio.current_time() - scope.deadline == pytest.approx(5, abs=0.1)
    assert diary.count("leaves") == 1


async def test_meeting_the_stopped_is_no_crash_at_the_end():
    """An actor that tells one that was stopped before it ends quietly; in mid-life it crashes as by any error."""

    class Reporter(Diarist):
        @Work.handler
        async def work(self, message: Work) -> None:
            await anyio.sleep(message.seconds)
            await cat.tell(Work())

    async with ActorSystem.open() as system:
        reporter = await system.spawn(Reporter(), name="reporter", supervision=Stop())
        cat = await system.spawn(Diarist(), name="cat")
        await reporter.tell(Work(seconds=1))
    assert reporter.statistics().state is ActorState.STOPPED

    async with ActorSystem.open() as system:
        reporter = await system.spawn(Reporter(), name="reporter", supervision=Stop())
        await reporter.tell(Work())
        assert (await system.watch(reporter)).reason is DownReason.CRASHED


async def test_an_actor_may_stop_itself():
    """It finishes what it had accepted."""
    diarist = Diarist()
    async with ActorSystem.open() as system:
        ref = await system.spawn(diarist)
        await ref.tell(GoAway())
        await ref.tell(Work())
        await system.watch(ref)

        assert "works" in diarist.diary
        assert system.statistics().actors == ()


async def test_a_spawn_that_fails_raises_what_the_lifespan_raised():
    """Plainly, and nothing of the actor remains."""

    class Broken(Diarist):
        @asynccontextmanager
        async def lifespan(self, context: Context) -> AsyncIterator[None]:
            raise OSError("no disk")
            yield

    async with ActorSystem.open() as system:
        with pytest.raises(OSError, match="no disk"):
            await system.spawn(Broken(), name="broken")
        with pytest.raises(ZeroDivisionError):
            await system.spawn(lambda: Diarist(leaving=1 / 0))

        assert await (await system.spawn(Diarist(), name="broken")).ask(Name()) == "broken 1"


async def test_a_cancelled_spawn_leaves_nothing():
    """The half-born actor is cut off."""
    diarist = Diarist(entering=100)
    async with ActorSystem.open() as system:
        with anyio.move_on_after(1):
            await system.spawn(diarist)
        await wait_all_tasks_blocked()

        assert ["enters 1"] == diarist.diary
        assert system.statistics().actors == ()


async def test_stopping_an_actor_that_is_being_born():
    """Its spawner is told."""
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:

        async def spawn() -> None:
            with pytest.raises(ActorStopped, match="stopped before its lifespan was entered"):
                await system.spawn(Diarist(entering=100), name="slow")

        tasks.start_soon(spawn)
        await wait_all_tasks_blocked()
        await system.stop(grace=1)


async def test_names_are_unique_among_the_living():
    """A name is free again when its actor is gone; without a name one is made."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Diarist(), name="one")
        with pytest.raises(ActorError, match="an actor named 'one' lives in system 'local' already"):
            await system.spawn(Diarist(), name="one")
        await ref.stop()
        again = await system.spawn(Diarist(), name="one")

        assert again is system.resolve(again.address)
        assert ["diarist", "diarist-2"] == [(await system.spawn(Diarist())).name for _ in range(2)]


async def test_a_closed_system_spawns_nothing():
    """And says how to open one."""
    async with ActorSystem.open() as system:
        pass
    with pytest.raises(ActorStopped, match="is not open"):
        await system.spawn(Diarist())
    with pytest.raises(ActorStopped, match="no actor 'gone'"):
        system.resolve(Address(node="local", name="gone"))


# --------------------------------------------------------------------------------------------------- supervision


async def test_escalation_leaves_the_system_and_names_the_root_cause():
    """One flat group of plain exceptions, also when askers met the consequences first."""
    with pytest.raises(ExceptionGroup, match=r"ValueError: odd \(while actor 'sick' handled Work\)") as caught:
        async with ActorSystem.open() as system:
            ref = await system.spawn(Diarist(), name="sick")
            await ref.tell(Work(error=ValueError("odd")))
            await ref.ask(Name())

    assert [ValueError] == [type(error) for error in caught.value.exceptions]


async def test_a_crash_cancels_the_block():
    """Nobody waits for what will not come."""
    with pytest.raises(ExceptionGroup, match="odd"):
        async with ActorSystem.open() as system:
            ref = await system.spawn(Diarist())
            await ref.tell(Work(error=ValueError("odd")))
            await anyio.sleep(math.inf)


async def test_stop_ends_the_actor_alone(caplog):
    """The crash is logged; neighbours live on."""
    async with ActorSystem.open() as system:
        sick, well = await system.spawn(Diarist(), supervision=Stop()), await system.spawn(Diarist(), name="well")
        await sick.tell(Work(error=ValueError("odd")))
        down = await system.watch(sick)

        assert (DownReason.CRASHED, "ValueError: odd", False) == (down.reason, down.error, down.is_restarting)
        assert sick.statistics().state is ActorState.CRASHED
        assert await well.ask(Name()) == "well 1"
        assert "actor 'diarist' crashed" in caplog.text


async def test_restart_keeps_ref_and_mailbox_and_loses_state_and_message():
    """What was queued behind the failing message is handled by the next incarnation."""
    made: list[Diarist] = []

    def make() -> Diarist:
        made.append(Diarist())
        return made[-1]

    async with ActorSystem.open() as system:
        ref = await system.spawn(make, name="cat", supervision=Restart(backoff_seconds=1))
        await ref.tell(Work(error=ValueError("odd")))
        await ref.tell(Work())

        assert await ref.ask(Name()) == "cat 2"
        assert ["enters 1", "background ends", "saw odd", "leaves"] == made[0].diary
        assert ["enters 2", "works"] == made[1].diary
        assert ref.address.incarnation == 2


async def test_a_lifespan_cannot_swallow_a_crash():
    """Supervision is not its decision."""
    diarist = Diarist()
    diarist.swallows = True
    async with ActorSystem.open() as system:
        ref = await system.spawn(diarist, supervision=Stop())
        await ref.tell(Work(error=ValueError("odd")))

        assert (await system.watch(ref)).reason is DownReason.CRASHED


async def test_a_background_task_that_raises_crashes_the_actor():
    """Loudly, even if nobody ever asks."""
    diarist = Diarist()
    diarist.background_error = ValueError("in the background")
    async with ActorSystem.open() as system:
        ref = await system.spawn(diarist, supervision=Stop())

        assert (await system.watch(ref)).error == "ValueError: in the background"


async def test_too_many_restarts_go_to_the_next_policy():
    """Two within the window are granted, the third crash is final."""
    policy = Restart(max_restarts=2, window_seconds=60, backoff_seconds=0, then=Stop())
    async with ActorSystem.open() as system:
        ref = await system.spawn(Diarist, supervision=policy)
        for _ in range(3):
            await ref.tell(Work(error=ValueError("odd")))
        downs = [await system.watch(ref) for _ in range(3)]

        assert [(1, True), (2, True), (3, False)] == [(down.incarnation, down.is_restarting) for down in downs]

    with pytest.raises(ExceptionGroup, match="odd"):
        async with ActorSystem.open() as system:
            ref = await system.spawn(Diarist, supervision=Restart(max_restarts=0, then=Escalate()))
            await ref.tell(Work(error=ValueError("odd")))


async def test_a_restart_that_fails_counts_as_a_crash():
    """A factory or lifespan that cannot come back is met by the same policy."""
    broken = False

    def make() -> Diarist:
        if broken:
            raise OSError("no disk")
        return Diarist()

    async with ActorSystem.open() as system:
        ref = await system.spawn(make, supervision=Restart(max_restarts=2, backoff_seconds=1, then=Stop()))
        broken = True
        await ref.tell(Work(error=ValueError("odd")))
        errors = [(await system.watch(ref)).error for _ in range(3)]

        assert ["ValueError: odd", "OSError: no disk", "OSError: no disk"] == errors


async def test_a_stop_ends_the_back_off():
    """Nobody waits for a restart that is not wanted."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Diarist, supervision=Restart(backoff_seconds=1000, max_backoff_seconds=1000))
        await ref.tell(Work(error=ValueError("odd")))
        await wait_all_tasks_blocked()
        assert ref.statistics().state is ActorState.RESTARTING
        start = anyio.current_time()
        await ref.stop()

        assert anyio.current_time() - start < 1


async def test_restart_needs_a_factory_that_keeps_its_word():
    """An instance cannot be made afresh, and another class cannot take over a ref."""
    kinds = iter((Diarist, Watcher))
    async with ActorSystem.open() as system:
        with pytest.raises(ConfigError, match="spawn a factory"):
            await system.spawn(Diarist(), supervision=Restart())
        ref = await system.spawn(
            lambda: next(kinds)(),  # noqa: PLW0108 - another class each time
            supervision=Restart(max_restarts=1, then=Stop()),
        )
        await ref.tell(Work(error=ValueError("odd")))
        assert (await system.watch(ref)).is_restarting

        assert "must always make the same class" in str((await system.watch(ref)).error)


@given(
    crashes=st.lists(st.floats(min_value=0, max_value=100), max_size=30),
    max_restarts=st.integers(min_value=0, max_value=5),
    window=st.floats(min_value=0.1, max_value=100),
)
def test_restarts_respect_window_and_back_off(crashes, max_restarts, window):
    """Never more grants in any window than allowed; delays double up to the maximum, within the jitter."""
    policy = Restart(
        max_restarts=max_restarts, window_seconds=window, backoff_seconds=1, max_backoff_seconds=6, jitter=0.5
    )
    history, granted, now = RestartHistory(policy, Random(0)), [], 0.0
    for gap in crashes:
        now += gap
        delay = history.next_delay(now)
        recent = [time for time in granted if time > now - window]
        assert (delay is None) is (len(recent) >= max_restarts)
        if delay is not None:
            base = min(2.0 ** len(recent), 6)
            assert 0.5 * base <= delay <= 1.5 * base
            granted.append(now)


# ------------------------------------------------------------------------------------------------------ watching


async def test_a_watcher_hears_of_each_end_ahead_of_its_queue():
    """The news overtakes what was queued, and says which life it was and whether another follows."""
    watcher = Watcher()
    async with ActorSystem.open() as system:
        mourner = await system.spawn(watcher)
        cat = await system.spawn(
            Diarist, name="cat", supervision=Restart(backoff_seconds=1, max_restarts=1, then=Stop())
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
        ] == watcher.diary


async def test_watching_the_dead_is_answered_at_once():
    """From inside and from outside."""
    watcher = Watcher()
    async with ActorSystem.open() as system:
        mourner, cat = await system.spawn(watcher), await system.spawn(Diarist(), name="cat")
        await cat.stop()
        await mourner.ask(Watch(ref=cat))
        await mourner.ask(Name())

        assert "cat 1 stopped None" in watcher.diary
        assert (await system.watch(cat)).reason is DownReason.STOPPED


async def test_watching_needs_a_handler_for_the_news():
    """A watcher that could not hear is refused."""
    async with ActorSystem.open() as system:
        deaf, cat = await system.spawn(Diarist(), supervision=Stop()), await system.spawn(Diarist(), name="cat")
        await deaf.tell(Watch(ref=cat))

        assert "add a method under @Down.handler" in str((await system.watch(deaf)).error)


async def test_a_watcher_that_gives_up_is_forgotten():
    """Waiting for an end that does not come leaves nothing behind."""
    async with ActorSystem.open() as system:
        cat = await system.spawn(Diarist())
        with anyio.move_on_after(1):
            await system.watch(cat)

        assert not system.cell_of(cat)._watchers
