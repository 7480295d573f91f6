"""The consumer's end of a stream: items wait in the buffer of a call, which the side of the handler fills.

The two kinds of streams, from an actor of this process (``runtime``) and from a remote one (``remote.peer``), differ in
how the handler learns that there is room again, and in how it is cancelled when the block is left early.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from anyio.lowlevel import checkpoint

from areal_actors.errors import ArealError, DeadlineExceeded
from areal_actors.lib.loops import Loop, Signal

__all__ = ["BufferedCall", "BufferedStream"]

Item = TypeVar("Item")


class BufferedCall(Protocol):
    """A stream message that was sent, and the items that have arrived for it."""

    buffer: deque[Any]
    limit: int
    error: ArealError | None
    arrival: Signal | None
    """Set by the handler's side when the consumer waits for an item."""

    @property
    def signal(self) -> Signal | None:
        """Set when the handler has ended."""
        ...

    @property
    def is_done(self) -> bool:
        """True if the handler has ended; items that are still buffered can be read."""
        ...

    def claim_error(self) -> ArealError:
        """Return the error, once, to be raised."""
        ...


class _FullOrDone:
    """The arrival of so many items that there is little room for more, or of the end."""

    __slots__ = ("_call", "_signal")

    def __init__(self, call: BufferedCall, signal: Signal) -> None:
        self._call, self._signal = call, signal

    @property
    def is_due(self) -> bool:
        """Whether the consumer should read. A remote handler may not know of a last quarter of the room yet."""
        return self._call.is_done or 4 * len(self._call.buffer) >= 3 * self._call.limit

    def set(self) -> None:
        """Wake the consumer if it should read."""
        if self.is_due:
            self._signal.set()

    def wait(self) -> Awaitable[None]:
        """Wait for that."""
        return self._signal.wait()


C = TypeVar("C", bound=BufferedCall)


class BufferedStream(
    AbstractAsyncContextManager["BufferedStream[C, Item]"], AsyncIterator[Item], ABC, Generic[C, Item]
):
    """Used once: ``async with ref.stream(message) as items: async for item in items: ...``."""

    def __init__(self, message: Any, actor: str, loop: Loop, cleanup_seconds: float) -> None:
        self._message, self._actor, self._loop, self._cleanup_seconds = message, actor, loop, cleanup_seconds
        self._call: C | None = None

    @abstractmethod
    def open_call(self) -> C:
        """Send the message."""

    @abstractmethod
    def make_room(self, call: C) -> None:
        """Let the handler continue if it waits for room, because an item was taken."""

    @abstractmethod
    def cancel_call(self, call: C) -> None:
        """Cancel the handler, because the block was left early."""

    @abstractmethod
    def close_call(self, call: C) -> None:
        """Forget the call, because its consumer has left."""

    async def __aenter__(self) -> Self:
        """Send the message; the handler starts when the actor takes it from its mailbox."""
        self._call = self.open_call()
        return self

    async def __anext__(self) -> Item:
        """Return the next item, or raise the error that ended the handler."""
        call = self._call
        if call is None:
            raise RuntimeError("a stream is opened by 'async with ref.stream(...) as items'")
        while not call.buffer:
            if call.is_done:
                if call.error is None:
                    raise StopAsyncIteration
                if type(call.error) is DeadlineExceeded:
                    # A scope of the consumer with the same deadline must expire first.
                    await checkpoint()
                raise call.claim_error()
            call.arrival = self._loop.new_signal()
            await call.arrival.wait()
            call.arrival = None
        item: Item = call.buffer.popleft()
        self.make_room(call)
        return item

    async def gather(self, until: float) -> list[Item]:
        """Return the items that have arrived by this time of the loop's clock, perhaps none.

        Returns earlier if the handler has ended, or before it would wait for room, and on trio up to a quarter of the
        wait earlier, together with other streams. Its errors are left to
        ``__anext__``. The consumer is woken once for all of them, where reading each item would wake it once for each.
        """
        call = self._call
        if call is None:
            raise RuntimeError("a stream is opened by 'async with ref.stream(...) as items'")
        signal = self._loop.new_signal()
        arrival = _FullOrDone(call, signal)
        if not arrival.is_due and until > self._loop.now():
            call.arrival = arrival
            try:
                await self._loop.wait_until(signal, until)
            finally:
                call.arrival = None
        items: list[Item] = []
        while call.buffer:
            items.append(call.buffer.popleft())
            self.make_room(call)
        return items

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the handler, unless it has ended, and wait for its clean-up.

        The wait is shielded, and therefore bounded by ``cleanup_seconds``.

        Raises:
            DeadlineExceeded: the handler still runs after that, and the block is not already raising an error.
        """
        call = self._call
        assert call is not None, "the block was entered"
        try:
            if not call.is_done:
                self.cancel_call(call)
                with self._loop.new_scope(deadline=self._loop.now() + self._cleanup_seconds, shield=True):
                    assert call.signal is not None, "a call has one from the start"
                    await call.signal.wait()
            if not call.is_done and error is None:
                raise DeadlineExceeded(
                    f"the handler of {type(self._message).__name__} in actor {self._actor!r} still runs "
                    f"{self._cleanup_seconds} s after its cancellation; shorten what it shields"
                )
        finally:
            self.close_call(call)
