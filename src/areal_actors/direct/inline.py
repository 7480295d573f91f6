"""A ref to an actor that is not running: its handlers run in the tasks of the callers.

A client that is created in the middle of a coroutine has no task group to start actors in. The session manager does not
need one: it waits only for its engine, and its trees are consistent whenever it waits. The ref calls its handlers
directly; lifespan, mailbox and supervision do not exist.

This is not safe in general: a stream's generator runs in its reader's task, so a reader must not open a cancel scope
before one item and close it after the next. The proxy does not do that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from areal_actors.errors import DeadlineExceeded, ProtocolError
from areal_actors.kernel import Actor, ActorState, ActorStatistics, Address, Message, Ref, StreamMessage
from areal_actors.kernel.failure import transferred
from areal_actors.kernel.message import Handler, check_complete, collect_handlers

__all__ = ["InlineRef"]

P = TypeVar("P")
R = TypeVar("R")
Item = TypeVar("Item")


class InlineRef(Ref[P]):
    """A ref to ``actor`` that calls its handlers. Serial handlers exclude each other."""

    __slots__ = ("_actor", "_address", "_counters", "_handlers", "_turn")

    def __init__(self, actor: Actor[P], *, name: str) -> None:
        self._actor = actor
        self._address = Address(node="inline", name=f"{name}-{id(actor):x}")
        self._handlers = collect_handlers(type(actor))
        check_complete(type(actor), self._handlers)
        self._turn = anyio.Lock(fast_acquire=True)
        self._counters: Counter[str] = Counter()

    @property
    def address(self) -> Address:
        """A name that is unique in this process."""
        return self._address

    async def ask(self, message: Message[P, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Call the handler. Raises as ``Ref.ask`` does, except for errors of a stopped actor, which cannot occur."""
        handler = self._handler(message)
        reply: R
        try:
            with self._counted(), anyio.fail_after(timeout):
                if handler.concurrency == 1:
                    async with self._turn:
                        reply = await handler.function(self._actor, message)
                else:
                    reply = await handler.function(self._actor, message)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not answer {type(message).__name__} in time") from None
        except Exception as error:  # noqa: BLE001 - raised again, as it would arrive from an actor
            raise transferred(error, self.name) from None
        return reply

    async def tell(self, message: Message[P, Any]) -> None:
        """Call the handler, wait until it has finished, and raise its errors."""
        await self.ask(message)

    def tell_nowait(self, message: Message[P, Any]) -> None:
        """Raise ``ProtocolError``: there is no mailbox to store the message."""
        raise ProtocolError(f"{self.name} has no mailbox; use tell for {type(message).__name__}.")

    @asynccontextmanager
    async def stream(
        self,
        message: StreamMessage[P, Item],
        *,
        buffer_size: int = 16,  # noqa: ARG002 - nothing is buffered: the reader drives the handler
    ) -> AsyncIterator[AsyncIterator[Item]]:
        """Return the handler's stream, whose generator runs in the reader's task."""
        generator: AsyncGenerator[Item, None] = self._handler(message).function(self._actor, message)
        with self._counted():
            try:
                yield _Items(generator, self.name)
            finally:
                await generator.aclose()

    async def stop(self, *, grace: float | None = None) -> None:
        """Do nothing: no task is running."""

    def statistics(self) -> ActorStatistics:
        """Return counts of the handled messages; the queue is always empty."""
        counters = self._counters
        return ActorStatistics(
            name=self.name,
            state=ActorState.RUNNING,
            incarnation=1,
            num_queued=0,
            num_parked=0,
            num_waiting_senders=0,
            num_running=counters["begun"] - counters["ended"],
            mailbox_size=0,
            num_handled=counters["ended"],
            num_failed=counters["failed"],
            num_cancelled=counters["cancelled"],
            num_dropped=0,
            mailbox_peak=0,
        )

    def _handler(self, message: object) -> Handler:
        handler = self._handlers.get(type(message))  # type: ignore[arg-type]
        if handler is None:
            raise ProtocolError(f"{type(self._actor).__name__} has no handler for {type(message).__name__}.")
        return handler

    def _counted(self) -> _Counted:
        return _Counted(self._counters)


class _Counted:
    """Counts one handler call, however it ends."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        self._counters["begun"] += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._counters["ended"] += 1
        if kind is not None:
            self._counters["failed" if issubclass(kind, Exception) else "cancelled"] += 1


class _Items(AsyncIterator[Item]):
    """The generator's items; its errors are converted as if they came from an actor."""

    def __init__(self, generator: AsyncGenerator[Item, None], name: str) -> None:
        self._generator = generator
        self._name = name

    async def __anext__(self) -> Item:
        try:
            return await anext(self._generator)
        except StopAsyncIteration:
            raise
        except Exception as error:  # noqa: BLE001 - raised again, as it would arrive from an actor
            raise transferred(error, self._name) from None
