"""Weights that are published hold for all replicas, whenever they join, and versions never go back."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tests.stacks.replica_stack import EIGHT, CountingEngine, open_replica_stack, reading, request

from areal_actors.domain import Snapshot
from areal_actors.errors import EngineError, ModelError
from areal_actors.generation.replicas import ReplicaSetConfig
from areal_actors.messages import DescribeEngine, PublishWeights

pytestmark = pytest.mark.anyio


async def test_all_replicas_load_published_weights():
    """At once, and the reply comes when all have it."""
    async with open_replica_stack("a", "b") as stack:
        replied = await stack.publish(3)
        view = await stack.router.ask(DescribeEngine())

    assert (3, 3) == (replied, view.version)
    assert [[3], [3]] == [[one.version for one in engine.loaded] for engine in stack.engines.values()]


async def test_late_replica_gets_weights_before_requests():
    """And no token comes from those that it was made with."""
    async with open_replica_stack("a") as stack:
        await stack.publish(1)
        await stack.publish(2)
        late = CountingEngine()
        late.gate = anyio.Event()
        await stack.add("b", late)
        await stack.kill("a")
        async with reading(stack, request()) as one:
            assert 0 == len(late.requests)
            late.gate.set()
            await anyio.sleep(5)

    assert [2] == [snapshot.version for snapshot in late.loaded]
    assert {2} == set(one.versions)


async def test_late_replica_loads_weights_on_disk():
    """Unlike what is lent, they are there until the next publication, which does not wait for replicas."""
    async with open_replica_stack() as stack:
        await stack.router.ask(PublishWeights(snapshot=Snapshot(version=1, path=Path("published"))))
        late = await stack.add("b")
        await anyio.sleep(5)
        states = stack.states()

    assert [Snapshot(version=1, path=Path("published"))] == late.loaded
    assert {"b": "serving"} == states


async def test_replica_that_hangs_during_a_load_does_not_hold_the_others():
    """It is left out within 10 s, its generation goes on elsewhere, and it comes back with the weights once it can."""
    async with open_replica_stack("a") as stack:
        hanging = await stack.add("b", CountingEngine(is_gated=True))
        await stack.kill("a")
        async with reading(stack, request()) as one:
            other = await stack.add("a")
            hanging.gate = anyio.Event()
            with anyio.fail_after(10):
                await stack.publish(1)
                while not one.versions:  # noqa: ASYNC110 - virtual time
                    await anyio.sleep(0.1)
            states = stack.states()
        hanging.gate.set()
        await anyio.sleep(60)
        later = stack.states()

    assert {"a": "serving", "b": "joining"} == states
    assert {"a": "serving", "b": "serving"} == later
    assert ([1], {1}) == ([snapshot.version for snapshot in other.loaded], {one.version for one in hanging.loaded})
    assert (EIGHT, {1}) == (one.ids, set(one.versions))


async def test_replica_that_cannot_load_is_out_until_it_can():
    """Its generations go on elsewhere under the new weights; it comes back by itself."""
    async with open_replica_stack() as stack:
        failing = await stack.add("a", CountingEngine(is_gated=True))
        async with reading(stack, request()) as one:
            failing.release(2)
            await anyio.wait_all_tasks_blocked()
            await stack.add("b")
            failing.refuses.add(1)
            await stack.publish(1)
            out = stack.states()
            await anyio.wait_all_tasks_blocked()
            failing.refuses.clear()
            await anyio.sleep(60)
            back = stack.states()

    assert {"a": "joining", "b": "serving"} == out
    assert {"a": "serving", "b": "serving"} == back
    assert EIGHT == one.ids
    assert [0, 0, *[1] * 6] == one.versions


async def test_generation_never_continues_with_older_weights():
    """Where the publication has not come to all yet, it waits for one that has them."""
    async with open_replica_stack() as stack:
        first = await stack.add("a", CountingEngine(is_gated=True))
        async with reading(stack, request()) as one, anyio.create_task_group() as tasks:
            second = await stack.add("b")
            second.gate = anyio.Event()
            tasks.start_soon(stack.publish, 1)
            await anyio.wait_all_tasks_blocked()
            first.release(2)
            await anyio.wait_all_tasks_blocked()
            await stack.kill("a")
            await anyio.sleep(5)
            assert [1, 1] == one.versions
            second.gate.set()

    assert one.is_whole_under(1)


async def test_weights_that_no_replica_can_load_are_refused():
    """As with one engine that keeps its weights."""
    async with open_replica_stack("a", "b") as stack:
        await stack.publish(1)
        for engine in stack.engines.values():
            engine.refuses.add(2)
        with pytest.raises(EngineError, match=r"No replica could load version 2.*does not fit.*Version 1 is kept"):
            await stack.publish(2)
        chunks = await stack.generate()

    assert {1} == {chunk.version for chunk in chunks}


async def test_load_that_does_not_end_is_given_up():
    """The others serve the new weights meanwhile."""
    async with open_replica_stack("a", "b", config=ReplicaSetConfig(load_seconds=30, straggler_seconds=600)) as stack:
        stack.engines["a"].gate = anyio.Event()
        began = anyio.current_time()
        await stack.publish(1)
        seconds = anyio.current_time() - began
        states = stack.states()
        stack.engines["a"].gate.set()

    assert 30 == pytest.approx(seconds)
    assert {"a": "joining", "b": "serving"} == states


async def test_versions_never_go_back():
    """Answers rely on what was served; the same version may be published again."""
    async with open_replica_stack("a", version=2) as stack:
        await stack.publish(2)
        await stack.publish(2)
        with pytest.raises(EngineError, match="Version 1 was published after version 2"):
            await stack.publish(1)
        with pytest.raises(ModelError, match="neither state nor path"):
            await stack.router.ask(PublishWeights(snapshot=Snapshot(version=3)))

    assert [2, 2] == [snapshot.version for snapshot in stack.engines["a"].loaded]


async def test_weights_in_memory_are_lent_for_the_publication_only():
    """Who comes later would read what the trainer has changed since: it waits for the next ones."""
    async with open_replica_stack("a") as stack:
        await stack.publish(1, is_lent=True)
        late = await stack.add("b", CountingEngine())
        fitting = await stack.add("c", CountingEngine(version=1))
        before = stack.views()
        await stack.publish(2, is_lent=True)
        after = stack.states()

    assert ["serving", "joining", "serving"] == [str(view.state) for view in before.values()]
    assert "waits for the next publication" in (before["b"].error or "")
    assert {"a": "serving", "b": "serving", "c": "serving"} == after
    assert [2] == [snapshot.version for snapshot in late.loaded]
    assert [2] == [snapshot.version for snapshot in fitting.loaded]


async def test_replica_with_older_weights_waits_for_publication():
    """A resumed run begins at its own version, whatever the replica was made with."""
    async with open_replica_stack(version=7) as stack:
        await stack.add("a")
        states = stack.states()
        await stack.publish(7)
        await anyio.wait_all_tasks_blocked()

        assert {"a": "joining"} == states
        assert {"a": "serving"} == stack.states()


async def test_replica_of_another_model_is_kept_out():
    """Its ids would be others."""
    async with open_replica_stack("a") as stack:
        await stack.add("b", CountingEngine(vocab_size=17))
        views = stack.views()

    assert "vocabulary" in (views["b"].error or "")
    assert "joining" == views["b"].state
