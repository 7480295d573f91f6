"""Durable sessions after a restart: as if there had been none."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.callers import FIRST, NAMED, RETRY, WAYS, Caller, call, same, turns
from tests.stacks.inference_stack import InferenceStack, echo_of, encode, open_inference_stack, say
from tests.stacks.journals import Killed, end, open_durable, reward

from areal_actors.cache import SessionSettings, export_trajectories
from areal_actors.domain import Attempt, Credential, GroupId, SampleKey
from areal_actors.errors import Forbidden, NotFound, Unauthorized
from areal_actors.errors import SessionEnded as SessionOver
from areal_actors.journal import MemoryJournal
from areal_actors.messages import CheckCredential, CollectSession, DescribeSessions, ForgetSession, SetReward
from areal_actors.sessions.manager import SessionsConfig
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = pytest.mark.anyio


async def test_session_continues_after_a_restart():
    """Ids, keys, rewards and exact tokens are the same."""
    journal = MemoryJournal()
    async with open_inference_stack(script_answers(encode("a"), encode("b")), journal=journal) as inference:
        opened = await open_durable(inference, group=GroupId("g"), metadata={"task": 1})
        session = opened.session
        (first,) = await inference.complete(session, say("one"))
        await reward(inference, session, 0.25, first.interaction)
    async with open_inference_stack(script_answers(encode("b")), journal=Killed(journal)) as inference:
        (second,) = await inference.complete(session, (*say("one"), echo_of(first), *say("two")))
        final = SetReward(credential=Credential(key=opened.api_key), reward=1.0)
        last = await inference.sessions.ask(final)
        with pytest.raises(Unauthorized):
            await inference.sessions.ask(SetReward(credential=Credential(key="another"), reward=1.0))
        completing = Credential(key=opened.completion_key)
        assert session == await inference.sessions.ask(CheckCredential(credential=completing))
        with pytest.raises(Forbidden):
            await inference.sessions.ask(SetReward(credential=completing, reward=1000.0))
        record = await inference.record(session)
    one, two = record.interactions

    assert [0.25, 1.0] == [one.reward, two.reward]
    assert (one.id, one.id, None) == (two.parent, two.token_parent, two.fork)
    assert second.interaction == last
    assert ("g", {"task": 1}) == (record.group, record.metadata)
    assert 1 == len(export_trajectories(record, style="concat", discount=1.0).trajectories)


async def test_sample_keys_after_a_restart_are_those_of_an_uninterrupted_run():
    asked = (("a", {}), ("a", {}), ("b", {"num_choices": 2}), ("a", {"seed": 3}), ("a", {}), ("b", {}))

    async def play(inference: InferenceStack, session: str, some: slice) -> list[SampleKey]:
        for text, options in asked[some]:
            await inference.complete(session, say(text), **options)
        return sorted((request.key for request in inference.engine.requests), key=repr)

    async with open_inference_stack(journal=MemoryJournal()) as inference:
        expected = await play(inference, (await open_durable(inference)).session, slice(None))
    for number in range(1, len(asked)):
        journal = MemoryJournal()
        async with open_inference_stack(journal=journal) as inference:
            session = (await open_durable(inference)).session
            before = await play(inference, session, slice(number))
        async with open_inference_stack(journal=Killed(journal)) as inference:
            after = await play(inference, session, slice(number, None))
        assert expected == sorted([*before, *after], key=repr)


async def test_ended_sessions_stay_ended():
    """The grace period continues while no process runs; idleness starts again."""
    journal, lifetimes = MemoryJournal(), SessionSettings(grace_seconds=60, idle_seconds=100)
    config = SessionsConfig(lifetimes=lifetimes, sweep_seconds=1)
    async with open_inference_stack(journal=journal, sessions=config) as inference:
        live, ended = (await open_durable(inference)).session, (await open_durable(inference)).session
        for session in (live, ended):
            await inference.complete(session, say("a"))
        await end(inference, ended)
    await anyio.sleep(50)
    async with open_inference_stack(journal=journal, sessions=config) as inference:
        with pytest.raises(SessionOver):
            await inference.complete(ended, say("b"))
        await reward(inference, ended, 1.0)
        await anyio.sleep(20)
        with pytest.raises(SessionOver):
            await reward(inference, ended, 0.5)
        await anyio.sleep(60)
        await inference.complete(live, say("b"))
        record = await inference.record(ended)
        view = await inference.sessions.ask(DescribeSessions())

    assert (True, 1.0) == (record.is_ended, record.interactions[0].reward)
    assert (1, 1) == (view.num_live, view.num_ended)


async def test_forgotten_session_is_not_restored():
    journal = MemoryJournal()
    async with open_inference_stack(journal=journal) as inference:
        session = (await open_durable(inference)).session
        await inference.sessions.tell(ForgetSession(session=session))
    async with open_inference_stack(journal=journal) as inference:
        with pytest.raises(NotFound):
            await inference.sessions.ask(CollectSession(session=session))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("first", "retry"), [(FIRST, RETRY), (NAMED, NAMED)])
async def test_retry_after_a_restart_repeats_a_durable_turn(way: str, first: Attempt, retry: Attempt):
    """Its answer never arrived."""
    journal = MemoryJournal()
    options = {"num_choices": 2}
    async with open_inference_stack(script_answers(encode("x"), encode("y")), journal=journal) as inference:
        session = (await open_durable(inference)).session
        lost = await call(inference, session, way, first, **options)
    async with open_inference_stack(journal=journal) as inference:
        again = await call(inference, session, way, retry, **options)
        known = await turns(inference, session)

    assert [True, True] == [same(one, other) for one, other in zip(lost.answers, again.answers, strict=True)]
    assert 2 == len(known)
    assert [] == inference.engine.requests


@pytest.mark.parametrize("way", WAYS)
async def test_retry_after_a_restart_samples_a_turn_that_was_not_durable(way: str):
    """It has the same random numbers."""
    journal, engine = MemoryJournal(), EchoEngine(lambda _: encode("one"), is_gated=True)
    async with open_inference_stack(journal=journal, engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await open_durable(inference)).session
        tasks.start_soon(Caller(inference, session, way, FIRST))
        await anyio.wait_all_tasks_blocked()
        killed = Killed(journal)
        tasks.cancel_scope.cancel()
    async with open_inference_stack(journal=killed) as inference:
        again = await call(inference, session, way, RETRY)
        (turn,) = await turns(inference, session)

    assert [turn.id] == again.ids
    assert [engine.requests[0].key] == [request.key for request in inference.engine.requests]


async def test_answers_that_were_read_are_not_repeated_after_a_restart():
    journal = MemoryJournal()
    async with open_inference_stack(journal=journal) as inference:
        continued, rewarded = (await open_durable(inference)).session, (await open_durable(inference)).session
        first = await call(inference, continued, "complete", FIRST)
        await inference.complete(continued, (*say("why?"), echo_of(first.answers[0]), *say("so?")))
        other = await call(inference, rewarded, "complete", FIRST)
        await reward(inference, rewarded, 1.0, other.ids[0])
    async with open_inference_stack(journal=journal) as inference:
        again = [await call(inference, session, "complete", RETRY) for session in (continued, rewarded)]

    assert first.ids != again[0].ids
    assert other.ids != again[1].ids


async def test_numbered_retries_are_repeated_for_two_minutes():
    """The clock on the wall counts."""
    journal = MemoryJournal()
    async with open_inference_stack(journal=journal) as inference:
        session = (await open_durable(inference)).session
        first = await call(inference, session, "complete", FIRST)
        named = await call(inference, session, "complete", NAMED)
    await anyio.sleep(121)
    async with open_inference_stack(journal=journal) as inference:
        again = await call(inference, session, "complete", RETRY)
        named_again = await call(inference, session, "complete", NAMED)

    assert first.ids != again.ids
    assert named.ids == named_again.ids
