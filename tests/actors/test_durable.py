"""Durable sessions: written down before anybody is told, and after a restart as if there had been none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from tests.actors.house import House, echo_of, encode, open_house, say
from tests.actors.test_retries import FIRST, NAMED, RETRY, WAYS, Caller, call, same, turns

from areal_actors.actors.sessions import SessionsConfig
from areal_actors.cache import SessionSettings, export_trajectories
from areal_actors.cache.journal import MemoryJournal, recover
from areal_actors.domain import (
    Answer,
    Attempt,
    Credential,
    Fact,
    GroupId,
    InteractionStatus,
    RewardSet,
    SampleKey,
    SessionEnded,
    SessionForgotten,
    SessionStarted,
    TextDelta,
    TurnEnded,
)
from areal_actors.errors import JournalError, NotFound, Unauthorized, Unavailable
from areal_actors.errors import SessionEnded as SessionOver
from areal_actors.messages import (
    CollectSession,
    DescribeSessions,
    EndSession,
    ForgetSession,
    SetReward,
)
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = pytest.mark.anyio

KEY = SampleKey(seed=7, path=("t",))


class Gated(MemoryJournal):
    """Writes when it is allowed to; ``writes`` are the facts that were written together."""

    def __init__(self, *, is_open: bool = True) -> None:
        super().__init__()
        self.writes: list[tuple[Fact, ...]] = []
        self.gate = anyio.Event()
        if is_open:
            self.gate.set()

    async def write(self, *facts: Fact) -> None:
        await self.gate.wait()
        self.writes.append(facts)
        await super().write(*facts)


class Breakable(MemoryJournal):
    """A disk that is full from some moment on."""

    is_broken = False

    async def write(self, *facts: Fact) -> None:
        await anyio.lowlevel.checkpoint()
        if self.is_broken:
            raise JournalError("the disk is full")
        await super().write(*facts)

    def note(self, *facts: Fact) -> None:
        if not self.is_broken:
            super().note(*facts)


class Killed(MemoryJournal):
    """The journal of a process that was killed: it reads what was written, and whoever is left writes nowhere."""

    def __init__(self, journal: MemoryJournal) -> None:
        super().__init__(journal.facts)


async def open_durable(house: House, **options: object):
    return await house.open(is_durable=True, key=KEY, **options)


async def reward(house: House, session: str, value: float, interaction: str | None = None) -> str:
    message = SetReward(credential=Credential(session=session), reward=value, interaction=interaction)
    return await house.sessions.ask(message)


async def end(house: House, session: str, final_reward: float | None = None) -> None:
    await house.sessions.ask(EndSession(credential=Credential(session=session), final_reward=final_reward))


async def tell(change: Callable[[], Awaitable[object]], told: list[object]) -> None:
    told.append(await change())


def kinds(journal: MemoryJournal) -> list[type]:
    return [type(fact) for fact in journal.facts]


# ---------------------------------------------------------------------------------------- before anybody is told


@pytest.mark.parametrize("way", WAYS)
async def test_a_turn_is_durable_before_it_is_answered(way: str):
    """While the journal writes, the interaction is pending; a stream has said everything but its end."""
    journal = Gated()
    async with open_house(journal=journal) as house, anyio.create_task_group() as tasks:
        session = (await open_durable(house)).session
        journal.gate = anyio.Event()
        caller = Caller(house, session, way, FIRST)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        (turn,) = await turns(house, session)
        before = list(caller.heard)
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        (after,) = await turns(house, session)

    assert InteractionStatus.PENDING == turn.status
    assert [] == [item for item in before if isinstance(item, Answer)]
    assert (way == "stream") == any(isinstance(item, TextDelta) for item in before)
    assert [after.id] == caller.ids
    (*_, fact) = journal.facts
    assert isinstance(fact, TurnEnded)
    assert (after, FIRST, (after.id,)) == (fact.interaction, fact.attempt, fact.siblings)


async def test_choices_are_written_together():
    """All of them or none."""
    journal = Gated()
    async with open_house(journal=journal) as house:
        session = (await open_durable(house)).session
        await house.complete(session, say("pick"), num_choices=3)

    assert [SessionStarted, [TurnEnded] * 3] == [type(journal.writes[0][0]), list(map(type, journal.writes[1]))]


async def test_sessions_rewards_and_ends_are_durable_before_they_are_told():
    """Each waits for the journal, and changes nothing before."""
    journal = Gated()
    async with open_house(journal=journal) as house, anyio.create_task_group() as tasks:
        session = (await open_durable(house)).session
        (answer,) = await house.complete(session, say("a"))
        for change in (
            lambda: reward(house, session, 0.5),
            lambda: end(house, session, 1.0),
            lambda: open_durable(house),
        ):
            journal.gate = anyio.Event()
            told: list[object] = []
            before = await house.record(session)
            tasks.start_soon(tell, change, told)
            await anyio.wait_all_tasks_blocked()
            assert [] == told
            assert before == await house.record(session)
            journal.gate.set()
            await anyio.wait_all_tasks_blocked()
            assert 1 == len(told)
        record = await house.record(session)
    first, *_, rewarded, ended, _ = journal.facts

    assert isinstance(first, SessionStarted)
    assert (KEY, None) == (first.sample_key, first.user)
    assert (True, 1.0) == (record.is_ended, record.interactions[0].reward)
    assert rewarded == RewardSet(session=session, interaction=answer.interaction, reward=1.0)
    assert isinstance(ended, SessionEnded)
    assert ended.is_final


async def test_what_was_cut_off_or_failed_is_noted():
    """Nobody waits for that."""
    journal, engine = Gated(), EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_house(journal=journal, engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await open_durable(house)).session
        caller = Caller(house, session, "complete", None)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        journal.gate = anyio.Event()
        caller.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        (turn,) = await turns(house, session)
    fact = journal.facts[-1]

    assert isinstance(fact, TurnEnded)
    assert InteractionStatus.CANCELLED == turn.status
    assert turn == fact.interaction


@pytest.mark.parametrize("way", WAYS)
async def test_who_leaves_while_it_is_written_is_answered_by_retrying(way: str):
    """The turn is written nonetheless, so that it is complete; and it is not sampled again."""
    journal = Gated()
    async with open_house(journal=journal) as house, anyio.create_task_group() as tasks:
        session = (await open_durable(house)).session
        journal.gate = anyio.Event()
        caller = Caller(house, session, way, FIRST)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        caller.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert [] == caller.answers
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        again = await call(house, session, way, RETRY)
        (turn,) = await turns(house, session)

    assert [turn.id] == again.ids
    assert InteractionStatus.COMPLETED == turn.status
    assert 1 == kinds(journal).count(TurnEnded)


async def test_a_turn_that_waits_while_its_session_ends_comes_too_late():
    """What was not written before the end is not written after it."""
    journal, engine = Gated(), EchoEngine(lambda _: encode("one"), is_gated=True)
    async with open_house(journal=journal, engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await open_durable(house)).session
        caller = Caller(house, session, "complete", None)
        tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        journal.gate = anyio.Event()
        tasks.start_soon(end, house, session)
        await anyio.wait_all_tasks_blocked()
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        (turn,) = await turns(house, session)

    assert isinstance(caller.error, SessionOver)
    assert InteractionStatus.FAILED == turn.status
    assert [SessionStarted, SessionEnded, TurnEnded] == kinds(journal)


async def test_sessions_of_agents_that_run_again_are_not_written():
    """Only what was opened as durable is."""
    journal = Gated()
    async with open_house(journal=journal) as house:
        session = (await house.open()).session
        await house.complete(session, say("a"))
        await reward(house, session, 1.0)
        await end(house, session)
        await house.sessions.tell(ForgetSession(session=session))
        await anyio.wait_all_tasks_blocked()

    assert [] == journal.facts


async def test_forgotten_and_expired_sessions_are_noted():
    """So that nobody restores them, or lets them live."""
    journal = Gated()
    lifetimes = SessionSettings(idle_seconds=10)
    async with open_house(journal=journal, sessions=SessionsConfig(lifetimes=lifetimes, sweep_seconds=5)) as house:
        forgotten, expired = (await open_durable(house)).session, (await open_durable(house)).session
        await house.sessions.tell(ForgetSession(session=forgotten))
        await anyio.sleep(60)

    assert journal.facts[2] == SessionForgotten(session=forgotten)
    assert [(SessionEnded, expired)] == [(type(fact), fact.session) for fact in journal.facts[3:]]


# -------------------------------------------------------------------------------------------- a disk that is full


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_cannot_be_written_is_no_answer(way: str):
    """The client may try again; the interaction has failed and is nobody's parent."""
    journal = Breakable()
    async with open_house(journal=journal) as house:
        session = (await open_durable(house)).session
        journal.is_broken = True
        caller = await call(house, session, way, FIRST)
        again = await call(house, session, way, RETRY)
        failed = await turns(house, session)

    assert [] == caller.answers
    assert isinstance(caller.error, Unavailable)
    assert isinstance(again.error, Unavailable)
    assert [InteractionStatus.FAILED] * 2 == [turn.status for turn in failed]
    assert (None, "Unavailable") == (failed[0].output, (failed[0].failure or "").split(":")[0])
    assert () == recover(journal.facts).sessions[session].turns


