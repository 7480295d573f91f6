"""Actors whose handlers run in their askers' tasks: what a ref promises holds, except what needs a life of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from attrs import frozen

from areal_actors.direct.in_process import InlineRef
from areal_actors.errors import DeadlineExceeded, NotFound, RemoteError
from areal_actors.kernel import Actor, ActorState, Message, StreamMessage

pytestmark = pytest.mark.anyio


class Counting:
    """Address of the counter."""


@frozen(kw_only=True)
class Add(Message[Counting, int]):
    """Add in two steps, with a pause between them."""

    number: int = 1


@frozen(kw_only=True)
class Fail(Message[Counting, None]):
    """Raise."""

    error: Exception


@frozen(kw_only=True)
class Wait(Message[Counting, None]):
    """Wait for ever."""


@frozen(kw_only=True)
class CountTo(StreamMessage[Counting, int]):
    """Count, and fail at 3."""

    end: int


class Counter(Actor[Counting]):
    def __init__(self) -> None:
        self.total = 0
        self.num_closed = 0

    @Add.handler
    async def add(self, message: Add) -> int:
        before = self.total
        await anyio.lowlevel.checkpoint()
        self.total = before + message.number
        return self.total

    @Fail.handler
    async def fail(self, message: Fail) -> None:
        raise message.error

    @Wait.handler(concurrency=10)
    async def wait(self, message: Wait) -> None:
        await anyio.sleep_forever()

    @CountTo.handler
    async def count(self, message: CountTo) -> AsyncIterator[int]:
        try:
            for number in range(message.end):
                if number == 3:
                    raise NotFound("three")
                yield number
        finally:
            self.num_closed += 1


async def test_serial_handlers_do_not_interleave() -> None:
    """Twenty askers at once, and no addition is lost."""
    actor = Counter()
    ref = InlineRef[Counting](actor, name="counter")
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(ref.ask, Add())
    assert actor.total == 20


async def test_errors_arrive_as_from_an_actor() -> None:
    """Ours by class, foreign ones as text."""
    ref = InlineRef[Counting](Counter(), name="counter")
    with pytest.raises(NotFound, match="gone"):
        await ref.ask(Fail(error=NotFound("gone")))
    with pytest.raises(RemoteError, match="odd"):
        await ref.ask(Fail(error=ValueError("odd")))
    with pytest.raises(DeadlineExceeded):
        await ref.ask(Wait(), timeout=0)


async def test_stream_ends_its_handler() -> None:
    """At its end, at an error, and when it is left early."""
    actor = Counter()
    ref = InlineRef[Counting](actor, name="counter")
    async with ref.stream(CountTo(end=2)) as items:
        assert [item async for item in items] == [0, 1]
    with pytest.raises(NotFound, match="three"):
        async with ref.stream(CountTo(end=9)) as items:
            assert [item async for item in items] == []
    async with ref.stream(CountTo(end=2)) as items:
        assert await anext(items) == 0
    assert actor.num_closed == 3


async def test_inline_ref_is_a_ref() -> None:
    """It has a name; stopping it is harmless."""
    ref = InlineRef[Counting](Counter(), name="counter")
    other = InlineRef[Counting](Counter(), name="counter")
    assert ref != other
    await ref.tell(Add())
    await ref.stop()
    assert ref.statistics().state is ActorState.RUNNING
