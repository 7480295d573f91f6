"""Lines that type checkers must refuse.

Each has a comment that ignores its error. Both checkers report such a comment on a line without an error.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from collections.abc import AsyncIterator

from attrs import frozen

from areal_actors.kernel import Actor, ActorSystem, Message, Ref, StreamMessage


class Capacity: ...


class Sessions: ...


@frozen(kw_only=True)
class Granted:
    version: int


@frozen(kw_only=True)
class Grant(Message[Capacity, Granted]):
    n: int = 1


@frozen(kw_only=True)
class Listen(StreamMessage[Capacity, str]):
    pass


@frozen(kw_only=True)
class EndSession(Message[Sessions, bool]):
    pass


class WrongReply(Actor[Capacity]):
    @Grant.handler  # type: ignore[arg-type]
    async def grant(self, message: Grant) -> int:
        return 1


class WrongMessage(Actor[Capacity]):
    @Grant.handler  # type: ignore[arg-type]
    async def grant(self, message: EndSession) -> Granted:
        return Granted(version=1)


class WrongItem(Actor[Capacity]):
    @Listen.handler(concurrency=2)  # type: ignore[arg-type]
    async def listen(self, message: Listen) -> AsyncIterator[int]:
        yield 1


async def use(system: ActorSystem, capacity: Ref[Capacity]) -> None:
    await capacity.ask(EndSession())  # type: ignore[arg-type]
    await capacity.tell(EndSession())  # type: ignore[arg-type]
    await capacity.ask(Listen())  # type: ignore[arg-type]
    capacity.stream(Grant())  # type: ignore[arg-type]
    text: str = await capacity.ask(Grant())  # type: ignore[arg-type]
    both: Ref[Capacity | Sessions] = capacity  # type: ignore[assignment]
    await both.ask(EndSession())
    text.upper()
