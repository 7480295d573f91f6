"""Durable sessions are written down before anybody is told; what cannot be written is not done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from tests.stacks.callers import FIRST, RETRY, WAYS, Caller, call, turns
from tests.stacks.inference_stack import encode, open_inference_stack, say
from tests.stacks.journals import KEY, Breakable, Gated, end, open_durable, reward

from areal_actors.cache import SessionSettings
from areal_actors.domain import (
    Answer,
    InteractionStatus,
    RewardScope,
    RewardSet,
    SessionEnded,
    SessionForgotten,
    SessionStarted,
    TextDelta,
    TurnEnded,
)
from areal_actors.errors import SessionEnded as SessionOver
from areal_actors.errors import Unavailable
from areal_actors.journal import MemoryJournal, recover
from areal_actors.messages import DescribeSessions, ForgetSession
from areal_actors.sessions.manager import SessionsConfig
from areal_actors.testing.engines import EchoEngine

pytestmark = pytest.mark.anyio


async def tell(change: Callable[[], Awaitable[object]], told: list[object]) -> None:
    told.append(await change())


def kinds(journal: MemoryJournal) -> list[type]:
    return [type(event) for event in journal.events]


# ---------------------------------------------------------------------------------------- before anybody is told


@pytest.mark.parametrize("way", WAYS)
async def test_turn_is_durable_before_it_is_answered(way: str):
    """While the journal writes, the interaction is pending."""
    journal = Gated()
    async with open_inference_stack(journal=journal) as inference, anyio.create_task_group() as tasks:
        session = (await open_durable(inference)).session
        journal.gate = anyio.Event()
        caller = Caller(inference, session, way, FIRST)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        (turn,) = await turns(inference, session)
        before = list(caller.heard)
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        (after,) = await turns(inference, session)

    assert InteractionStatus.PENDING == turn.status
    assert [] == [item for item in before if isinstance(item, Answer)]
    assert (way == "stream") == any(isinstance(item, TextDelta) for item in before)
    assert [after.id] == caller.ids
    (*_, event) = journal.events
    assert isinstance(event, TurnEnded)
    assert (after, FIRST, (after.id,)) == (event.interaction, event.attempt, event.siblings)


async def test_choices_are_written_together():
    journal = Gated()
    async with open_inference_stack(journal=journal) as inference:
        session = (await open_durable(inference)).session
        await inference.complete(session, say("pick"), num_choices=3)

    assert [SessionStarted, [TurnEnded] * 3] == [type(journal.writes[0][0]), list(map(type, journal.writes[1]))]


async def test_starts_rewards_and_ends_are_durable_before_they_are_acknowledged():
    journal = Gated()
    async with open_inference_stack(journal=journal) as inference, anyio.create_task_group() as tasks:
        session = (await open_durable(inference)).session
        (answer,) = await inference.complete(session, say("a"))
        for change in (
            lambda: reward(inference, session, 0.5),
            lambda: end(inference, session, 1.0),
            lambda: open_durable(inference),
        ):
            journal.gate = anyio.Event()
            told: list[object] = []
            before = await inference.record(session)
            tasks.start_soon(tell, change, told)
            await anyio.wait_all_tasks_blocked()
            assert [] == told
            assert before == await inference.record(session)
            journal.gate.set()
            await anyio.wait_all_tasks_blocked()
            assert 1 == len(told)
        record = await inference.record(session)
    first, *_, rewarded, ended, _ = journal.events

    assert isinstance(first, SessionStarted)
    assert (KEY, None) == (first.sample_key, first.user)
    assert (True, 1.0) == (record.is_ended, record.interactions[0].reward)
    assert rewarded == RewardSet(session=session, interaction=answer.interaction, reward=1.0, scope=RewardScope.EPISODE)
    assert isinstance(ended, SessionEnded)
    assert ended.is_final


async def test_cancelled_and_failed_turns_are_noted():
    """No caller waits for that."""
    journal, engine = Gated(), EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_inference_stack(journal=journal, engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await open_durable(inference)).session
        caller = Caller(inference, session, "complete", None)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        journal.gate = anyio.Event()
        caller.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        (turn,) = await turns(inference, session)
    event = journal.events[-1]

    assert isinstance(event, TurnEnded)
    assert InteractionStatus.CANCELLED == turn.status
    assert turn == event.interaction


@pytest.mark.parametrize("way", WAYS)
async def test_disconnect_during_the_write_completes_the_turn(way: str):
    """The retry repeats it."""
    journal = Gated()
    async with open_inference_stack(journal=journal) as inference, anyio.create_task_group() as tasks:
        session = (await open_durable(inference)).session
        journal.gate = anyio.Event()
        caller = Caller(inference, session, way, FIRST)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        caller.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert [] == caller.answers
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        again = await call(inference, session, way, RETRY)
        (turn,) = await turns(inference, session)

    assert [turn.id] == again.ids
    assert InteractionStatus.COMPLETED == turn.status
    assert 1 == kinds(journal).count(TurnEnded)


async def test_turn_that_waits_while_its_session_ends_is_refused():
    journal, engine = Gated(), EchoEngine(lambda _: encode("one"), is_gated=True)
    async with open_inference_stack(journal=journal, engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await open_durable(inference)).session
        caller = Caller(inference, session, "complete", None)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        journal.gate = anyio.Event()
        tasks.start_soon(end, inference, session)
        await anyio.wait_all_tasks_blocked()
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        (turn,) = await turns(inference, session)

    assert isinstance(caller.error, SessionOver)
    assert InteractionStatus.FAILED == turn.status
    assert [SessionStarted, SessionEnded, TurnEnded] == kinds(journal)


async def test_sessions_that_are_not_durable_are_not_written():
    journal = Gated()
    async with open_inference_stack(journal=journal) as inference:
        session = (await inference.open()).session
        await inference.complete(session, say("a"))
        await reward(inference, session, 1.0)
        await end(inference, session)
        await inference.sessions.tell(ForgetSession(session=session))
        await anyio.wait_all_tasks_blocked()

    assert [] == journal.events


async def test_forgotten_and_expired_sessions_are_noted():
    journal = Gated()
    lifetimes = SessionSettings(idle_seconds=10)
    async with open_inference_stack(
        journal=journal, sessions=SessionsConfig(lifetimes=lifetimes, sweep_seconds=5)
    ) as inference:
        forgotten, expired = (await open_durable(inference)).session, (await open_durable(inference)).session
        await inference.sessions.tell(ForgetSession(session=forgotten))
        await anyio.sleep(60)

    assert journal.events[2] == SessionForgotten(session=forgotten)
    assert [(SessionEnded, expired)] == [(type(event), event.session) for event in journal.events[3:]]


async def test_changes_of_a_session_are_written_in_order():
    """Other sessions do not wait."""
    journal = Gated()
    async with open_inference_stack(journal=journal) as inference, anyio.create_task_group() as tasks:
        one, other = (await open_durable(inference)).session, (await open_durable(inference)).session
        for session in (one, other):
            await inference.complete(session, say("a"))
        journal.gate = anyio.Event()
        for value in (0.25, 0.5):
            tasks.start_soon(reward, inference, one, value)
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(reward, inference, other, 1.0)
        await anyio.wait_all_tasks_blocked()
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        records = [await inference.record(session) for session in (one, other)]

    restored = recover(journal.events)
    assert [0.5, 1.0] == [record.interactions[0].reward for record in records]
    assert [record.interactions for record in records] == [
        restored[session].tree.snapshot().interactions for session in (one, other)
    ]


# ------------------------------------------------------------------------------------------- a disk that is full


@pytest.mark.parametrize("way", WAYS)
async def test_answer_that_cannot_be_written_fails(way: str):
    """The client may try again."""
    journal = Breakable()
    async with open_inference_stack(journal=journal) as inference:
        session = (await open_durable(inference)).session
        journal.is_broken = True
        caller = await call(inference, session, way, FIRST)
        again = await call(inference, session, way, RETRY)
        failed = await turns(inference, session)

    assert [] == caller.answers
    assert isinstance(caller.error, Unavailable)
    assert isinstance(again.error, Unavailable)
    assert [InteractionStatus.FAILED] * 2 == [turn.status for turn in failed]
    assert (None, "Unavailable") == (failed[0].output, (failed[0].failure or "").split(":")[0])
    assert () == recover(journal.events)[session].turns


async def test_reward_start_and_end_that_cannot_be_written_change_nothing():
    """They may be tried again."""
    journal = Breakable()
    async with open_inference_stack(journal=journal) as inference:
        opened = await open_durable(inference)
        session = opened.session
        await inference.complete(session, say("a"))
        before = await inference.record(session)
        journal.is_broken = True
        for change in (
            lambda: reward(inference, session, 0.5),
            lambda: end(inference, session, 1.0),
            lambda: end(inference, session),
            lambda: open_durable(inference, api_key="my own key"),
        ):
            with pytest.raises(Unavailable, match="not done"):
                await change()
        after = await inference.record(session)
        view = await inference.sessions.ask(DescribeSessions())
        journal.is_broken = False
        mine = await open_durable(inference, api_key="my own key")
        await end(inference, session, 1.0)
        done = await inference.record(session)

    assert before == after
    assert (1, 0) == (view.num_live, view.num_ended)
    assert "my own key" == mine.api_key
    assert (True, 1.0) == (done.is_ended, done.interactions[0].reward)
    assert {session, mine.session} == set(recover(journal.events))


async def test_write_to_a_disk_that_hangs_fails_in_bounded_time():
    """If it is written later, the note after it decides."""
    journal = Gated()
    async with open_inference_stack(journal=journal) as inference, anyio.create_task_group() as tasks:
        session = (await open_durable(inference)).session
        journal.gate = anyio.Event()
        caller = Caller(inference, session, "complete", None)
        tasks.start_soon(caller)
        await anyio.sleep(100)

    assert isinstance(caller.error, Unavailable)
    assert [InteractionStatus.FAILED] == [turn.interaction.status for turn in recover(journal.events)[session].turns]
