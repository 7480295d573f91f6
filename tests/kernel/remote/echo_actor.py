"""An actor that echoes, waits, notes, counts and fails, for the other end of a connection."""

from __future__ import annotations

from typing import Any

import anyio
from attrs import frozen

from areal_actors.errors import NotFound
from areal_actors.kernel import Actor, Message, StreamMessage

SECRET = b"only for the tests of connections"


class Echoing:
    """Address of the actor under test."""


@frozen(kw_only=True)
class Echo(Message[Echoing, Any]):
    value: Any = 1


@frozen(kw_only=True)
class WhoAreYou(Message[Echoing, str]):
    pass


@frozen(kw_only=True)
class Wait(Message[Echoing, None]):
    pass


@frozen(kw_only=True)
class Note(Message[Echoing, None]):
    text: str


@frozen(kw_only=True)
class Numbers(StreamMessage[Echoing, int]):
    n: int


class Other:
    """Address of another actor."""


@frozen(kw_only=True)
class Foreign(Message[Other, None]):
    pass


class EchoActor(Actor[Echoing]):
    def __init__(self, name: str = "actor") -> None:
        self.name = name
        self.seen: list[str] = []
        self.go = anyio.Event()

    @Echo.handler
    async def echo(self, message: Echo) -> Any:
        return object() if isinstance(message.value, str) and message.value == "unsendable" else message.value

    @WhoAreYou.handler
    async def who_are_you(self, message: WhoAreYou) -> str:
        return self.name

    @Wait.handler(concurrency=1000)
    async def wait(self, message: Wait) -> None:
        self.seen.append("waits")
        try:
            await self.go.wait()
        except BaseException:
            self.seen.append("cancelled")
            raise

    @Note.handler
    async def note(self, message: Note) -> None:
        await self.go.wait()
        self.seen.append(message.text)
        if message.text == "crash":
            raise NotFound("nothing")

    @Numbers.handler(concurrency=10)
    async def numbers(self, message: Numbers):
        for number in range(message.n):
            yield number
            self.seen.append(str(number))
