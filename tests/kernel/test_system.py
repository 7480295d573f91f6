"""The system around the actors: what leaves it, hosted mode, the portal, and what is left afterwards."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import ActorError, ActorStopped, ConfigError, NotFound
from areal_actors.kernel import Actor, ActorSystem, Message, Stop, StreamMessage, root_cause
from areal_actors.kernel.failure import leaves


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
async def test_the_blocks_own_error_leaves_as_it_is():
    """No group around it, and its own traceback."""
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with ActorSystem.open() as system:
            await system.spawn(Abacus())
            raise error

    assert caught.value is error


@pytest.mark.anyio
async def test_the_blocks_own_group_leaves_as_it_is():
    """A group that the block raised is its own business."""
    error = ExceptionGroup("mine", [KeyError("a"), ValueError("b")])
    with pytest.raises(ExceptionGroup) as caught:
        async with ActorSystem.open() as system:
            await system.spawn(Abacus())
            raise error

    assert caught.value is error


@pytest.mark.anyio
async def test_a_crash_and_the_blocks_error_leave_together():
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
async def test_interrupts_leave_plainly(kind):
    """Ctrl-C is not a member of a group."""
    with pytest.raises(kind):
        async with ActorSystem.open() as system:
            await system.spawn(Abacus())
            raise kind


@pytest.mark.anyio
async def test_nothing_is_left_after_the_block():
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
async def test_statistics_of_a_system_list_its_actors_in_order():
    """With sums for those who only want to know whether it keeps up."""
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
async def test_a_mailbox_that_holds_nothing_is_refused():
    """As a mistake of configuration."""
    async with ActorSystem.open() as system:
        with pytest.raises(ConfigError, match="mailbox_size is 0"):
            await system.spawn(Abacus(), mailbox_size=0)


# -------------------------------------------------------------------------------------------------------- hosted


@pytest.mark.anyio
async def test_a_hosted_system_starts_and_ends_in_different_tasks():
    """As start and stop hooks of web frameworks do."""
    systems = []

    async def start_hook() -> None:
        systems.append(await ActorSystem.start_hosted(name="hosted"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start_hook)
    (system,) = systems
    ref = await system.spawn(Abacus())
    assert await ref.ask(Add(n=3)) == 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(system.aclose)

    with pytest.raises(ActorStopped):
        await ref.ask(Add())
    await system.aclose()


@pytest.mark.anyio
async def test_a_hosted_system_that_failed_says_so_when_it_is_closed():
    """Once, to whoever closes it."""
    system = await ActorSystem.start_hosted()
    ref = await system.spawn(Abacus())
    await ref.tell(Break())
    with pytest.raises(ActorStopped):
        await ref.ask(Add())
    with pytest.raises(ExceptionGroup, match="ValueError: broken"):
        await system.aclose()

    await system.aclose()


@pytest.mark.anyio
async def test_a_block_alone_ends_what_it_opened():
    """``aclose`` is for hosted systems."""
    async with ActorSystem.open() as system:
        with pytest.raises(ActorError, match="ends where that block ends"):
            await system.aclose()


# -------------------------------------------------------------------------------------------------------- portal


@pytest.mark.anyio
async def test_threads_ask_and_tell_through_a_portal():
    """Many at once; replies, typed errors and deadlines are those of a ref."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Abacus(), supervision=Stop())

        def use() -> None:
            with system.portal() as portal:
                portal.tell(ref, Add())
                assert portal.ask(ref, Add(), timeout=5) > 0
                with pytest.raises(NotFound, match="no such bead") as caught:
                    portal.ask(ref, Missing())
                assert caught.value.param == "bead"

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(anyio.to_thread.run_sync, use)
        assert await ref.ask(Add(n=0)) == 16

        def stop() -> None:
            with system.portal() as portal:
                portal.stop(ref)
                with pytest.raises(ActorStopped):
                    portal.ask(ref, Add())

        await anyio.to_thread.run_sync(stop)


@pytest.mark.anyio
async def test_a_portal_outlives_its_system_harmlessly():
    """A thread that comes late is told."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Abacus())
        portal = system.portal()

    def ask_late() -> None:
        with portal, pytest.raises(ActorStopped, match="is closed"):
            portal.ask(ref, Add())

    await anyio.to_thread.run_sync(ask_late)


@pytest.mark.anyio
async def test_a_portal_refuses_the_event_loops_own_thread():
    """It would wait for itself."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Abacus())
        with system.portal() as portal, pytest.raises(RuntimeError, match="event loop thread"):
            portal.ask(ref, Add())


def test_a_hosted_system_serves_a_synchronous_program():
    """A loop in a thread, a program in another."""
    ready, stop, box = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with ActorSystem.open() as system:
            box.extend((system.portal(), await system.spawn(Abacus())))
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(5)
    portal, ref = box
    with portal:
        total = portal.ask(ref, Add(n=7))
    stop.set()
    thread.join(5)

    assert total == 7


# ---------------------------------------------------------------------------------------------------- root causes


trees = st.recursive(
    st.sampled_from([ActorStopped, ValueError, asyncio.CancelledError]).map(lambda kind: kind("leaf")),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(lambda errors: BaseExceptionGroup("group", errors)),
    max_leaves=12,
)


@given(trees)
def test_the_root_cause_is_a_leaf_that_did_not_follow_from_others(tree):
    """What somebody raised comes before stopped actors, and these before cancellations; the first of its kind."""
    all_leaves = list(leaves(tree))
    cause = root_cause(tree)
    wanted = next(
        kind
        for kind in (ValueError, ActorStopped, asyncio.CancelledError)
        if any(isinstance(leaf, kind) for leaf in all_leaves)
    )

    assert cause is next(leaf for leaf in all_leaves if isinstance(leaf, wanted))
