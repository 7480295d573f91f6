"""The proxy without a socket, and its actors without tasks: what a direct client talks to.

Requests go to the application through the ASGI transport of ``httpx``, or of its successor ``httpx2``: the module that
the installed SDK uses. The application runs in the task of the caller, whose cancellation it sees as a closed
connection, and to its end before the response is read: the events of a stream arrive together.

A client that is created in the middle of a coroutine has no task group to start actors in. ``InlineRef`` calls the
handlers of an actor directly, in the tasks of the callers; lifespan, mailbox and supervision do not exist.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import anyio

from areal_actors.errors import DeadlineExceeded, ProtocolError
from areal_actors.kernel import Actor, ActorState, ActorStatistics, Address, Message, Ref, StreamMessage
from areal_actors.kernel.failure import transferred
from areal_actors.kernel.message import Handler, check_complete, collect_handlers

App = Callable[
    [MutableMapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]
]


def http_library_of(sdk: ModuleType) -> ModuleType:
    """Return ``httpx`` or ``httpx2``: the library whose clients the installed ``openai`` or ``anthropic`` accepts."""
    classes = sdk.DefaultAsyncHttpxClient.__mro__
    client = next(kind for kind in classes if kind.__name__ == "AsyncClient")
    return sys.modules[client.__module__.partition(".")[0]]


def create_http_client(app: App, library: ModuleType) -> Any:
    """Return an ``AsyncClient`` of ``library`` that sends every request to ``app``."""
    return library.AsyncClient(transport=_transport_class(library)(app), trust_env=False)


@cache
def _transport_class(library: Any) -> Any:
    """Return the transport class, derived from the one of ``library``, which knows no time limits."""

    class DirectTransport(library.ASGITransport):  # type: ignore[misc]
        """Sends requests to an application in this process."""

        async def handle_async_request(self, request: Any) -> Any:
            """Answer ``request``. Raises ``ReadTimeout`` of the library."""
            seconds = request.extensions.get("timeout", {}).get("read")
            try:
                with anyio.fail_after(seconds):
                    return await super().handle_async_request(request)
            except TimeoutError:
                raise library.ReadTimeout(f"No answer within {seconds:g} s.", request=request) from None

    return DirectTransport


# --------------------------------------------------------------------------------------------- actors

P = TypeVar("P")
R = TypeVar("R")
Item = TypeVar("Item")


class InlineRef(Ref[P]):
    """A ref to ``actor`` that calls its handlers. Serial handlers exclude each other."""

    __slots__ = ("_actor", "_address", "_handlers", "_turn")

    def __init__(self, actor: Actor[P], *, name: str) -> None:
        # Not safe for every actor. The session manager waits only for its engine, and its trees are consistent whenever
        # it waits, so it needs neither a mailbox nor a task.
        self._actor = actor
        self._address = Address(node="inline", name=f"{name}-{id(actor):x}")
        self._handlers = collect_handlers(type(actor))
        check_complete(type(actor), self._handlers)
        self._turn = anyio.Lock(fast_acquire=True)

    @property
    def address(self) -> Address:
        """A name that is unique in this process."""
        return self._address

    async def ask(self, message: Message[P, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Call the handler. Raises as ``Ref.ask`` does, except for errors of a stopped actor, which cannot occur."""
        handler = self._handler(message)
        reply: R
        try:
            with anyio.fail_after(timeout):
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

    @asynccontextmanager
    async def stream(
        self,
        message: StreamMessage[P, Item],
        *,
        buffer_size: int = 16,  # noqa: ARG002 - nothing is buffered: the reader drives the handler
    ) -> AsyncIterator[AsyncIterator[Item]]:
        """Return the handler's stream, whose generator runs in the reader's task."""
        # The generator runs in its reader's task, so a reader must not open a cancel scope before one item and close it
        # after the next. The proxy does not do that.
        generator: AsyncGenerator[Item, None] = self._handler(message).function(self._actor, message)
        try:
            yield _Items(generator, self.name)
        finally:
            await generator.aclose()

    async def stop(self, *, grace: float | None = None) -> None:
        """Do nothing: no task is running."""

    def statistics(self) -> ActorStatistics:
        """Return statistics without counts: nothing is queued, and calls are not counted."""
        return ActorStatistics(name=self.name, state=ActorState.RUNNING, incarnation=1)

    def _handler(self, message: object) -> Handler:
        handler = self._handlers.get(type(message))  # type: ignore[arg-type]
        if handler is None:
            raise ProtocolError(f"{type(self._actor).__name__} has no handler for {type(message).__name__}.")
        return handler


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