async def test_what_cannot_be_written_is_not_done():
    """A reward is not set, a session neither ended nor opened; all of it may be tried again."""
    journal = Breakable()
    async with open_house(journal=journal) as house:
        opened = await open_durable(house)
        session = opened.session
        await house.complete(session, say("a"))
        before = await house.record(session)
        journal.is_broken = True
        for change in (
            lambda: reward(house, session, 0.5),
            lambda: end(house, session, 1.0),
            lambda: end(house, session),
            lambda: open_durable(house, api_key="my own key"),
        ):
            with pytest.raises(Unavailable, match="not done"):
                await change()
        after = await house.record(session)
        view = await house.sessions.ask(DescribeSessions())
        journal.is_broken = False
        mine = await open_durable(house, api_key="my own key")
        await end(house, session, 1.0)
        done = await house.record(session)

    assert before == after
    assert (1, 0) == (view.num_live, view.num_ended)
    assert "my own key" == mine.api_key
    assert (True, 1.0) == (done.is_ended, done.interactions[0].reward)
    assert {session, mine.session} == set(recover(journal.facts).sessions)


async def test_a_disk_that_hangs_is_as_good_as_gone():
    """Whoever waits is told in bounded time; should it be written later, the note after it has the last word."""
    journal = Gated()
    async with open_house(journal=journal) as house, anyio.create_task_group() as tasks:
        session = (await open_durable(house)).session
        journal.gate = anyio.Event()
        caller = Caller(house, session, "complete", None)
        tasks.start_soon(caller)
        await anyio.sleep(100)

    assert isinstance(caller.error, Unavailable)
    assert [InteractionStatus.FAILED] == [
        turn.interaction.status for turn in recover(journal.facts).sessions[session].turns
    ]


