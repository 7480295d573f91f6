"""Retries, as the session manager answers them: one turn for one request, however often it is sent."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.callers import FIRST, NAMED, RETRY, WAYS, Caller, call, same, turns
from tests.stacks.inference_stack import encode, open_inference_stack, renderer, say

from areal_actors.direct.in_process import InlineRef
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Attempt,
    CompletionRequest,
    Credential,
    InteractionStatus,
    Sampling,
    Tool,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from areal_actors.errors import EngineError, IdempotencyMismatch, SessionEnded
from areal_actors.generation.actor import GenerationActor
from areal_actors.messages import CollectSession, Complete, EndSession, NoteRefusal, OpenSession, SetReward
from areal_actors.sessions.manager import SessionManager
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("first_way", WAYS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_retry_of_an_answered_request_repeats_it(first_way: str, way: str, num_choices: int):
    """The same interactions and tokens, no work of the engine, in whichever way it comes back."""
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
                    interaction=answer.interaction, num_prompt_tokens=answer.usage.prompt_tokens, choice=choice
                )
                == start
            )
            assert answer.message.content == "".join(delta.text for delta in deltas)


async def test_a_repeated_stream_has_the_same_tool_calls():
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
async def test_a_retry_joins_what_is_being_answered(first_way: str, way: str, num_choices: int):
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
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("num_before", [0, 1, 2])
async def test_the_generation_goes_on_while_somebody_waits(first_way: str, way: str, num_choices: int, num_before: int):
    """The first caller hangs up after any number of tokens: who joined gets all of them, and nothing is aborted."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        sendings = (FIRST, RETRY)
        first = Caller(inference, session, first_way, sendings[0], num_choices=num_choices)
        again = Caller(inference, session, way, sendings[1], num_choices=num_choices)
        for caller in (first, again):
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        engine.release(num_before)
        await anyio.wait_all_tasks_blocked()
        first.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        known = await turns(inference, session)

    assert [turn.id for turn in known] == again.ids
    assert {InteractionStatus.COMPLETED} == {turn.status for turn in known}
    assert all(encode("one two three") == turn.completion.token_ids.tolist() for turn in known)
    assert (num_choices, 0) == (len(engine.requests), engine.statistics().aborted)


