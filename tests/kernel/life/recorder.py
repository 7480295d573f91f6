"""An actor whose events tells what has become of it, and what it can be asked to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from attrs import field, frozen

from areal_actors.kernel import Actor, Context, Message


class Life:
    """Address of an actor that writes a events."""


FAULTS: list[Exception] = []


def keep(error: Exception | int | None) -> int | None:
    """Exceptions do not travel: the message holds the place of one."""
    if not isinstance(error, Exception):
        return error
    FAULTS.append(error)
    return len(FAULTS) - 1


@frozen(kw_only=True)
class Work(Message[Life, None]):
    seconds: float = 0.0
    error: int | None = field(default=None, converter=keep)


@frozen(kw_only=True)
class Name(Message[Life, str]):
    pass


@frozen(kw_only=True)
class GoAway(Message[Life, None]):
    pass


class Recorder(Actor[Life]):
    def __init__(self, events: list[str] | None = None, *, leaving: float = 0.0, entering: float = 0.0) -> None:
        self.events = [] if events is None else events
        self.leaving, self.entering = leaving, entering
        self.swallows = False
        self.background_error: Exception | None = None

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        self.context = context
        self.events.append(f"enters {context.incarnation}")
        await anyio.sleep(self.entering)
        context.tasks.start_soon(self.run_background)
        try:
            yield
        except ValueError as error:
            self.events.append(f"saw {error}")
            if not self.swallows:
                raise
        finally:
            await anyio.sleep(self.leaving)
            self.events.append("leaves")

    async def run_background(self) -> None:
        try:
            if self.background_error is not None:
                await anyio.sleep(1)
                raise self.background_error
            await anyio.sleep_forever()
        finally:
            self.events.append("background ends")

    @Work.handler
    async def work(self, message: Work) -> None:
        try:
            await anyio.sleep(message.seconds)
        except BaseException:
            self.events.append("work cancelled")
            raise
        if message.error is not None:
            raise FAULTS[message.error]
        self.events.append("works")

    @Name.handler
    async def name(self, message: Name) -> str:
        return f"{self.context.name} {self.context.incarnation}"

    @GoAway.handler
    async def go_away(self, message: GoAway) -> None:
        self.context.stop()
