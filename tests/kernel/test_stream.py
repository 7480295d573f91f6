"""Streams: items in order, back-pressure, and handlers that have ended when the block is left."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from attrs import frozen

from areal_actors.errors import ActorStopped, DeadlineExceeded, EngineError, RemoteError
from areal_actors.kernel import Actor, ActorSystem, Message, StreamMessage
from areal_actors.testing import virtual_backend

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


class Source:
    """Address of a generator of numbers."""


ERRORS = {"aborted": EngineError("enough"), "odd": ValueError("odd")}


@frozen(kw_only=True)
class Numbers(StreamMessage[Source, int]):
    n: int
    pause: float = 0.0
    error: str | None = None


@frozen(kw_only=True)
class Scoped(StreamMessage[Source, int]):
    """Yields from within a task group and a deadline."""


@frozen(kw_only=True)
class Stubborn(StreamMessage[Source, int]):
    """Shields itself for ``seconds`` when cancelled."""

    seconds: float


@frozen(kw_only=True)
class Ping(Message[Source, str]):
    pass


class Generator(Actor[Source]):
    def __init__(self) -> None:
        self.made = 0
        self.ended: list[str] = []

    @Numbers.handler(concurrency=2)
    async def numbers(self, message: Numbers) -> AsyncIterator[int]:
        try:
            for n in range(message.n):
                self.made += 1
                yield n
                if message.pause:
                    await anyio.sleep(message.pause)
            if message.error is not None:
                raise ERRORS[message.error]  # noqa: TRY301 - the clean-up below is what is observed
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("finished")

    @Scoped.handler
    async def scoped(self, message: Scoped) -> AsyncIterator[int]:
        with anyio.move_on_after(5) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep_forever)
                for n in range(1000):
                    yield n
        self.ended.append("timed out" if scope.cancelled_caught else "finished")
        yield -1

    @Stubborn.handler
    async def stubborn(self, message: Stubborn) -> AsyncIterator[int]:
        yield 0
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(message.seconds)
            self.ended.append("at last")

    @Ping.handler
    async def ping(self, message: Ping) -> str:
        return "pong"


async def test_stream_items_arrive_in_order():
    """Also when there are more of them than the buffer holds, and none at all."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Generator())
        for n in (0, 1, 100):
            async with ref.stream(Numbers(n=n)) as items:
                assert list(range(n)) == [item async for item in items]


async def test_stream_handler_waits_for_a_slow_consumer():
    """It is never more than the buffer and the item in its hand ahead."""
    generator = Generator()
    async with ActorSystem.open() as system:
        ref = await system.spawn(generator)
        async with ref.stream(Numbers(n=100), buffer_size=4) as items:
            await wait_all_tasks_blocked()
            assert generator.made == 5
            assert await anext(items) == 0
            await wait_all_tasks_blocked()
            assert generator.made == 6

        assert len(generator.ended) == 1


async def test_stream_left_early_cancels_its_handler():
    """The block is left when the handler has ended."""
    generator = Generator()
    async with ActorSystem.open() as system:
        ref = await system.spawn(generator)
        async with ref.stream(Numbers(n=100, pause=1)) as items:
            async for item in items:
                if item == 3:
                    break

        assert generator.ended in (["CancelledError"], ["Cancelled"])
        assert await ref.ask(Ping()) == "pong"


async def test_stream_of_a_cancelled_consumer_cancels_its_handler():
    """A client that hung up must not keep the engine busy."""
    generator = Generator()
    async with ActorSystem.open() as system:
        ref = await system.spawn(generator)
        with anyio.CancelScope() as scope:
            async with ref.stream(Numbers(n=100, pause=8)) as items:
                async for number in items:
                    if number == 2:
                        scope.cancel()

        assert generator.made == 3
        assert generator.ended in (["CancelledError"], ["Cancelled"])


async def test_stream_error_arrives_after_the_items_before_it():
    """Typed where it was raised on purpose, as text otherwise."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Generator())
        for error, kind in (("aborted", EngineError), ("odd", RemoteError)):
            received = []
            with pytest.raises(kind):
                async with ref.stream(Numbers(n=3, error=error)) as items:
                    async for item in items:
                        received.append(item)  # noqa: PERF401 - what came before the error must be kept

            assert [0, 1, 2] == received


async def test_stream_left_in_the_queue_never_starts():
    """Its handler never begins."""
    generator = Generator()
    async with ActorSystem.open() as system:
        ref = await system.spawn(generator)
        async with ref.stream(Numbers(n=9), buffer_size=1), ref.stream(Numbers(n=9), buffer_size=1):
            await wait_all_tasks_blocked()
            made = generator.made
            async with ref.stream(Numbers(n=9)):
                await wait_all_tasks_blocked()
                assert ref.statistics().num_parked == 1

            assert ref.statistics().num_parked == 0
            assert generator.made == made


async def test_stream_handler_may_open_scopes_around_a_yield():
    """A handler's own deadline is raised at its ``yield``, where the scope that set it can catch it."""
    generator = Generator()
    async with ActorSystem.open() as system:
        ref = await system.spawn(generator)
        async with ref.stream(Scoped(), buffer_size=2) as items:
            received = [await anext(items)]
            await anyio.sleep(10)
            received += [item async for item in items]

        assert [0, 1, 2, -1] == received
        assert ["timed out"] == generator.ended


async def test_stream_waits_for_a_shielded_handler_within_a_limit():
    """The wait is bounded by the system's ``cleanup_seconds``, and says when it gives up."""
    generator = Generator()
    async with ActorSystem.open(cleanup_seconds=5) as system:
        ref = await system.spawn(generator)
        async with ref.stream(Stubborn(seconds=3)) as items:
            await anext(items)
        assert ["at last"] == generator.ended

        with pytest.raises(DeadlineExceeded, match=r"still runs 5 s after its cancellation"):
            async with ref.stream(Stubborn(seconds=8)) as items:
                await anext(items)


async def test_stream_ends_with_its_actor():
    """The consumer reads what was buffered, and is told."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Generator())
        with pytest.raises(ActorStopped):
            async with ref.stream(Numbers(n=100, pause=1)) as items:
                assert await anext(items) == 0
                await ref.stop(grace=0)
                async for _ in items:
                    pass
        with pytest.raises(ActorStopped):
            async with ref.stream(Numbers(n=1)):
                pass


async def test_stream_is_cancelled_by_an_enclosing_deadline():
    """The consumer's scope catches it."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Generator())
        with anyio.move_on_after(2) as scope:
            async with ref.stream(Numbers(n=100, pause=10)) as items:
                async for _ in items:
                    pass

        assert scope.cancelled_caught


async def test_stream_must_be_entered_and_have_a_buffer():
    """Reading outside of it, or a buffer without room, is a mistake of the caller."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Generator())
        with pytest.raises(RuntimeError, match="async with"):
            await anext(ref.stream(Numbers(n=1)))
        with pytest.raises(ValueError, match="at least 1"):
            ref.stream(Numbers(n=1), buffer_size=0)
