"""Both ends of a stream: the consumer's context manager, and the loop that drives the handler's generator.

The generator runs in the actor's task from its first line to its last, so that it may open scopes and task groups
around its ``yield``. Items pass through a bounded buffer in ``envelope.StreamCall``; a slow consumer makes the handler
wait at its ``yield``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from anyio.lowlevel import checkpoint

from areal_actors.core.envelope import Phase, StreamCall
from areal_actors.errors import DeadlineExceeded

if TYPE_CHECKING:
    from areal_actors.core.local import LocalRef

__all__ = ["Stream", "produce"]

Item = TypeVar("Item")


class Stream(AbstractAsyncContextManager["Stream[Item]"], AsyncIterator[Item], Generic[Item]):
    """The consumer's end. Used once: ``async with ref.stream(message) as items: async for item in items: ...``."""

    def __init__(self, ref: LocalRef[Any], message: Any, buffer_size: int) -> None:
        self._ref = ref
        self._message = message
        self._buffer_size = buffer_size
        self._call: StreamCall | None = None

    async def __aenter__(self) -> Self:
        """Send the message; the handler starts when the actor takes it from its mailbox."""
        self._call = self._ref.open_call(self._message, self._buffer_size)
        return self

    async def __anext__(self) -> Item:
        call = self._opened()
        while not call.buffer:
            if call.phase is Phase.DONE:
                if call.error is not None:
                    if type(call.error) is DeadlineExceeded:
                        await checkpoint()  # a scope of the consumer with the same deadline must expire first
                    raise call.claim_error()
                raise StopAsyncIteration
            call.arrival = call.cell.loop.new_signal()
            await call.arrival.wait()
            call.arrival = None
        item: Item = call.buffer.popleft()
        if call.room is not None:
            call.room.set()
            call.room = None
        return item

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call = self._opened()
        try:
            if call.phase is not Phase.DONE:
                # The block was left early: cancel the handler, then wait for its clean-up.
                call.cell.abandon(call)
                await self._join(call, is_failing=error is not None)
        finally:
            self._ref.close_call(call)

    async def _join(self, call: StreamCall, *, is_failing: bool) -> None:
        """Wait until the handler has ended; shielded, and therefore bounded by ``cleanup_seconds``.

        Raises:
            DeadlineExceeded: the handler still runs after that, and the block is not already raising an error.
        """
        loop = call.cell.loop
        with loop.new_scope(deadline=loop.now() + call.cell.cleanup_seconds, shield=True):
            await call.signal.wait()
        if call.phase is not Phase.DONE and not is_failing:
            raise DeadlineExceeded(
                f"the handler of {type(self._message).__name__} in actor {call.cell.name!r} still runs "
                f"{call.cell.cleanup_seconds} s after its cancellation; shorten what it shields"
            )

    def _opened(self) -> StreamCall:
        if self._call is None:
            raise RuntimeError("a stream is opened by 'async with ref.stream(...) as items'")
        return self._call


async def produce(call: StreamCall, generator: AsyncGenerator[Any, None]) -> None:
    """Drive the handler's ``generator`` to its end and pass on each item.

    If passing on an item is interrupted (by a cancellation or a deadline inside the handler), the exception is raised
    in the generator at its ``yield``, as if the ``yield`` had waited itself.
    """
    try:
        item = await anext(generator)
        while True:
            try:
                await call.put(item)
            except BaseException as error:  # noqa: BLE001 - raised again in the generator
                item = await generator.athrow(error)
            else:
                item = await anext(generator)
    except StopAsyncIteration:
        call.reply = None
    finally:
        await generator.aclose()
