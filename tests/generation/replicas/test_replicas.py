"""The replica set: sessions stay at their replica, a pause holds for all, and replicas come and go."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.replica_stack import EIGHT, CountingEngine, ids_of, open_replica_stack, reading, request, whereabouts

from areal_actors.domain import PauseMode
from areal_actors.errors import Unavailable
from areal_actors.generation.replicas import ReplicaSetConfig
from areal_actors.messages import AddReplica, DescribeEngine, Generation, PauseGeneration, ResumeGeneration
from areal_actors.run.inference import spawn_generation
from areal_actors_testing.remote import pretend_remote

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------------------------------------ choosing


async def test_session_stays_at_its_replica_and_new_ones_are_spread():
    """Each routing key goes to one engine; keys are dealt out evenly."""
    async with open_replica_stack("a", "b", "c") as stack:
        for _ in range(3):
            for key in ("x", "y", "z"):
                await stack.generate(request(key=key))
    keys = [{asked.routing_key for asked in engine.requests} for engine in stack.engines.values()]

    assert [1, 1, 1] == [len(seen) for seen in keys]
    assert {"x", "y", "z"} == set.union(*keys)
    assert {"a": 3, "b": 3, "c": 3} == whereabouts(stack)


async def test_new_session_goes_to_least_loaded_replica():
    """By the share of places that are taken."""
    async with open_replica_stack() as stack:
        await stack.add("busy", CountingEngine(is_gated=True))
        async with reading(stack, request()), reading(stack, request()):
            await stack.add("idle", CountingEngine(is_gated=True))
            async with reading(stack, request()), reading(stack, request()):
                assert {"busy": 2, "idle": 2} == whereabouts(stack)


async def test_requests_wait_for_first_replica():
    """They are not refused meanwhile."""
    async with open_replica_stack() as stack, reading(stack, request()) as one:
        assert not one.is_over
        await stack.add("a")
        await anyio.wait_all_tasks_blocked()

        assert EIGHT == one.ids


async def test_requests_without_a_replica_are_refused_in_time():
    """With 503 and a hint, which clients repeat; the deadline of the asker comes first if it is earlier."""
    async with open_replica_stack(config=ReplicaSetConfig(wait_seconds=7)) as stack:
        began = anyio.current_time()
        with pytest.raises(Unavailable, match="none is known") as refusal:
            await stack.generate()
        waited = anyio.current_time() - began
        with anyio.move_on_after(3) as scope:
            await stack.generate()

    assert (7, 503, 1.0) == (pytest.approx(waited), refusal.value.status, refusal.value.retry_after_seconds)
    assert scope.cancelled_caught


# -------------------------------------------------------------------------------------------------------- pauses


async def test_pause_holds_for_all_replicas_and_for_those_that_join():
    """Nothing is sampled until the end of the pause, wherever it would be."""
    async with open_replica_stack("a") as stack:
        await stack.router.ask(PauseGeneration())
        await stack.add("b")
        async with reading(stack, request()) as first, reading(stack, request()) as second:
            await stack.kill("a")
            await anyio.sleep(5)
            assert [] == first.ids == second.ids
            await stack.router.ask(ResumeGeneration())
            await anyio.wait_all_tasks_blocked()

    assert EIGHT == first.ids == second.ids


async def test_replica_that_was_paused_before_resumes_when_it_joins():
    """A pause of an earlier replica set does not hold any more."""
    engine = CountingEngine()
    await engine.pause(PauseMode.KEEP)
    async with open_replica_stack() as stack:
        await stack.add("a", engine)

        assert EIGHT == ids_of(await stack.generate())


# ---------------------------------------------------------------------------------------------- coming and going


async def test_generations_of_replaced_replica_continue():
    """They move to the replica that replaces it."""
    async with open_replica_stack() as stack:
        first = await stack.add("a", CountingEngine(is_gated=True))
        async with reading(stack, request()) as one:
            first.release(3)
            await anyio.wait_all_tasks_blocked()
            await stack.add("a")
            await anyio.wait_all_tasks_blocked()

            assert {"a": "serving"} == stack.states()
    assert EIGHT == one.ids
    assert 1 == first.statistics().aborted


async def test_added_replica_replaces_one_of_the_same_name():
    """The end of the old one does not affect the new one."""
    async with open_replica_stack("a") as stack:
        former = stack.refs["a"]
        await stack.add("a")
        await former.stop(grace=0)
        await anyio.wait_all_tasks_blocked()

        assert {"a": "serving"} == stack.states()
        assert EIGHT == ids_of(await stack.generate())


async def test_counters_are_sums_that_never_decrease():
    """Dead replicas have sampled what they sampled; those that come back begin at zero."""
    async with open_replica_stack("a", "b") as stack:
        for number in range(4):
            await stack.generate(request(key=str(number)))
        before = await stack.router.ask(DescribeEngine())
        await stack.kill("a")
        without = await stack.router.ask(DescribeEngine())
        await stack.add("a")
        for number in range(4):
            await stack.generate(request(key=f"again {number}"))
        after = await stack.router.ask(DescribeEngine())

    assert [32, 32, 64] == [view.statistics.sampled_tokens for view in (before, without, after)]
    assert [2048, 1024, 2048] == [view.info.max_concurrent for view in (before, without, after)]


async def test_describe_waits_for_first_replica():
    """Sessions ask for them before anything else."""
    async with open_replica_stack(config=ReplicaSetConfig(wait_seconds=9)) as stack:
        with pytest.raises(Unavailable):
            await stack.router.ask(DescribeEngine())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stack.add, "a")
            view = await stack.router.ask(DescribeEngine())

    assert "echo" == view.info.name


async def test_remote_replica_serves_and_its_loss_is_noticed():
    """Behind a connection: generations, weights and pauses pass, and its loss is noticed."""
    async with open_replica_stack() as stack:
        engine = CountingEngine(is_gated=True)
        far = await spawn_generation(stack.system, engine, name="far")
        async with pretend_remote({"generation": far}) as (peer, _):
            await stack.router.ask(AddReplica(name="a", ref=peer.ref(Generation, "generation")))
            await stack.publish(1)
            async with reading(stack, request()) as one:
                engine.release(3)
                await anyio.wait_all_tasks_blocked()
                peer.close()
                await anyio.wait_all_tasks_blocked()
                assert {"a": "gone"} == stack.states()
                await stack.add("b")
                await anyio.wait_all_tasks_blocked()

    assert one.is_whole_under(1)


async def test_replicas_outlive_their_set():
    """They belong to their creator, and are not watched any longer."""
    async with open_replica_stack("a") as stack:
        await stack.router.stop()
        view = await stack.refs["a"].ask(DescribeEngine())
        await stack.kill("a")

    assert 0 == view.version
