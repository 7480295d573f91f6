"""Every request ends once, whatever becomes of it: who hangs up, what fails, what is left of it in the session."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.callers import Asking, ids, open_waiting, stream_request
from tests.stacks.inference_stack import encode, open_inference_stack, say

from areal_actors.cache import export_trajectories
from areal_actors.cache.export import STYLES
from areal_actors.domain import Credential, InteractionStatus, PauseMode, Untrained, UntrainedReason
from areal_actors.errors import ContextLengthExceeded, EngineError, RenderError, SessionEnded, Unavailable
from areal_actors.messages import EndSession, PauseGeneration
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------------------------------------------- hanging up


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_disconnect_aborts_generation_and_keeps_the_tokens(way: str):
    """The interaction is cancelled, and its session continues."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        asking = Asking()
        tasks.start_soon(lambda: getattr(asking, way)(inference, session))
        await anyio.wait_all_tasks_blocked()
        engine.release(3)
        await anyio.wait_all_tasks_blocked()
        asking.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await inference.record(session)).interactions
        engine.release(99)
        await inference.complete(session, say("again"))

    assert (0, 1) == (engine.statistics().running, engine.statistics().aborted)
    assert InteractionStatus.CANCELLED == turn.status
    assert encode("one two three")[:3] == ids(turn.completion.token_ids)


async def test_disconnect_aborts_all_choices_of_a_stream():
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference:
        session = (await inference.open()).session
        async with inference.sessions.stream(stream_request(session, num_choices=3)) as items:
            await anext(aiter(items))
            await anyio.wait_all_tasks_blocked()
            assert 3 == engine.statistics().waiting

        turns = (await inference.record(session)).interactions

    assert (0, 3) == (engine.statistics().waiting, engine.statistics().aborted)
    assert [InteractionStatus.CANCELLED] * 3 == [turn.status for turn in turns]


# ---------------------------------------------------------------------------------------------------- what fails


async def test_choices_are_recorded_together_or_not_at_all():
    """The client disconnected before all of them were complete."""
    engine = EchoEngine(script_answers(encode("a"), encode("b c d e")), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.complete(inference, session, num_choices=2))
        await anyio.wait_all_tasks_blocked()
        engine.release(5)
        await anyio.wait_all_tasks_blocked()
        asking.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        turns = (await inference.record(session)).interactions

    assert [InteractionStatus.CANCELLED] * 2 == [turn.status for turn in turns]


async def test_prompt_that_does_not_fit_is_refused_without_a_trace():
    """The error has the numbers."""
    async with open_inference_stack(engine=EchoEngine(context_length=12)) as inference:
        session = (await inference.open()).session
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 12 tokens"):
            await inference.complete(session, say("a question of many words"))
        record = await inference.record(session)

    assert () == record.interactions
    assert [] == inference.engine.requests


async def test_answer_of_a_session_that_ended_meanwhile_is_refused():
    """The interaction failed."""
    async with open_waiting() as (inference, session, asking):
        await inference.sessions.ask(EndSession(credential=Credential(session=session, has_control=True)))
        inference.engine.release(99)
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await inference.record(session)).interactions

    assert isinstance(asking.error, SessionEnded)
    assert InteractionStatus.FAILED == turn.status
    assert "ended while" in turn.failure


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_failing_engine_fails_the_request_only(way: str):
    """The interaction has the reason."""
    engine = EchoEngine(lambda _: encode("never"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        asking = Asking()
        tasks.start_soon(lambda: getattr(asking, way)(inference, session))
        await anyio.wait_all_tasks_blocked()
        engine.fail(RuntimeError("out of memory"))
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await inference.record(session)).interactions

    assert isinstance(asking.error, EngineError)
    assert "out of memory" in str(asking.error)
    assert InteractionStatus.FAILED == turn.status
    assert "out of memory" in turn.failure


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_tokens_before_a_failure_are_kept_and_not_trained(way: str):
    engine = EchoEngine(lambda _: encode("never"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        tasks.start_soon(lambda: getattr(Asking(), way)(inference, session))
        await anyio.wait_all_tasks_blocked()
        engine.release(2)
        await anyio.wait_all_tasks_blocked()
        engine.fail(RuntimeError("out of memory"))
        await anyio.wait_all_tasks_blocked()
        record = await inference.record(session)
    (turn,) = record.interactions

    assert InteractionStatus.FAILED == turn.status
    assert encode("never")[:2] == ids(turn.completion.token_ids)
    for style in STYLES:
        exported = export_trajectories(record, discount=1.0, style=style)
        assert () == exported.trajectories
        assert (Untrained(interaction=turn.id, num_tokens=2, reason=UntrainedReason.FAILED),) == exported.untrained


async def test_stopped_generation_actor_makes_requests_unavailable():
    async with open_inference_stack() as inference:
        session = (await inference.open()).session
        await inference.generation.stop()
        with pytest.raises(Unavailable, match="engine is gone"):
            await inference.complete(session, say("anybody?"))
        (turn,) = (await inference.record(session)).interactions

    assert InteractionStatus.FAILED == turn.status


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_aborted_generation_is_unavailable(way: str):
    """Clients repeat a 503."""
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        asking = Asking()
        tasks.start_soon(lambda: getattr(asking, way)(inference, session))
        await anyio.wait_all_tasks_blocked()
        engine.release(2)
        await anyio.wait_all_tasks_blocked()
        await inference.generation.ask(PauseGeneration(mode=PauseMode.ABORT))
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await inference.record(session)).interactions

    assert isinstance(asking.error, Unavailable)
    assert InteractionStatus.FAILED == turn.status


async def test_messages_that_the_template_refuses_leave_no_trace():
    async with open_inference_stack() as inference:
        session = (await inference.open()).session
        with pytest.raises(RenderError):
            await inference.complete(session, ())
        record = await inference.record(session)

    assert () == record.interactions
