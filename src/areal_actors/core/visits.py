"""Concurrent handlers that run in the asker's own task, which saves a task, two wake-ups and turns of the event loop.

A handler that declares ``concurrency`` normally gets a task, so that it does not delay other messages. If the asker
would do nothing but wait for it, and the actor is idle, the asker's own task can run the handler::

    asker ── ask ──▶ mailbox ──▶ the actor's loop ──▶ a task ── reply ──▶ asker        usually
    asker ── the handler, in a scope that belongs to the actor ────────▶ asker        as a visit

The guarantees stay the same: the handler is cancelled when its asker leaves, when its deadline passes and when its
actor ends; it counts against its limit and in the statistics; errors are converted in the same way; and messages do not
overtake one another, because an actor is visited only while its queue is empty. Serial handlers are never visited.

All other messages go through the mailbox to ``serving``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from anyio.lowlevel import checkpoint

from areal_actors.core.envelope import Ask, current_frame
from areal_actors.core.failure import is_stray_cancellation, transferred
from areal_actors.errors import DeadlineExceeded

if TYPE_CHECKING:
    from areal_actors.core.serving import Serving

__all__ = ["VisitedStream", "answer_in_visit"]


async def answer_in_visit(ask: Ask, serving: Serving) -> Any:
    """Run the handler of ``ask`` in this task; returns and raises as ``Ref.ask`` does."""
    if serving.is_turn_over():
        await checkpoint()
    parent = ask.parent
    if parent is not None:
        parent.waits.add(ask)
    frame = current_frame.set(ask)
    scope = ask.cell.loop.new_scope(deadline=ask.deadline)
    serving.begin_visit(ask, scope)
    try:
        with scope:
            await serving.answer(ask, scope)
    finally:
        serving.end_visit(ask, scope)
        current_frame.reset(frame)
        if parent is not None:
            parent.waits.discard(ask)
    if ask.error is not None:
        if type(ask.error) is DeadlineExceeded:
            await checkpoint()  # a scope of the caller with the same deadline must expire first
        raise ask.claim_error()
    return ask.claim_reply()


class VisitedStream(AbstractAsyncContextManager["VisitedStream"], AsyncIterator[Any]):
    """The items of a stream handler, each produced in the consumer's task when the consumer asks for it."""

    def __init__(self, ask: Ask, serving: Serving) -> None:
        self._ask = ask
        self._serving = serving
        self._scope = ask.cell.loop.new_scope()
        self._generator = serving.open_generator(ask, self._scope)
        self._is_over = False

    async def __aenter__(self) -> Self:
        """Register the visit; the handler starts when the first item is asked for."""
        ask = self._ask
        if ask.parent is not None:
            ask.parent.waits.add(ask)
        # Entered by hand, because the scope stays open between ``__aenter__`` and ``__aexit__``.
        self._scope.__enter__()
        self._serving.begin_visit(ask, self._scope)
        return self

    async def __anext__(self) -> Any:
        """Return the next item. Asks that the handler makes meanwhile belong to the handler's frame."""
        frame = current_frame.set(self._ask)
        try:
            return await self._generator.__anext__()
        except StopAsyncIteration:
            self._is_over = True
            self._ask.reply = None
            raise
        except BaseException as error:
            self._is_over = True
            if not isinstance(error, Exception) and not is_stray_cancellation(error):
                raise
            self._ask.error = transferred(error, self._ask.cell.name)
            raise self._ask.error from None
        finally:
            current_frame.reset(frame)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the handler if it has not ended, and unregister the visit. Raises as ``Ref.stream`` does."""
        try:
            if not self._is_over:
                await self._close()
        except BaseException as other:
            if not self._leave(other):
                raise
        else:
            if not self._leave(error):
                return
        raise self._ask.error or self._ask.unanswered()

    async def _close(self) -> None:
        """Close the handler's generator at its ``yield``, within the time that clean-up may take."""
        cell = self._ask.cell
        self._scope.deadline = cell.loop.now() + cell.cleanup_seconds
        await self._generator.aclose()

    def _leave(self, error: BaseException | None) -> bool:
        """Unregister the visit.

        Return whether ``error`` was the cancellation of this visit, because its actor ended or its deadline passed.
        """
        ask = self._ask
        try:
            if error is None:
                self._scope.__exit__(None, None, None)
            else:
                self._scope.__exit__(type(error), error, error.__traceback__)
        finally:
            self._serving.end_stream(ask)
            self._serving.end_visit(ask, self._scope)
            if ask.parent is not None:
                ask.parent.waits.discard(ask)
        return self._scope.cancelled_caught
