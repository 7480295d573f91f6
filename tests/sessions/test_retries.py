"""Retries at the session manager: one turn for one request."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.callers import FIRST, NAMED, RETRY, WAYS, Caller, call, same, turns
from tests.stacks.inference_stack import encode, open_inference_stack

from areal_actors.domain import (
    AnswerStarted,
    Credential,
    InteractionStatus,
    Tool,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from areal_actors.errors import EngineError, SessionEnded
from areal_actors.messages import EndSession
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("first_way", WAYS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_retry_of_an_answered_request_repeats_the_answer(first_way: str, way: str, num_choices: int):
    """It has the same interactions and tokens, streamed or not, without the engine."""
    async with open_inference_stack(script_answers(encode("one two"), encode("three"), encode("no"))) as inference:
        session = (await inference.open()).session
        first = await call(inference, session, first_way, FIRST, num_choices=num_choices)
        again = await call(inference, session, way, RETRY, num_choices=num_choices)
        known = await turns(inference, session)

    assert all(same(one, other) for one, other in zip(first.answers, again.answers, strict=True))
    assert num_choices == len(known) == len(inference.engine.requests)
    assert {False} == {answer.is_repeated for answer in first.answers}
    assert {True} == {answer.is_repeated for answer in again.answers}
    if way == "stream":
        for choice, answer in enumerate(again.answers):
            said = [item for item in again.heard if getattr(item, "choice", None) == choice]
            start, *deltas = said
            assert (
                AnswerStarted(
                    interaction=answer.interaction,
                    num_prompt_tokens=answer.usage.prompt_tokens,
                    choice=choice,
                    temperature=1.0,
                )
                == start
            )
            assert answer.message.content == "".join(delta.text for delta in deltas)


async def test_repeated_stream_has_the_same_tool_calls():
    """Thinking and calls come as deltas too, under the ids that the first answer gave them."""
    answer = '<think>\nhm\n</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with open_inference_stack(lambda _: encode(answer)) as inference:
        session = (await inference.open()).session
        first = await call(inference, session, "complete", FIRST, tools=(Tool(name="add"),))
        again = await call(inference, session, "stream", RETRY, tools=(Tool(name="add"),))
    (made,) = first.answers[0].message.tool_calls

    assert ToolCallStarted(index=0, id=made.id, name="add") in again.heard
    assert ToolArgumentsDelta(index=0, text=made.arguments) in again.heard


@pytest.mark.parametrize("first_way", WAYS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_retry_joins_a_pending_request(first_way: str, way: str, num_choices: int):
    """Both callers get the same answers, sampled once."""
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        first = Caller(inference, session, first_way, FIRST, num_choices=num_choices)
        again = Caller(inference, session, way, RETRY, num_choices=num_choices)
        for caller in (first, again):
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        known = await turns(inference, session)

    assert first.ids == again.ids == [turn.id for turn in known]
    assert num_choices == len(engine.requests)


@pytest.mark.parametrize("first_way", WAYS)
@pytest.mark.parametrize("attempts", [(FIRST, RETRY), (NAMED, NAMED, NAMED)], ids=["numbered", "named"])
async def test_joined_retries_sample_again_once_when_the_first_caller_leaves(first_way: str, attempts: tuple):
    """The first turn is aborted; the retry uses the same random numbers, and further retries join it."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        first, *others = [Caller(inference, session, first_way, attempt) for attempt in attempts]
        for caller in (first, *others):
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        engine.release(1)
        await anyio.wait_all_tasks_blocked()
        first.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        known = await turns(inference, session)

    assert [turn.status for turn in known] == [InteractionStatus.CANCELLED, InteractionStatus.COMPLETED]
    assert [caller.ids for caller in others] == [[known[1].id]] * len(others)
    assert len({request.key for request in engine.requests}) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_retry_of_a_cancelled_request_samples_with_the_same_key(way: str):
    """A lost connection does not change what a run samples. The cancelled interaction stays."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        first = Caller(inference, session, way, FIRST)
        tasks.start_soon(first)
        await anyio.wait_all_tasks_blocked()
        first.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        engine.release(99)
        again = await call(inference, session, way, RETRY)
        known = await turns(inference, session)

    assert [InteractionStatus.CANCELLED, InteractionStatus.COMPLETED] == [turn.status for turn in known]
    assert again.ids == [known[1].id]
    assert 2 == len(engine.requests)
    assert 1 == len({request.key for request in engine.requests})


async def test_joined_retries_of_a_failed_request_raise_its_error():
    """Each of them samples again and meets the failed engine."""
    engine = EchoEngine(lambda _: encode("never"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        callers = [Caller(inference, session, "complete", attempt) for attempt in (NAMED, NAMED, NAMED)]
        for caller in callers:
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        engine.fail(RuntimeError("out of memory"))

    assert all(isinstance(caller.error, EngineError) for caller in callers)


async def test_end_of_the_session_refuses_a_pending_request_and_its_retry():
    """The answer comes too late for both."""
    engine = EchoEngine(lambda _: encode("late"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        callers = [Caller(inference, session, "complete", attempt) for attempt in (FIRST, RETRY)]
        for caller in callers:
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        await inference.sessions.ask(EndSession(credential=Credential(session=session, has_control=True)))
        engine.release(99)

    assert all(isinstance(caller.error, SessionEnded) for caller in callers)
