"""What type checkers must accept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import assert_type

from attrs import frozen

from areal_actors.kernel import Actor, ActorSystem, Context, Message, Ref, Restart, StreamMessage


class Capacity: ...


class Sessions: ...


@frozen(kw_only=True)
class Granted:
    version: int


@frozen(kw_only=True)
class Grant(Message[Capacity, Granted]):
    n: int = 1


@frozen(kw_only=True)
class VersionAdvanced(Message[Capacity, None]):
    version: int


@frozen(kw_only=True)
class Listen(StreamMessage[Capacity, str]):
    pass


@frozen(kw_only=True)
class EndSession(Message[Sessions, bool]):
    pass


class Granter(Actor[Capacity]):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    @Grant.handler
    async def grant(self, message: Grant) -> Granted:
        return Granted(version=self.limit)

    @VersionAdvanced.handler(concurrency=4)
    async def advance(self, message: VersionAdvanced) -> None: ...

    @Listen.handler(concurrency=2)
    async def listen(self, message: Listen) -> AsyncIterator[str]:
        yield "heard"


async def use(system: ActorSystem, both: Ref[Capacity | Sessions], context: Context) -> None:
    ref = await system.spawn(Granter(limit=3), name="granter")
    assert_type(ref, Ref[Capacity])
    assert_type(await system.spawn(lambda: Granter(limit=3), supervision=Restart()), Ref[Capacity])
    assert_type(await ref.ask(Grant(n=2), timeout=5), Granted)
    await ref.tell(VersionAdvanced(version=1))
    async with ref.stream(Listen()) as items:
        async for item in items:
            assert_type(item, str)
    assert_type(await both.ask(Grant()), Granted)
    assert_type(await both.ask(EndSession()), bool)
    narrower: Ref[Capacity] = both
    await narrower.tell(Grant())
    assert_type(await Granter(limit=1).grant(Grant()), Granted)
    context.tasks.start_soon(ref.tell, VersionAdvanced(version=2))
    ref.watch(print)