@pytest.mark.parametrize("first_way", WAYS)
@pytest.mark.parametrize("order", ["first leaves first", "first leaves last"])
async def test_the_last_one_who_leaves_aborts(first_way: str, order: str):
    """Two callers, both hang up: the engine is rid of the request then, and not before."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        sendings = (FIRST, RETRY)
        ways = zip((first_way, "complete"), sendings, strict=True)
        callers = [Caller(inference, session, way, attempt) for way, attempt in ways]
        for caller in callers:
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        engine.release(2)
        await anyio.wait_all_tasks_blocked()
        aborted = []
        for caller in callers if order == "first leaves first" else reversed(callers):
            caller.scope.cancel()
            await anyio.wait_all_tasks_blocked()
            aborted.append(engine.statistics().aborted)
        (turn,) = await turns(inference, session)

    assert [0, 1] == aborted
    assert InteractionStatus.CANCELLED == turn.status
    assert encode("one two three")[:2] == turn.completion.token_ids.tolist()


@pytest.mark.parametrize("way", WAYS)
async def test_a_retry_of_what_was_cut_samples_anew(way: str):
    """The cancelled interaction stays as it is, beside a second one with the same random numbers.

    So a lost connection does not change what a run samples, and long answers, which are cut more often, are not
    replaced by others.
    """
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


async def test_who_joined_a_request_that_fails_is_told_by_an_attempt_of_its_own():
    """The failure of the first is not an answer: the retry samples, and meets the dead engine itself."""
    engine = EchoEngine(lambda _: encode("never"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        callers = [Caller(inference, session, "complete", attempt) for attempt in (NAMED, NAMED, NAMED)]
        for caller in callers:
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        engine.fail(RuntimeError("out of memory"))

    assert all(isinstance(caller.error, EngineError) for caller in callers)


async def test_an_adopted_request_that_fails_does_no_harm():
    """The session manager lives on, and who joined is told."""
    engine = EchoEngine(lambda _: encode("never"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        first, again = (Caller(inference, session, "complete", NAMED) for _ in range(2))
        for caller in (first, again):
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
        first.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        engine.fail(RuntimeError("out of memory"))
        await anyio.wait_all_tasks_blocked()
        known = await turns(inference, session)

    assert isinstance(again.error, EngineError)
    assert [InteractionStatus.FAILED] * 2 == [turn.status for turn in known]


async def test_a_session_that_ends_while_somebody_joined_refuses_both():
    """Its answer comes too late for everybody."""
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


async def test_the_retry_of_a_refused_request_is_not_given_an_equal_ones_answer():
    """Of two equal requests in parallel a quota refused one; its retry looks as if it were the other's."""
    engine = EchoEngine(lambda _: encode("one"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        pending = Caller(inference, session, "complete", FIRST)
        tasks.start_soon(pending)
        await anyio.wait_all_tasks_blocked()
        credential = Credential(session=session, is_capability=True)
        await inference.sessions.tell(NoteRefusal(credential=credential, attempt=FIRST))
        again = Caller(inference, session, "complete", RETRY)
        tasks.start_soon(again)
        await anyio.wait_all_tasks_blocked()
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        known = await turns(inference, session)

    assert [turn.id for turn in known] == [*pending.ids, *again.ids]
    assert 2 == len({request.key for request in engine.requests})


async def test_parallel_equal_calls_stay_siblings():
    """Twenty at once, all first sendings: twenty turns."""
    async with open_inference_stack() as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        callers = [Caller(inference, session, WAYS[index % 2], FIRST) for index in range(20)]
        for caller in callers:
            tasks.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        known = await turns(inference, session)

    assert {turn.id for turn in known} == {name for caller in callers for name in caller.ids}
    assert 20 == len(known)


async def test_an_answer_that_was_continued_or_rewarded_has_been_read():
    """A retry then belongs to a call that never arrived, and is sampled."""
    async with open_inference_stack(
        script_answers(encode("a"), encode("b"), encode("c"), encode("d"), encode("e"))
    ) as inference:
        session = (await inference.open()).session
        (rewarded,) = (await call(inference, session, "complete", FIRST)).answers
        (continued,) = (await call(inference, session, "complete", FIRST)).answers
        reward = SetReward(
            credential=Credential(session=session, has_control=True), reward=1.0, interaction=rewarded.interaction
        )
        await inference.sessions.ask(reward)
        await inference.complete(session, (*say("why?", continued.message.content), *say("really?")))
        again = await call(inference, session, "complete", RETRY)
        known = await turns(inference, session)

    assert 4 == len(known)
    assert [known[-1].id] == again.ids


async def test_a_key_names_a_request():
    """Sent twice with one key, it is answered once; another body under that key is refused, in another session not."""
    async with open_inference_stack() as inference:
        session, other = (await inference.open()).session, (await inference.open()).session
        first = await call(inference, session, "complete", NAMED)
        again = await call(inference, session, "stream", NAMED)
        wrong = await call(inference, session, "complete", Attempt(fingerprint="g", idempotency_key="k"))
        elsewhere = await call(inference, other, "complete", Attempt(fingerprint="g", idempotency_key="k"))

    assert first.ids == again.ids != elsewhere.ids
    assert isinstance(wrong.error, IdempotencyMismatch)
    assert 422 == wrong.error.status


async def test_without_tasks_of_its_own_nothing_is_adopted():
    """A session manager that is not an actor aborts what its first caller leaves; who joined samples anew."""
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    generation = InlineRef(GenerationActor(engine), name="generation")
    manager = SessionManager(renderer=renderer(), generation=generation)
    await manager.learn_engine()
    sessions = InlineRef(manager, name="sessions")
    session = manager.open_session(OpenSession(task="t")).session
    answers: list[Answer] = []

    async def ask(attempt: Attempt, scope: anyio.CancelScope) -> None:
        request = CompletionRequest(messages=say("why?"), sampling=Sampling(max_new_tokens=64))
        with scope:
            answers.extend(
                await sessions.ask(Complete(credential=Credential(session=session), request=request, attempt=attempt))
            )

    first = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, FIRST, first)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(ask, RETRY, anyio.CancelScope())
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        engine.release(99)
    known = (await sessions.ask(CollectSession(session=session))).interactions

    assert [InteractionStatus.CANCELLED, InteractionStatus.COMPLETED] == [turn.status for turn in known]
    assert [known[1].id] == [answer.interaction for answer in answers]
