"""Generations of another process: their tokens come from the replicas, and the router keeps its say over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import pytest
from attrs import evolve
from tests.stacks.direct_stack import open_direct_stack
from tests.stacks.replica_stack import (
    EIGHT,
    START,
    CountingEngine,
    ids_of,
    open_replica_stack,
    reading,
    request,
)

from areal_actors.domain import PauseMode
from areal_actors.errors import ActorError, EngineError, Unavailable
from areal_actors.generation.rerouting import DirectGeneration
from areal_actors.generation.router import RouterConfig
from areal_actors.kernel import Ref
from areal_actors.kernel.remote import Peer
from areal_actors.messages import (
    AddReplica,
    AttemptEnd,
    DescribeEngine,
    Generate,
    Generation,
    HoldPlaces,
    LeavePlace,
    PauseGeneration,
    ReplicaState,
    ReservePlace,
    ResumeGeneration,
)
from areal_actors.run.inference import spawn_generation
from areal_actors_testing.remote import pretend_remote

pytestmark = pytest.mark.anyio


async def test_the_router_does_no_work_for_a_token():
    """A long generation costs it as many messages as a short one; its place is free afterwards."""
    async with open_direct_stack("a", "b") as stack:
        handled = []
        for num_tokens in (1, 8, 800):
            before = stack.far.router.statistics().num_handled
            assert num_tokens == len(ids_of(await stack.near.generate(request(num_tokens))))
            await anyio.wait_all_tasks_blocked()
            handled.append(stack.far.router.statistics().num_handled - before)
        assert 1 == len(set(handled))
        assert {"a": 0, "b": 0} == {name: view.num_running for name, view in (await stack.far.views()).items()}


async def test_places_are_shared_with_the_router_s_own_generations():
    """New sessions go to the least loaded replica, whoever streams; a session stays where it is cached."""
    async with open_direct_stack() as stack:
        for name in ("a", "b"):
            await stack.add(name, CountingEngine(is_gated=True))
        async with (
            reading(stack.near, request(key="x")),
            reading(stack.far, request(key="y")),
            reading(stack.near, request(key="z")),
            reading(stack.near, request(key="y")),
        ):
            views = await stack.far.views()
            assert {"a": 2, "b": 2} == {name: view.num_running for name, view in views.items()}
            keys = [{one.routing_key for one in engine.requests} for engine in stack.far.engines.values()]
            assert [{"x", "z"}, {"y"}] == keys
        await anyio.wait_all_tasks_blocked()
        assert {0} == {view.num_running for view in (await stack.far.views()).values()}


async def test_a_generation_survives_the_end_of_its_replica():
    """Each token comes once, whether the actor, the connection or the reachability of its replica ends."""
    for ending in ("kill", "cut"):
        async with open_direct_stack() as stack:
            first = await stack.add("a", CountingEngine(is_gated=True))
            async with reading(stack.near, request()) as one:
                first.release(3)
                await anyio.wait_all_tasks_blocked()
                assert 3 == len(one.ids)
                await stack.add("b")
                if ending == "kill":
                    await stack.far.kill("a")
                else:
                    stack.unreachable.add("a:0")
                    stack.cut("a")
                await anyio.wait_all_tasks_blocked()
                await anyio.sleep(60)
                assert EIGHT == one.ids


async def test_a_replica_that_only_this_process_cannot_reach_goes_on_serving_others():
    """It is tried last, and after several failures in a row it has to join again."""
    async with open_direct_stack("a", "b") as stack:
        stack.unreachable.add("a:0")
        for _ in range(2):
            assert EIGHT == ids_of(await stack.near.generate())
        assert {"a": ReplicaState.SERVING, "b": ReplicaState.SERVING} == await stack.far.states()
        await stack.far.remove("b")
        with pytest.raises(EngineError, match="a:0 is unreachable: no answer at a:0"):
            await stack.near.generate()
        assert EIGHT == ids_of(await stack.far.generate())


async def test_the_router_moves_a_generation_of_another_process():
    """A replica that is removed is empty when the router says so."""
    async with open_direct_stack() as stack:
        first = await stack.add("a", CountingEngine(is_gated=True))
        async with reading(stack.near, request()) as one:
            first.release(3)
            await anyio.wait_all_tasks_blocked()
            await stack.add("b")
            await stack.far.remove("a")
            assert 0 == first.statistics().running
            await anyio.wait_all_tasks_blocked()
            assert EIGHT == one.ids


async def test_weights_that_are_published_during_a_stream_sample_its_rest():
    """Each token has the version that sampled it; a replica that does not take the weights loses the generation."""
    async with open_direct_stack() as stack:
        first = await stack.add("a", CountingEngine(is_gated=True))
        async with reading(stack.near, request()) as one:
            first.release(3)
            await anyio.wait_all_tasks_blocked()
            await stack.far.publish(1)
            first.release(2)
            await anyio.wait_all_tasks_blocked()
            assert [0, 0, 0, 1, 1] == one.versions
            await stack.add("b")
            first.refuses.add(2)
            await stack.far.publish(2)
            await anyio.wait_all_tasks_blocked()
            assert EIGHT == one.ids
            assert [0, 0, 0, 1, 1, 2, 2, 2] == one.versions
            assert 0 == first.statistics().running


async def test_a_reader_that_leaves_ends_the_generation_in_the_engine():
    """Its place is free at once, and the next generation has the same connection."""
    async with open_direct_stack() as stack:
        engine = await stack.add("a", CountingEngine(is_gated=True))
        for _ in range(2):
            async with stack.near.router.stream(Generate(request=request())) as chunks:
                engine.release(3)
                assert START + 1 == int((await anext(chunks)).token_ids[0])
                assert 1 == (await stack.far.views())["a"].num_running
            await anyio.wait_all_tasks_blocked()
            assert 0 == engine.statistics().running
            assert 0 == (await stack.far.views())["a"].num_running
        assert 1 == stack.num_dialled


async def test_news_of_attempts_at_a_former_replica_are_ignored():
    """No process can take out a replica by its name alone, nor without a place there."""
    async with open_direct_stack("a") as stack:
        router, loads = stack.far.router, stack.far.engines["a"].loaded
        await stack.far.publish(1)
        async with router.stream(HoldPlaces(holder="x")) as moved:
            assert await anext(moved) is None
            for number in (1, 2):
                assert await router.ask(ReservePlace(holder="x", number=number)) is not None
            lost = partial(LeavePlace, end=AttemptEnd.LOST, reason="the engine has gone")
            for holder, number in (("x", 3), ("y", 1)):
                await router.ask(lost(holder=holder, number=number))
            await anyio.wait_all_tasks_blocked()
            assert {"a": 2} == {name: view.num_running for name, view in (await stack.far.views()).items()}
            await router.ask(lost(holder="x", number=1))
            await anyio.sleep(60)
            assert [1, 1] == [snapshot.version for snapshot in loads]
            later = (await stack.add("a", CountingEngine(version=1))).loaded
            await router.ask(lost(holder="x", number=2))
            await anyio.sleep(60)
            assert [1] == [snapshot.version for snapshot in later]
            assert {"a": ReplicaState.SERVING} == await stack.far.states()


async def test_the_places_of_a_process_are_free_when_it_is_gone():
    """So is one that it has left before the answer, and one that it asks for afterwards is not given."""
    async with open_direct_stack() as stack:
        router = stack.far.router
        async with router.stream(HoldPlaces(holder="x")) as moved, anyio.create_task_group() as tasks:
            assert await anext(moved) is None
            tasks.start_soon(router.ask, ReservePlace(holder="x", number=1))
            await anyio.wait_all_tasks_blocked()
            await router.ask(LeavePlace(holder="x", number=1))
            await stack.add("a")
            assert await router.ask(ReservePlace(holder="x", number=2)) is not None
            assert 1 == (await stack.far.views())["a"].num_running
        await anyio.wait_all_tasks_blocked()
        assert 0 == (await stack.far.views())["a"].num_running
        assert await router.ask(ReservePlace(holder="x", number=3)) is None


async def test_an_earlier_incarnation_of_a_replica_is_not_believed():
    """At the address of the replica, a process answers that has not noticed its replacement."""
    async with open_direct_stack("b") as stack:
        stale = await spawn_generation(stack.far.system, CountingEngine(version=3), name="stale")
        await stack.far.publish(4)
        await stack.add("a", CountingEngine(version=4), address="a")
        await stack.far.publish(5)
        current, stack.refs["a"] = stack.refs["a"], stale
        for _ in range(4):
            chunks = await stack.near.generate()
            assert EIGHT == ids_of(chunks)
            assert {5} == {chunk.version for chunk in chunks}
        # The connection to the earlier one is given up, although it works.
        stack.refs["a"] = current
        await stack.far.remove("b")
        assert EIGHT == ids_of(await stack.near.generate())


async def test_weights_and_pauses_go_through_the_router():
    """They hold for whoever streams."""
    async with open_direct_stack("a", "b") as stack:
        assert 2 == await stack.near.publish(2)
        assert 2 == (await stack.near.router.ask(DescribeEngine())).num_engines
        await stack.near.router.ask(PauseGeneration(mode=PauseMode.KEEP))
        async with reading(stack.near, request()) as one:
            await anyio.sleep(5)
            assert [] == one.ids
            await stack.near.router.ask(ResumeGeneration())
            await anyio.wait_all_tasks_blocked()
            assert one.is_whole_under(2)


async def test_without_a_replica_requests_are_refused_in_time():
    """As by the router itself; without an address, a replica serves its own process only."""
    async with open_direct_stack(config=RouterConfig(wait_seconds=7)) as stack:
        began = anyio.current_time()
        with pytest.raises(Unavailable, match="none is known"):
            await stack.near.generate()
        assert 7 == pytest.approx(anyio.current_time() - began)
        await stack.far.add("a")
        with pytest.raises(EngineError, match="Other processes cannot reach replica a"):
            await stack.near.generate()


async def test_a_generation_ends_with_the_connection_to_its_router():
    """Its place is not held any more; the engine is told."""
    async with open_replica_stack() as far:
        engine = CountingEngine(is_gated=True)
        ref = await spawn_generation(far.system, engine, name="replica")
        await far.router.ask(AddReplica(name="a", ref=ref, address="a"))

        def dial(_: str):
            return _peer_of(ref)

        async with pretend_remote({"generation": far.router}) as (peer, _):
            direct = DirectGeneration(peer.ref(Generation, "generation"), dial, actor="replica")
            near = evolve(far, router=await far.system.spawn(direct, name="direct"))
            async with reading(near, request()) as one:
                engine.release(3)
                await anyio.wait_all_tasks_blocked()
                peer.close("the controller is gone")
                await anyio.wait_all_tasks_blocked()
                assert isinstance(one.error, ActorError)
                assert 3 == len(one.ids)
                assert 0 == engine.statistics().running
        with suppress(ActorError):
            await near.router.stop()
        assert 0 == (await far.views())["a"].num_running


@asynccontextmanager
async def _peer_of(ref: Ref[Generation]) -> AsyncIterator[Peer]:
    async with pretend_remote({"replica": ref}) as (peer, _):
        yield peer
