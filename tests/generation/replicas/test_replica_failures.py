"""Generations survive their replica, with the same tokens, and fail only where every replica would fail them."""

from __future__ import annotations

import anyio
import pytest
from attrs import evolve
from tests.stacks.inference_stack import renderer, say
from tests.stacks.replica_stack import (
    EIGHT,
    START,
    CountingEngine,
    ids_of,
    open_replica_stack,
    reading,
    request,
    whereabouts,
)

from areal_actors.domain import Answer, CompletionRequest, Credential, Exactly, FinishReason, Sampling
from areal_actors.errors import CaptureViolation, EngineError, InvalidRequest, Unavailable
from areal_actors.generation.actor import GenerationActor
from areal_actors.generation.replicas import ReplicaSetConfig
from areal_actors.kernel import Restart
from areal_actors.messages import AddReplica, Complete, OpenSession, PauseGeneration
from areal_actors.rollouts.capacity import CapacityGranter
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState
from areal_actors.sessions.manager import SessionManager

pytestmark = pytest.mark.anyio


async def test_generation_survives_its_replica():
    """It goes on elsewhere with the ids that were sampled: one answer, no token lost or twice."""
    async with open_replica_stack() as stack:
        first = await stack.add("a", CountingEngine(is_gated=True))
        async with reading(stack, request(8, key="s")) as one:
            first.release(3)
            await anyio.wait_all_tasks_blocked()
            second = await stack.add("b", CountingEngine())
            await stack.kill("a")
            await anyio.wait_all_tasks_blocked()
        rest = second.requests[0]

    assert EIGHT == one.ids
    assert FinishReason.LENGTH is one.chunks[-1].finish
    assert [1, START, START + 1, START + 2, START + 3] == rest.prompt.tolist()
    assert 5 == rest.sampling.max_new_tokens
    assert rest.id != first.requests[0].id
    assert rest.key == evolve(first.requests[0].key, num_drawn=3)
    assert [chunk.finish for chunk in one.chunks[:-1]] == [None] * (len(one.chunks) - 1)


async def test_session_moves_once():
    """To where its generation went on; it stays there when the old replica comes back."""
    async with open_replica_stack("a", "b") as stack:
        await stack.generate(request(key="s"))
        await stack.kill("a")
        await stack.generate(request(key="s"))
        await stack.add("a")
        await stack.generate(request(key="s"))

    assert {"a": 0, "b": 2} == whereabouts(stack)


@pytest.mark.parametrize(
    ("num_tokens", "options", "finish"),
    [(3, {}, FinishReason.LENGTH), (8, {"stop_token_ids": (START + 3,)}, FinishReason.STOP)],
)
async def test_finish_is_reported_although_replica_died_before_it(num_tokens, options, finish):
    """When all tokens are known, no other replica is asked."""

    class Mute(CountingEngine):
        def _find_finish(self, generation, token_id):
            return None

    async with open_replica_stack() as stack:
        engine = await stack.add("a", Mute(is_gated=True))
        async with reading(stack, request(num_tokens, **options)) as one:
            engine.release(3)
            await anyio.wait_all_tasks_blocked()
            await stack.kill("a")

    assert EIGHT[:3] == one.ids
    assert finish is one.chunks[-1].finish
    assert one.error is None


async def test_generation_that_fails_everywhere_fails():
    """After as many replicas as are allowed, with the last reason; each was asked once."""
    async with open_replica_stack("a", "b", "c", "d") as stack:
        for engine in stack.engines.values():
            engine.fail(RuntimeError("no memory"))
        with pytest.raises(EngineError, match=r"failed 3 times in a row.*at a, b, c.*no memory"):
            await stack.generate()
        states = stack.states()

    assert {"serving"} == set(states.values())


async def test_failing_engine_is_taken_out_after_several_failures():
    """One failure is the generation's, many in a row are the engine's; others are not disturbed."""
    async with open_replica_stack("a", "b", config=ReplicaSetConfig(max_failures=2)) as stack:
        stack.engines["a"].fail(RuntimeError("broken"))
        answers = [ids_of(await stack.generate(request(key=str(number)))) for number in range(8)]
        views = stack.views()

    assert [EIGHT] * 8 == answers
    assert "broken" in (views["a"].error or "")
    assert "serving" == views["b"].state


