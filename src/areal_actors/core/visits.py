"""Concurrent handlers at work in the task of whoever asks, which saves a task, two wake-ups and turns of the loop.

A handler that declares ``concurrency`` gets a task of its own so that nobody is held up by it. Where the asker would do
nothing but wait for it, and its actor is idle, the asker's own task can do the work::

    asker ── ask ──▶ mailbox ──▶ the actor's loop ──▶ a task ── reply ──▶ asker        usually
    asker ── the handler, in a scope that belongs to the actor ────────▶ asker        as a visit

What is promised stays the same: the handler is cancelled when its asker leaves, when its deadline passes and when its
actor ends; it counts against its limit and in the statistics; errors cross the same border; and messages do not
overtake one another, because only an actor with nothing queued is visited. Handlers that run in turn never are.

Everything that cannot be visited goes through the mailbox to ``serving``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from anyio.lowlevel import checkpoint

from areal_actors.core.envelope import Ask, current_frame
from areal_actors.core.failure import is_stray_cancellation, transferred
from areal_actors.errors import DeadlineExceeded

if TYPE_CHECKING:
    from areal_actors.core.serving import Serving

__all__ = ["answer_in_visit", "stream_in_visit"]


async def answer_in_visit(ask: Ask, serving: Serving) -> Any:
    """Run the handler of ``ask`` in this task; returns and raises what ``Ref.ask`` does."""
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
            await checkpoint()  # a scope of the caller with the same deadline goes first
        raise ask.error
    return ask.reply


@asynccontextmanager
async def stream_in_visit(ask: Ask, serving: Serving) -> AsyncIterator[AsyncIterator[Any]]:
    """The items of a stream handler, each made in this task when it is asked for."""
    parent = ask.parent
    if parent is not None:
        parent.waits.add(ask)
    loop = ask.cell.loop
    scope = loop.new_scope()
    serving.begin_visit(ask, scope)
    steps = _Steps(ask, serving.open_generator(ask, scope))
    try:
        with scope:
            try:
                yield steps
            finally:
                if not steps.is_over:
                    scope.deadline = loop.now() + ask.cell.cleanup_seconds
                    await steps.close()
    finally:
        serving.end_stream(ask)
        serving.end_visit(ask, scope)
        if parent is not None:
            parent.waits.discard(ask)
    if scope.cancelled_caught:
        raise ask.error or ask.unanswered()


class _Steps(AsyncIterator[Any]):
    """The items of a visited stream. What the handler asks on the way, it asks in its own frame."""

    def __init__(self, ask: Ask, generator: AsyncGenerator[Any, None]) -> None:
        self._ask = ask
        self._generator = generator
        self.is_over = False

    async def __anext__(self) -> Any:
        frame = current_frame.set(self._ask)
        try:
            return await self._generator.__anext__()
        except StopAsyncIteration:
            self.is_over = True
            self._ask.reply = None
            raise
        except BaseException as error:
            self.is_over = True
            if not isinstance(error, Exception) and not is_stray_cancellation(error):
                raise
            self._ask.error = transferred(error, self._ask.cell.name)
            raise self._ask.error from None
        finally:
            current_frame.reset(frame)

    async def close(self) -> None:
        """End the handler at its ``yield``."""
        await self._generator.aclose()