# -------------------------------------------------------------------------------------------------- restarting


async def test_a_session_goes_on_after_a_restart():
    """The same id and key, the parent's exact tokens, the rewards; everything once."""
    journal = MemoryJournal()
    async with open_house(script_answers(encode("a"), encode("b")), journal=journal) as house:
        opened = await open_durable(house, group=GroupId("g"), metadata={"task": 1})
        session = opened.session
        (first,) = await house.complete(session, say("one"))
        await reward(house, session, 0.25, first.interaction)
    async with open_house(script_answers(encode("b")), journal=Killed(journal)) as house:
        (second,) = await house.complete(session, (*say("one"), echo_of(first), *say("two")))
        final = SetReward(credential=Credential(key=opened.api_key), reward=1.0)
        last = await house.sessions.ask(final)
        with pytest.raises(Unauthorized):
            await house.sessions.ask(SetReward(credential=Credential(key="another"), reward=1.0))
        record = await house.record(session)
    one, two = record.interactions

    assert [0.25, 1.0] == [one.reward, two.reward]
    assert (one.id, one.id, None) == (two.parent, two.token_parent, two.fork)
    assert second.interaction == last
    assert ("g", {"task": 1}) == (record.group, record.metadata)
    assert 1 == len(export_trajectories(record, style="concat", discount=1.0).trajectories)


async def test_samples_after_a_restart_are_those_of_an_uninterrupted_server():
    """The random numbers of every request are named alike: repeated prompts, parallel choices, seeds of clients."""
    asked = (("a", {}), ("a", {}), ("b", {"num_choices": 2}), ("a", {"seed": 3}), ("a", {}), ("b", {}))

    async def play(house: House, session: str, some: slice) -> list[SampleKey]:
        for text, options in asked[some]:
            await house.complete(session, say(text), **options)
        return sorted((request.key for request in house.engine.requests), key=repr)

    async with open_house(journal=MemoryJournal()) as house:
        expected = await play(house, (await open_durable(house)).session, slice(None))
    for number in range(1, len(asked)):
        journal = MemoryJournal()
        async with open_house(journal=journal) as house:
            session = (await open_durable(house)).session
            before = await play(house, session, slice(number))
        async with open_house(journal=Killed(journal)) as house:
            after = await play(house, session, slice(number, None))
        assert expected == sorted([*before, *after], key=repr)


async def test_ended_sessions_stay_ended():
    """The grace period goes on while nobody is there; idleness is counted anew."""
    journal, lifetimes = MemoryJournal(), SessionSettings(grace_seconds=60, idle_seconds=100)
    config = SessionsConfig(lifetimes=lifetimes, sweep_seconds=1)
    async with open_house(journal=journal, sessions=config) as house:
        live, ended = (await open_durable(house)).session, (await open_durable(house)).session
        for session in (live, ended):
            await house.complete(session, say("a"))
        await end(house, ended)
    await anyio.sleep(50)
    async with open_house(journal=journal, sessions=config) as house:
        with pytest.raises(SessionOver):
            await house.complete(ended, say("b"))
        await reward(house, ended, 1.0)
        await anyio.sleep(20)
        with pytest.raises(SessionOver):
            await reward(house, ended, 0.5)
        await anyio.sleep(60)
        await house.complete(live, say("b"))
        record = await house.record(ended)
        view = await house.sessions.ask(DescribeSessions())

    assert (True, 1.0) == (record.is_ended, record.interactions[0].reward)
    assert (1, 1) == (view.num_live, view.num_ended)


