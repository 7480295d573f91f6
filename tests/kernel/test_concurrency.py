"""Handlers that run in tasks: limits, overtaking, places handed on; and asks that would wait for themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from attrs import frozen

from areal_actors.errors import ActorStopped, DeadlineExceeded, RemoteError
from areal_actors.kernel import Actor, ActorSystem, Context, Message, Ref, Restart, StreamMessage
from areal_actors.testing import virtual_backend

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


class Pool:
    """Address of an actor with two places."""


@frozen(kw_only=True)
class Hold(Message[Pool, str]):
    name: str


@frozen(kw_only=True)
class Release(Message[Pool, None]):
    name: str


@frozen(kw_only=True)
class Job(Message[Pool, None]):
    """Told; fails if its name is 'bad'."""

    name: str


class Keeper(Actor[Pool]):
    def __init__(self) -> None:
        self.began: list[str] = []
        self.held: dict[str, anyio.Event] = {}

    @Hold.handler(concurrency=2)
    async def hold(self, message: Hold) -> str:
        self.began.append(message.name)
        self.held[message.name] = anyio.Event()
        await self.held[message.name].wait()
        return message.name

    @Release.handler
    async def release(self, message: Release) -> None:
        self.held[message.name].set()

    @Job.handler(concurrency=2)
    async def job(self, message: Job) -> None:
        self.began.append(message.name)
        await anyio.sleep(1)
        if message.name == "bad":
            raise ValueError(message.name)


async def test_concurrent_handler_runs_up_to_its_limit():
    """The rest is parked, in order, and other messages overtake it."""
    keeper = Keeper()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(keeper)
        for name in "abcd":
            tasks.start_soon(ref.ask, Hold(name=name))
            await wait_all_tasks_blocked()
        statistics = ref.statistics()

        assert ["a", "b"] == keeper.began
        assert (2, 2, 2) == (statistics.num_running, statistics.num_parked, statistics.num_queued)
        for name in "bacd":
            await ref.ask(Release(name=name))
            await wait_all_tasks_blocked()
        assert list("abcd") == keeper.began


async def test_parked_ask_can_be_cancelled():
    """It leaves its place in the queue to the next."""
    keeper = Keeper()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(keeper)
        for name in "ab":
            tasks.start_soon(ref.ask, Hold(name=name))
            await wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded, match=r"still queued|the actor had it"):
            await ref.ask(Hold(name="late"), timeout=1)
        tasks.start_soon(ref.ask, Hold(name="c"))
        await wait_all_tasks_blocked()
        await ref.ask(Release(name="a"))
        await wait_all_tasks_blocked()

        assert ["a", "b", "c"] == keeper.began
        tasks.cancel_scope.cancel()


async def test_stop_waits_for_concurrent_handlers_and_parked_messages():
    """What was accepted is finished within the grace."""
    keeper = Keeper()
    async with ActorSystem.open() as system:
        ref = await system.spawn(keeper)
        for n in range(5):
            await ref.tell(Job(name=str(n)))
        await ref.stop(grace=10)

        assert list("01234") == sorted(keeper.began)
        assert ref.statistics().num_dropped == 0


async def test_crash_in_a_task_keeps_parked_messages_for_the_next_incarnation():
    """Running neighbours end with the crash; what had not begun is not lost."""
    made: list[Keeper] = []

    def make() -> Keeper:
        made.append(Keeper())
        return made[-1]

    async with ActorSystem.open() as system:
        ref = await system.spawn(make, supervision=Restart(backoff_seconds=1))
        for name in ("bad", "neighbour", "x", "y", "z"):
            await ref.tell(Job(name=name))
        await anyio.sleep(10)

        assert {"bad", "neighbour"} == set(made[0].began[:2])
        assert {"x", "y", "z"} <= set(made[0].began[2:]) | set(made[1].began)
        assert ref.statistics().num_queued == 0
        assert ref.address.incarnation == 2


class Chain:
    """Address of actors that ask one another."""


@frozen(kw_only=True)
class Pass(Message[Chain, str]):
    """Ask the refs of ``path`` one after another, each through the one before it."""

    path: tuple[Ref[Chain], ...] = ()
    before: Callable[[], Awaitable[Any]] | None = None


@frozen(kw_only=True)
class PassInTask(Message[Chain, str]):
    """The same in a concurrent handler."""

    path: tuple[Ref[Chain], ...] = ()


@frozen(kw_only=True)
class Flood(Message[Chain, None]):
    """Tell oneself ``n`` messages."""

    n: int = 0


@frozen(kw_only=True)
class Count(StreamMessage[Chain, str]):
    path: tuple[Ref[Chain], ...] = ()


@frozen(kw_only=True)
class Quit(Message[Chain, None]):
    """Stop oneself, the wrong way."""


@frozen(kw_only=True)
class Later(Message[Chain, None]):
    """Ask oneself from a background task."""


class Link(Actor[Chain]):
    @asynccontextmanager
    async def lifespan(self, context: Context):
        self.context = context
        self.later: list[str] = []
        yield

    @Pass.handler
    async def go(self, message: Pass) -> str:
        if message.before is not None:
            await message.before()
        if not message.path:
            return self.context.name
        return await message.path[0].ask(Pass(path=message.path[1:]))

    @PassInTask.handler(concurrency=4)
    async def go_in_task(self, message: PassInTask) -> str:
        if not message.path:
            return self.context.name
        return await message.path[0].ask(Pass(path=message.path[1:]))

    @Flood.handler
    async def flood(self, message: Flood) -> None:
        for _ in range(message.n):
            await self.context.self_ref.tell(Flood())

    @Count.handler
    async def count(self, message: Count):
        yield "one"
        yield await message.path[0].ask(Pass())

    @Quit.handler
    async def quit(self, message: Quit) -> None:
        await self.context.self_ref.stop()

    @Later.handler
    async def ask_later(self, message: Later) -> None:
        self.context.tasks.start_soon(self._ask_oneself)
        await wait_all_tasks_blocked()

    async def _ask_oneself(self) -> None:
        self.later.append(await self.context.self_ref.ask(Pass()))


async def test_deadlock_of_an_ask_to_itself_is_refused():
    """At once, and with the way out."""
    async with ActorSystem.open() as system:
        a = await system.spawn(Link(), name="a")
        with pytest.raises(RemoteError, match=r"DeadlockError: Pass would wait for itself: 'a' → 'a'\. Tell instead"):
            await a.ask(Pass(path=(a,)))

        assert await a.ask(Pass()) == "a"


async def test_deadlock_of_a_cycle_of_asks_is_refused():
    """The error began at the last link and passes through all of them."""
    async with ActorSystem.open() as system:
        a, b, c = [await system.spawn(Link(), name=name) for name in "abc"]
        with pytest.raises(RemoteError, match="'a' → 'b' → 'c' → 'a'") as caught:
            await a.ask(Pass(path=(b, c, a)))

        assert caught.value.actor == "c"


async def test_concurrent_handler_may_be_asked_back():
    """It does not occupy its actor."""
    async with ActorSystem.open() as system:
        a, b = [await system.spawn(Link(), name=name) for name in "ab"]

        assert await a.ask(PassInTask(path=(b, a))) == "a"


async def test_deadlock_of_a_stream_that_asks_its_consumer_is_refused():
    """The consumer cannot answer while it reads."""

    class Reader(Link):
        @Pass.handler
        async def go(self, message: Pass) -> str:
            async with message.path[0].stream(Count(path=(self.context.self_ref,))) as items:
                return ", ".join([item async for item in items])

    async with ActorSystem.open() as system:
        a, b = await system.spawn(Reader(), name="a"), await system.spawn(Link(), name="b")
        with pytest.raises(RemoteError, match="DeadlockError: Pass would wait for itself: 'a' → 'b' → 'a'"):
            await a.ask(Pass(path=(b,)))


async def test_deadlock_of_filling_the_own_mailbox_is_refused():
    """The sender itself would have to make the room."""
    async with ActorSystem.open() as system:
        a = await system.spawn(Link(), name="a", mailbox_size=2)
        with pytest.raises(RemoteError, match="DeadlockError: telling Flood to a full mailbox would wait for itself"):
            await a.ask(Flood(n=3))
        await a.stop(grace=0)


async def test_deadlock_of_stopping_itself_is_refused():
    """``context.stop()`` is the way."""
    async with ActorSystem.open() as system:
        a = await system.spawn(Link(), name="a")
        with pytest.raises(RemoteError, match=r"DeadlockError.*context.stop\(\)"):
            await a.ask(Quit())


async def test_background_task_may_ask_its_own_actor():
    """It belongs to no message, although a handler started it."""
    link = Link()
    async with ActorSystem.open() as system:
        a = await system.spawn(link, name="a")
        await a.ask(Later())
        await wait_all_tasks_blocked()

        assert ["a"] == link.later


async def test_concurrent_asks_end_when_the_grace_period_ends():
    """After the grace they are cancelled, and their askers told."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Keeper())
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(ActorStopped, match="ended while it handled Hold"):
                    await ref.ask(Hold(name="a"))

            tasks.start_soon(ask)
            await wait_all_tasks_blocked()
            await ref.stop(grace=1)