@pytest.mark.parametrize("refusal", [InvalidRequest("no", param="id"), CaptureViolation("no")])
async def test_error_of_the_request_is_not_retried(refusal: Exception):
    """Another replica would say the same."""

    class Refusing(CountingEngine):
        def generate(self, request):
            self.requests.append(request)
            raise refusal

    async with open_replica_stack() as stack:
        for name in ("a", "b"):
            await stack.add(name, Refusing())
        with pytest.raises(type(refusal)):
            await stack.generate()

    assert 1 == sum(whereabouts(stack).values())


async def test_constrained_generation_moves_only_before_it_began():
    """An engine begins a grammar at its beginning; the client is told to ask again."""
    async with open_replica_stack() as stack:
        first = await stack.add("a", CountingEngine(is_gated=True, has_grammars=True))
        grammar = Exactly(text="yes")
        async with reading(stack, request(grammar=grammar)) as begun:
            first.release(1)
            await anyio.wait_all_tasks_blocked()
            async with reading(stack, request(grammar=grammar)) as fresh:
                await stack.add("b", CountingEngine(has_grammars=True))
                await stack.kill("a")
                await anyio.wait_all_tasks_blocked()

    assert isinstance(begun.error, Unavailable)
    assert EIGHT == fresh.ids


async def test_leaving_the_stream_aborts_at_the_replica():
    """As with one engine."""
    async with open_replica_stack() as stack:
        engine = await stack.add("a", CountingEngine(is_gated=True))
        async with reading(stack, request()):
            engine.release(2)
        views = stack.views()

    assert (0, 1) == (len(views["a"].attempts), engine.statistics().aborted)


async def test_deadline_of_the_asker_is_not_a_failure_of_the_replica():
    """Nothing is moved for it."""
    async with open_replica_stack() as stack:
        await stack.add("a", CountingEngine(is_gated=True))
        await stack.add("b", CountingEngine(is_gated=True))
        with anyio.move_on_after(5) as scope:
            await stack.generate()
        with pytest.raises(TimeoutError), anyio.fail_after(5):
            await stack.generate()

    assert scope.cancelled_caught
    assert {"a": 1, "b": 1} == whereabouts(stack)


async def test_restarted_replica_gets_weights_again():
    """Its actor begins a new life behind the same ref, with the weights that it was made with."""
    async with open_replica_stack() as stack:
        made: list[CountingEngine] = []

        def create() -> GenerationActor:
            made.append(CountingEngine(is_gated=not made))
            return GenerationActor(made[-1])

        ref = await stack.system.spawn(create, name="a", supervision=Restart())
        await stack.router.ask(AddReplica(name="a", ref=ref))
        await anyio.wait_all_tasks_blocked()
        await stack.publish(4)
        async with reading(stack, request()) as one:
            made[0].release(2)
            await anyio.wait_all_tasks_blocked()
            made[0].fail(RuntimeError("gone"))
            with pytest.raises(EngineError):
                await ref.ask(PauseGeneration())
            await ref.tell(PauseGeneration())  # what is told and fails crashes the actor
            await anyio.sleep(60)

    assert EIGHT == one.ids
    assert [4] == [snapshot.version for snapshot in made[1].loaded]


async def test_session_stores_one_answer_of_two_replicas():
    """Its completion has the tokens of both, and says which weights sampled which."""
    async with open_replica_stack() as stack:
        first = await stack.add("a", CountingEngine(is_gated=True))
        capacity = await stack.system.spawn(
            CapacityGranter(CapacityState(limits=CapacityLimits(max_concurrent=4, batch_size=4)))
        )
        manager = SessionManager(renderer=renderer(), generation=stack.router, capacity=capacity)
        sessions = await stack.system.spawn(manager)
        session = (await sessions.ask(OpenSession(task="t"))).session
        asked = CompletionRequest(messages=say("what?"), sampling=Sampling(max_new_tokens=5))
        answers: list[Answer] = []

        async def complete() -> None:
            answers.extend(await sessions.ask(Complete(credential=Credential(session=session), request=asked)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(complete)
            await anyio.wait_all_tasks_blocked()
            first.release(2)
            await anyio.wait_all_tasks_blocked()
            await stack.add("b")
            first.refuses.add(1)
            await stack.publish(1)
        completion, last = answers[0].completion, int(first.requests[0].prompt[-1])

    assert [last + 1 + number for number in range(5)] == completion.token_ids.tolist()
    assert [0, 0, 1, 1, 1] == completion.versions.tolist()
    assert 5 == answers[0].usage.completion_tokens