async def test_a_forgotten_session_stays_forgotten():
    """Neither its id nor its key is known."""
    journal = MemoryJournal()
    async with open_house(journal=journal) as house:
        session = (await open_durable(house)).session
        await house.sessions.tell(ForgetSession(session=session))
    async with open_house(journal=journal) as house:
        with pytest.raises(NotFound):
            await house.sessions.ask(CollectSession(session=session))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("first", "retry"), [(FIRST, RETRY), (NAMED, NAMED)])
async def test_a_durable_turn_is_repeated_by_its_retry(way: str, first: Attempt, retry: Attempt):
    """Its answer never arrived; what is said again is the same to the last token."""
    journal = MemoryJournal()
    options = {"num_choices": 2}
    async with open_house(script_answers(encode("x"), encode("y")), journal=journal) as house:
        session = (await open_durable(house)).session
        lost = await call(house, session, way, first, **options)
    async with open_house(journal=journal) as house:
        again = await call(house, session, way, retry, **options)
        known = await turns(house, session)

    assert [True, True] == [same(one, other) for one, other in zip(lost.answers, again.answers, strict=True)]
    assert 2 == len(known)
    assert [] == house.engine.requests


@pytest.mark.parametrize("way", WAYS)
async def test_what_was_killed_before_it_was_durable_is_sampled_once(way: str):
    """Its retry finds nothing, and begins anew with the same random numbers."""
    journal, engine = MemoryJournal(), EchoEngine(lambda _: encode("one"), is_gated=True)
    async with open_house(journal=journal, engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await open_durable(house)).session
        tasks.start_soon(Caller(house, session, way, FIRST))
        await anyio.wait_all_tasks_blocked()
        killed = Killed(journal)
        tasks.cancel_scope.cancel()
    async with open_house(journal=killed) as house:
        again = await call(house, session, way, RETRY)
        (turn,) = await turns(house, session)

    assert [turn.id] == again.ids
    assert [engine.requests[0].key] == [request.key for request in house.engine.requests]


async def test_what_was_read_is_not_repeated():
    """A later turn continued the answer, or it was rewarded: an equal request that is sent twice is another one."""
    journal = MemoryJournal()
    async with open_house(journal=journal) as house:
        continued, rewarded = (await open_durable(house)).session, (await open_durable(house)).session
        first = await call(house, continued, "complete", FIRST)
        await house.complete(continued, (*say("why?"), echo_of(first.answers[0]), *say("so?")))
        other = await call(house, rewarded, "complete", FIRST)
        await reward(house, rewarded, 1.0, other.ids[0])
    async with open_house(journal=journal) as house:
        again = [await call(house, session, "complete", RETRY) for session in (continued, rewarded)]

    assert first.ids != again[0].ids
    assert other.ids != again[1].ids


async def test_answers_are_repeated_for_as_long_as_clients_ask():
    """Two minutes by the clock on the wall, for those without a name."""
    journal = MemoryJournal()
    async with open_house(journal=journal) as house:
        session = (await open_durable(house)).session
        first = await call(house, session, "complete", FIRST)
        named = await call(house, session, "complete", NAMED)
    await anyio.sleep(121)
    async with open_house(journal=journal) as house:
        again = await call(house, session, "complete", RETRY)
        named_again = await call(house, session, "complete", NAMED)

    assert first.ids != again.ids
    assert named.ids == named_again.ids


async def test_changes_of_one_session_are_written_in_the_order_in_which_they_are_made():
    """Whoever comes second is second in the journal, too; other sessions do not wait."""
    journal = Gated()
    async with open_house(journal=journal) as house, anyio.create_task_group() as tasks:
        one, other = (await open_durable(house)).session, (await open_durable(house)).session
        for session in (one, other):
            await house.complete(session, say("a"))
        journal.gate = anyio.Event()
        for value in (0.25, 0.5):
            tasks.start_soon(reward, house, one, value)
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(reward, house, other, 1.0)
        await anyio.wait_all_tasks_blocked()
        journal.gate.set()
        await anyio.wait_all_tasks_blocked()
        records = [await house.record(session) for session in (one, other)]

    restored = recover(journal.facts).sessions
    assert [0.5, 1.0] == [record.interactions[0].reward for record in records]
    assert [record.interactions for record in records] == [
        restored[session].tree.snapshot().interactions for session in (one, other)
    ]
