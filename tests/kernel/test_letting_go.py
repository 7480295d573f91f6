"""What is over is let go: no message or reply waits for the garbage collector, which may be long in coming."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked
from attrs import frozen

from areal_actors.domain import Ints
from areal_actors.errors import CapacityExhausted, RemoteError
from areal_actors.kernel import Actor, ActorSystem, Message, Ref, StreamMessage
from areal_actors.testing import virtual_backend
from areal_actors_testing.remote import pretend_remote

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Keep what other tests have imported out of the collections below: each took most of a second for it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    ARRAYS.clear()
    yield
    gc.enable()


ARRAYS: list[weakref.ref[Ints]] = []


def fresh() -> Ints:
    """An array that is large enough to travel as a buffer, and is watched."""
    return watched(np.zeros(1 << 16, np.int64))


def watched(array: Ints) -> Ints:
    ARRAYS.append(weakref.ref(array))
    return array


def num_alive() -> int:
    return sum(array() is not None for array in ARRAYS)


class Stores:
    """Address of the actor under test."""


@frozen(kw_only=True)
class Give(Message[Stores, Ints]):
    array: Ints


@frozen(kw_only=True)
class Wait(Message[Stores, Ints]):
    """As ``Give``, in a separate task and after some time."""

    array: Ints
    seconds: float = 0.0


@frozen(kw_only=True)
class Fail(Message[Stores, None]):
    array: Ints
    is_on_purpose: bool


@frozen(kw_only=True)
class Break(StreamMessage[Stores, Ints]):
    array: Ints


class Store(Actor[Stores]):
    @Give.handler
    async def give(self, message: Give) -> Ints:
        watched(message.array)
        return fresh()

    @Wait.handler(concurrency=8)
    async def wait(self, message: Wait) -> Ints:
        watched(message.array)
        await anyio.sleep(message.seconds)
        return fresh()

    @Fail.handler
    async def fail(self, message: Fail) -> None:
        watched(message.array)
        raise CapacityExhausted("full") if message.is_on_purpose else ValueError("broken")

    @Break.handler
    async def break_off(self, message: Break) -> AsyncIterator[Ints]:
        watched(message.array)
        yield fresh()
        raise ValueError("broken")


async def ask(ref: Ref[Stores]) -> None:
    for _ in range(3):
        await ref.ask(Give(array=fresh()))


async def ask_in_a_task(ref: Ref[Stores]) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(ref.ask, Wait(array=fresh(), seconds=1.0))


async def leave(ref: Ref[Stores]) -> None:
    with anyio.move_on_after(1.0):
        await ref.ask(Wait(array=fresh(), seconds=3600.0))


async def fail(ref: Ref[Stores]) -> None:
    for is_on_purpose in (True, False):
        try:
            await ref.ask(Fail(array=fresh(), is_on_purpose=is_on_purpose))
        except (CapacityExhausted, RemoteError):
            continue
        pytest.fail("nothing was raised")


async def stream_until_it_fails(ref: Ref[Stores]) -> None:
    try:
        async with ref.stream(Break(array=fresh())) as items:
            async for _ in items:
                pass
    except RemoteError:
        return
    pytest.fail("nothing was raised")


WAYS = (ask, ask_in_a_task, leave, fail, stream_until_it_fails)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
async def test_messages_are_freed_without_the_garbage_collector(
    way: Callable[[Ref[Stores]], Awaitable[None]],
    is_remote: bool,  # noqa: FBT001
) -> None:
    """Neither the asker's side nor the actor's side keeps an array in a circle of references, in a timer, or aside."""
    async with ActorSystem.open() as system:
        store = await system.spawn(Store())
        if is_remote:
            async with pretend_remote(expose={"store": store}) as (peer, _):
                await way(peer.ref(Stores, "store"))
                await wait_all_tasks_blocked()
                assert num_alive() == 0
        else:
            await way(store)
            await wait_all_tasks_blocked()
            assert num_alive() == 0
    assert len(ARRAYS) >= 2
