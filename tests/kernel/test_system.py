"""The system around the actors: what leaves it, hosted mode, the portal, and what is left afterwards."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.from_thread import BlockingPortal
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import ActorStopped, NotFound
from areal_actors.kernel import Actor, ActorSystem, Message, StreamMessage, root_cause
from areal_actors.lib.held_context import HeldContext
from areal_actors.lib.task_groups import leaves


class Counter:
    """Address of a counter."""


@frozen(kw_only=True)
class Add(Message[Counter, int]):
    n: int = 1


@frozen(kw_only=True)
class Break(Message[Counter, None]):
    pass


@frozen(kw_only=True)
class Missing(Message[Counter, None]):
    pass


@frozen(kw_only=True)
class Forever(StreamMessage[Counter, int]):
    pass


class Abacus(Actor[Counter]):
    def __init__(self) -> None:
        self.total = 0

    @asynccontextmanager
    async def lifespan(self, context):
        context.tasks.start_soon(anyio.sleep_forever)
        yield

    @Add.handler
    async def add(self, message: Add) -> int:
        self.total += message.n
        return self.total

    @Break.handler
    async def break_down(self, message: Break) -> None:
        raise ValueError("broken")

    @Missing.handler(concurrency=2)
    async def miss(self, message: Missing) -> None:
        raise NotFound("no such bead", param="bead")

    @Forever.handler(concurrency=2)
    async def count_forever(self, message: Forever):
        while True:
            yield self.total


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error", [KeyError("mine"), ExceptionGroup("mine", [KeyError("a"), ValueError("b")])], ids=type
)
async def test_system_raises_the_error_of_its_block_unchanged(error):
    """No group around it; a group that the block raised is its own business."""
    with pytest.raises(type(error)) as caught:
        async with ActorSystem.open() as system:
            await system.spawn(Abacus())
            raise error

    assert caught.value is error


@pytest.mark.anyio
async def test_system_raises_a_crash_and_the_error_of_its_block_together():
    """Neither hides the other; the first is named."""
    with pytest.raises(ExceptionGroup, match=r"ValueError: broken|KeyError: 'mine'") as caught:
        async with ActorSystem.open() as system:
            ref = await system.spawn(Abacus())
            try:
                await ref.tell(Break())
                await anyio.sleep_forever()
            finally:
                raise KeyError("mine")

    assert {KeyError, ValueError} == {type(error) for error in caught.value.exceptions}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_system_raises_interrupts_without_a_group(kind):
    """Ctrl-C is not a member of a group."""
    with pytest.raises(kind):
        async with ActorSystem.open() as system:
            await system.spawn(Abacus())
            raise kind


@pytest.mark.anyio
async def test_system_leaves_no_task_behind():
    """No task of ours runs on, whatever was going on."""

    def num_tasks() -> int:
        return len(anyio.get_running_tasks())

    before = num_tasks()
    async with ActorSystem.open(grace=0) as system:
        ref = await system.spawn(Abacus())
        async with anyio.create_task_group() as tasks, ref.stream(Forever()) as items, ref.stream(Forever()):
            await anext(items)
            tasks.start_soon(ref.ask, Add())
            await wait_all_tasks_blocked()
            assert num_tasks() > before
    await wait_all_tasks_blocked()

    assert before == num_tasks()


@pytest.mark.anyio
async def test_system_statistics_list_actors_in_order():
    """And sum up their queues."""
    async with ActorSystem.open(name="here") as system:
        first = await system.spawn(Abacus(), name="first")
        await system.spawn(Abacus(), name="second")
        await first.ask(Add())
        statistics = system.statistics()

    assert ("here", ["first", "second"], 0) == (
        statistics.name,
        [actor.name for actor in statistics.actors],
        statistics.num_queued,
    )
    assert [1, 0] == [actor.num_handled for actor in statistics.actors]


@pytest.mark.anyio
async def test_system_is_held_open_between_two_tasks():
    """As start and stop hooks of web frameworks do; an escalated crash is raised where it is closed."""
    held = HeldContext(ActorSystem.open)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(held.start)
    ref = await held.value.spawn(Abacus())
    assert await ref.ask(Add(n=3)) == 3
    await ref.tell(Break())
    with pytest.raises(ActorStopped):
        await ref.ask(Add())
    with pytest.raises(ExceptionGroup, match="ValueError: broken"):
        await held.aclose()


@pytest.mark.anyio
async def test_system_threads_ask_through_a_blocking_portal():
    """Replies and typed errors are those of a ref."""
    async with ActorSystem.open() as system, BlockingPortal() as portal:
        ref = await system.spawn(Abacus())

        def use() -> None:
            assert portal.call(ref.ask, Add()) > 0
            with pytest.raises(NotFound, match="no such bead"):
                portal.call(ref.ask, Missing())

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(anyio.to_thread.run_sync, use)
        assert await ref.ask(Add(n=0)) == 8


# ---------------------------------------------------------------------------------------------------- root causes


trees = st.recursive(
    st.sampled_from([ActorStopped, ValueError, asyncio.CancelledError]).map(lambda kind: kind("leaf")),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(lambda errors: BaseExceptionGroup("group", errors)),
    max_leaves=12,
)


@given(trees)
def test_root_cause_is_an_original_error(tree):
    """Errors come before stopped actors, and these before cancellations; the first of its kind."""
    all_leaves = list(leaves(tree))
    cause = root_cause(tree)
    wanted = next(
        kind
        for kind in (ValueError, ActorStopped, asyncio.CancelledError)
        if any(isinstance(leaf, kind) for leaf in all_leaves)
    )

    assert cause is next(leaf for leaf in all_leaves if isinstance(leaf, wanted))
