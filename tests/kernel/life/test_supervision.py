"""What becomes of an actor that crashes: it escalates, ends alone, or restarts with ref and mailbox."""

from __future__ import annotations

import math
from random import Random

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st
from tests.kernel.life.recorder import Name, Recorder, Work

from areal_actors.errors import ConfigError
from areal_actors.kernel import ActorState, ActorSystem, DownReason, Escalate, Restart, Stop
from areal_actors.kernel.supervision import RestartHistory

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


async def test_escalate_raises_the_root_cause_from_the_system():
    """One flat group of plain exceptions, also when askers met the consequences first."""
    with pytest.raises(ExceptionGroup, match=r"ValueError: odd \(while actor 'sick' handled Work\)") as caught:
        async with ActorSystem.open() as system:
            ref = await system.spawn(Recorder(), name="sick")
            await ref.tell(Work(error=ValueError("odd")))
            await ref.ask(Name())

    assert [ValueError] == [type(error) for error in caught.value.exceptions]


async def test_escalate_cancels_the_block():
    """Also while it waits."""
    with pytest.raises(ExceptionGroup, match="odd"):
        async with ActorSystem.open() as system:
            ref = await system.spawn(Recorder())
            await ref.tell(Work(error=ValueError("odd")))
            await anyio.sleep(math.inf)


async def test_stop_policy_ends_only_the_actor(caplog):
    """The crash is logged; neighbours live on."""
    async with ActorSystem.open() as system:
        sick, well = await system.spawn(Recorder(), supervision=Stop()), await system.spawn(Recorder(), name="well")
        await sick.tell(Work(error=ValueError("odd")))
        down = await system.watch(sick)

        assert (DownReason.CRASHED, "ValueError: odd", False) == (down.reason, down.error, down.is_restarting)
        assert sick.statistics().state is ActorState.CRASHED
        assert await well.ask(Name()) == "well 1"
        assert "actor_crashed actor=recorder" in caplog.text


async def test_restart_keeps_ref_and_mailbox_but_not_state():
    """What was queued behind the failing message is handled by the next incarnation."""
    made: list[Recorder] = []

    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    async with ActorSystem.open() as system:
        ref = await system.spawn(make, name="cat", supervision=Restart(backoff_seconds=1))
        await ref.tell(Work(error=ValueError("odd")))
        await ref.tell(Work())

        assert await ref.ask(Name()) == "cat 2"
        assert ["enters 1", "background ends", "saw odd", "leaves"] == made[0].events
        assert ["enters 2", "works"] == made[1].events
        assert ref.address.incarnation == 2


async def test_crash_cannot_be_suppressed_by_the_lifespan():
    """Supervision is not its decision."""
    recorder = Recorder()
    recorder.swallows = True
    async with ActorSystem.open() as system:
        ref = await system.spawn(recorder, supervision=Stop())
        await ref.tell(Work(error=ValueError("odd")))

        assert (await system.watch(ref)).reason is DownReason.CRASHED


async def test_background_task_that_raises_crashes_the_actor():
    """Even without an ask."""
    recorder = Recorder()
    recorder.background_error = ValueError("in the background")
    async with ActorSystem.open() as system:
        ref = await system.spawn(recorder, supervision=Stop())

        assert (await system.watch(ref)).error == "ValueError: in the background"


async def test_restart_beyond_the_limit_applies_the_next_policy():
    """Two within the window are granted, the third crash is final."""
    policy = Restart(max_restarts=2, window_seconds=60, backoff_seconds=0, then=Stop())
    async with ActorSystem.open() as system:
        ref = await system.spawn(Recorder, supervision=policy)
        for _ in range(3):
            await ref.tell(Work(error=ValueError("odd")))
        downs = [await system.watch(ref) for _ in range(3)]

        assert [(1, True), (2, True), (3, False)] == [(down.incarnation, down.is_restarting) for down in downs]

    with pytest.raises(ExceptionGroup, match="odd"):
        async with ActorSystem.open() as system:
            ref = await system.spawn(Recorder, supervision=Restart(max_restarts=0, then=Escalate()))
            await ref.tell(Work(error=ValueError("odd")))


async def test_restart_that_fails_counts_as_a_crash():
    """A factory or lifespan that cannot come back is met by the same policy."""
    broken = False

    def make() -> Recorder:
        if broken:
            raise OSError("no disk")
        return Recorder()

    async with ActorSystem.open() as system:
        ref = await system.spawn(make, supervision=Restart(max_restarts=2, backoff_seconds=1, then=Stop()))
        broken = True
        await ref.tell(Work(error=ValueError("odd")))
        errors = [(await system.watch(ref)).error for _ in range(3)]

        assert ["ValueError: odd", "OSError: no disk", "OSError: no disk"] == errors


async def test_stop_ends_the_back_off_of_a_restart():
    """The actor is gone at once."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Recorder, supervision=Restart(backoff_seconds=1000, max_backoff_seconds=1000))
        await ref.tell(Work(error=ValueError("odd")))
        await wait_all_tasks_blocked()
        assert ref.statistics().state is ActorState.RESTARTING
        start = anyio.current_time()
        await ref.stop()

        assert anyio.current_time() - start < 1


async def test_restart_needs_a_factory_of_one_class():
    """An instance cannot be made afresh, and another class cannot take over a ref."""

    class Other(Recorder):
        pass

    kinds = iter((Recorder, Other))
    async with ActorSystem.open() as system:
        with pytest.raises(ConfigError, match="spawn a factory"):
            await system.spawn(Recorder(), supervision=Restart())
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
def test_restart_history_respects_window_and_back_off(crashes, max_restarts, window):
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
