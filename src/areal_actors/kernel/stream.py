"""The consumer's end of a stream: items wait in the bounded buffer of a call, which the handler's side fills.

The call differs between an actor of this process (``asks.StreamCall``) and a remote one (``remote.peer.Call``); the
consumer does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from anyio.lowlevel import checkpoint

from areal_actors.errors import DeadlineExceeded
from areal_actors.lib.loops import Loop, Signal

Item = TypeVar("Item")


def check_buffer_size(buffer_size: int) -> None:
    """Check that a stream's buffer has room for an item.

    Raises:
        ValueError: it has none.
    """
    if buffer_size < 1:
        raise ValueError(f"buffer_size={buffer_size} leaves no room for an item; give at least 1")


class BufferedCall(Protocol):
    """A stream message that was sent, and the items that have arrived for it."""

    buffer: deque[Any]
    limit: int
    signal: Signal
    """Set when the handler has ended."""
    arrival: Signal | None
    """Set by the handler's side when the consumer waits for an item."""

    @property
    def is_done(self) -> bool:
        """True if the handler has ended; items that are still buffered can be read."""
        ...

    @property
    def is_overdue(self) -> bool:
        """True if the handler has ended because its deadline passed."""
        ...

    def claim(self) -> Any:
        """Raise the error that ended the handler, if any."""
        ...

    def make_room(self) -> None:
        """Let the handler continue if it waits for room, because an item was taken."""
        ...

    def cancel(self) -> None:
        """Discard the call if it is queued, or cancel its handler."""
        ...


class Stream(AbstractAsyncContextManager["Stream[Item]"], AsyncIterator[Item], Generic[Item]):
    """Used once: ``async with ref.stream(message) as items: async for item in items: ...``.

    ``open_call`` sends the message; ``what`` names the handler in errors.
    """

    def __init__(
        self, open_call: Callable[[], Awaitable[BufferedCall]], what: str, loop: Loop, cleanup_seconds: float
    ) -> None:
        self._open_call, self._what, self._loop, self._cleanup_seconds = open_call, what, loop, cleanup_seconds
        self._call: BufferedCall | None = None

    async def __aenter__(self) -> Self:
        """Send the message; the handler starts when the actor takes it from its mailbox."""
        self._call = await self._open_call()
        return self

    async def __anext__(self) -> Item:
        """Return the next item, or raise the error that ended the handler."""
        call = self._opened()
        while not call.buffer:
            if call.is_done:
                if call.is_overdue:
                    # A scope of the consumer with the same deadline must expire first.
                    await checkpoint()
                call.claim()
                raise StopAsyncIteration
            call.arrival = self._loop.new_signal()
            await call.arrival.wait()
            call.arrival = None
        item: Item = call.buffer.popleft()
        call.make_room()
        return item

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the handler, unless it has ended, and wait for its clean-up.

        The wait is shielded, and therefore bounded by ``cleanup_seconds``.

        Raises:
            DeadlineExceeded: the handler still runs after that, and the block is not already raising an error.
        """
        call = self._opened()
        if not call.is_done:
            call.cancel()
            with self._loop.new_scope(deadline=self._loop.now() + self._cleanup_seconds, shield=True):
                await call.signal.wait()
        if not call.is_done and error is None:
            raise DeadlineExceeded(
                f"{self._what} still runs {self._cleanup_seconds} s after its cancellation; shorten what it shields"
            )

    def _opened(self) -> BufferedCall:
        if self._call is None:
            raise RuntimeError("a stream is opened by 'async with ref.stream(...) as items'")
        return self._call
