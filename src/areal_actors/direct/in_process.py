"""The proxy without a socket, and its actors without tasks: what a direct client talks to.

In the transport here, the response starts when the application starts it, its body arrives as it is sent,
and closing it early is a disconnect, which the application sees as it would see a closed connection. The official SDKs
are split between ``httpx`` and its successor ``httpx2``, which have the same classes; the module that the installed SDK
uses is supported.

A client that is created in the middle of a coroutine has no task group to start actors in. ``InlineRef`` calls the
handlers of an actor directly, in the tasks of the callers; lifespan, mailbox and supervision do not exist.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from types import ModuleType
from typing import Any, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from areal_actors.errors import DeadlineExceeded, ProtocolError
from areal_actors.kernel import Actor, ActorState, ActorStatistics, Address, Message, Ref, StreamMessage
from areal_actors.kernel.failure import transferred
from areal_actors.kernel.message import Handler, check_complete, collect_handlers
from areal_actors.lib.loops import is_trio

App = Callable[
    [MutableMapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]
]

_BUFFERED = 16
"""Number of chunks that the application may be ahead of its reader."""
_END_SECONDS = 5.0
"""How long a reader that closes the response early waits for the application to finish."""


def http_library_of(sdk: ModuleType) -> ModuleType:
    """Return ``httpx`` or ``httpx2``: the library whose clients the installed ``openai`` or ``anthropic`` accepts."""
    classes = sdk.DefaultAsyncHttpxClient.__mro__
    client = next(kind for kind in classes if kind.__name__ == "AsyncClient")
    return sys.modules[client.__module__.partition(".")[0]]


def create_http_client(app: App, library: ModuleType) -> Any:
    """Return an ``AsyncClient`` of ``library`` that sends every request to ``app``."""
    return library.AsyncClient(transport=_transport_class(library)(app), trust_env=False)


class _Call:
    """One request that the application handles."""

    def __init__(self, scope: MutableMapping[str, Any], body: bytes) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.failure: Exception | None = None
        self.started = anyio.Event()
        self._scope = scope
        self._body: bytes | None = body
        self._gone = anyio.Event()
        self._ended = anyio.Event()
        self._send: MemoryObjectSendStream[bytes]
        self.chunks: MemoryObjectReceiveStream[bytes]
        self._send, self.chunks = anyio.create_memory_object_stream[bytes](_BUFFERED)

    async def run(self, app: App) -> None:
        """Run the application on the request; never raises an ``Exception``."""
        try:
            await app(self._scope, self._receive, self._answer)
        except Exception as error:  # noqa: BLE001 - raised where the response is read
            self.failure = error
        finally:
            self._send.close()
            self.started.set()
            self._ended.set()

    async def hang_up(self) -> None:
        """Disconnect, and wait until the application has finished handling the request."""
        self._gone.set()
        self.chunks.close()
        with anyio.move_on_after(_END_SECONDS, shield=True):
            await self._ended.wait()

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        # The application waits here for the end of the connection, as it would on a server.
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _answer(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
            self.started.set()
            return
        if message.get("body"):
            # The reader has gone; servers drop this, too.
            with suppress(anyio.BrokenResourceError):
                await self._send.send(message["body"])
        if not message.get("more_body", False):
            self._send.close()


class _Body:
    """The body of a response, as the application sends it."""

    def __init__(self, call: _Call, stop: Callable[[], object], request: Any, library: Any) -> None:
        # An iterator instead of a generator, so that nothing is left to the garbage collector.
        self._call, self._stop, self._request, self._library = call, stop, request, library
        self._seconds = _read_seconds(request)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            with anyio.fail_after(self._seconds):
                return await self._call.chunks.receive()
        except anyio.EndOfStream:
            _check(self._call, self._library)
            raise StopAsyncIteration from None
        except TimeoutError:
            text = f"Nothing arrived within {self._seconds:g} s."
            raise self._library.ReadTimeout(text, request=self._request) from None

    async def aclose(self) -> None:
        """Disconnect. Closing twice has no effect."""
        await _end(self._call, self._stop)


@cache
def _transport_class(library: Any) -> Any:
    """Return the transport class, derived from the base classes of ``library``."""

    class Body(_Body, library.AsyncByteStream):  # type: ignore[misc]
        """The body, as a stream type of the library."""

    # Not the ASGI transport of httpx: it runs the application to its end before the caller sees a byte, and does not
    # support disconnects.
    class DirectTransport(library.AsyncBaseTransport):  # type: ignore[misc]
        """Sends requests to an application in this process."""

        def __init__(self, app: App) -> None:
            self._app = app

        async def handle_async_request(self, request: Any) -> Any:
            """Answer ``request``. Raises ``ReadTimeout`` and ``ReadError`` of the library."""
            url = request.url
            scope = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": request.method,
                "scheme": url.scheme,
                "path": url.path,
                "raw_path": url.raw_path.partition(b"?")[0],
                "query_string": url.query,
                "root_path": "",
                "headers": [(name.lower(), value) for name, value in request.headers.raw],
                "client": ("127.0.0.1", 0),
                "server": (url.host, url.port),
            }
            call = _Call(scope, b"".join([part async for part in request.stream]))
            seconds = _read_seconds(request)
            stop = _start_task(partial(call.run, self._app))
            try:
                with anyio.fail_after(seconds):
                    await call.started.wait()
                _check(call, library)
            except TimeoutError:
                await _end(call, stop)
                text = f"No answer began within {seconds:g} s."
                raise library.ReadTimeout(text, request=request) from None
            except BaseException:
                await _end(call, stop)
                raise
            return library.Response(call.status, headers=call.headers, stream=Body(call, stop, request, library))

    return DirectTransport


def _start_task(function: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], object]:
    """Run ``function()`` in a task of the event loop, and return a callable that cancels it without waiting.

    A response outlives the call that returns it, so no task group can hold the task. ``function`` must not raise.
    """
    # trio may run in guest mode on asyncio's loop, so a running asyncio loop does not prove that this task is
    # asyncio's.
    if not is_trio():
        # The bound method holds a reference to the task, which the event loop itself holds only weakly.
        return asyncio.get_running_loop().create_task(function()).cancel
    import trio

    scope = trio.CancelScope()

    async def run() -> None:
        with scope:
            await function()

    trio.lowlevel.spawn_system_task(run, name="direct.request")
    return scope.cancel


def _check(call: _Call, library: Any) -> None:
    if call.failure is not None:
        raise library.ReadError(f"The application failed: {call.failure!r}") from call.failure


async def _end(call: _Call, stop: Callable[[], object]) -> None:
    await call.hang_up()
    stop()


def _read_seconds(request: Any) -> float:
    seconds = request.extensions.get("timeout", {}).get("read")
    return math.inf if seconds is None else float(seconds)


# --------------------------------------------------------------------------------------------- actors

P = TypeVar("P")
R = TypeVar("R")
Item = TypeVar("Item")


class InlineRef(Ref[P]):
    """A ref to ``actor`` that calls its handlers. Serial handlers exclude each other."""

    __slots__ = ("_actor", "_address", "_counters", "_handlers", "_turn")

    def __init__(self, actor: Actor[P], *, name: str) -> None:
        # Not safe for every actor. The session manager waits only for its engine, and its trees are consistent whenever
        # it waits, so it needs neither a mailbox nor a task.
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
        # The generator runs in its reader's task, so a reader must not open a cancel scope before one item and close it
        # after the next. The proxy does not do that.
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
