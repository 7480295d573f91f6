"""The reporter: hears the news of a run and passes it on to those who write and show it.

::

    everybody ──tells──▶ Progress ──on one worker thread──▶ metrics.jsonl · TensorBoard · dumps · samples · display

Listeners do blocking work, so they are called on a worker thread, one news at a time and in order; while they are
busy, the mailbox fills and those who report wait. A listener that is not essential (a display, dumps) and fails is
switched off with one clear message, and the run goes on. ``metrics.jsonl`` is essential: a run that leaves no record of
its steps is worth nothing, and a disk that is full will not take a checkpoint either, so the run ends with the reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from anyio import CapacityLimiter, to_thread

from areal_actors.core import Actor, Context, Message
from areal_actors.errors import RunDirectoryError
from areal_actors.messages import (
    EpisodeFinished,
    EvaluationFinished,
    PhaseChanged,
    Progress,
    SessionArchived,
    StepFinished,
)
from areal_actors.telemetry import get_logger

__all__ = ["Listener", "ProgressReporter"]

_log = get_logger(__name__)


class Listener(Protocol):
    """Somebody who writes or shows the news. Its methods may block; they are called on a thread, one at a time."""

    @property
    def name(self) -> str:
        """What a message calls it."""
        ...

    @property
    def is_essential(self) -> bool:
        """Whether the run ends when it fails."""
        ...

    def open(self) -> None:
        """Prepare, before the first news."""
        ...

    def hear(self, news: Message[Progress, None]) -> None:
        """Take one news; what it has no use for, it ignores."""
        ...

    def close(self) -> None:
        """Finish, after the last news. Called also if ``open`` failed."""
        ...


class ProgressReporter(Actor[Progress]):
    """Passes news on. Raises ``RunDirectoryError`` when an essential listener fails."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = list(listeners)
        self._deaf: set[str] = set()
        self._limiter: CapacityLimiter

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:  # noqa: ARG002
        """Open the listeners, and close them whatever happened."""
        self._limiter = CapacityLimiter(1)  # a thread of our own: others may not keep the display waiting
        try:
            await self._on_thread(lambda listener: listener.open())
            yield
        finally:
            self._deaf.clear()
            await self._on_thread(lambda listener: listener.close())

    @PhaseChanged.handler
    async def change_phase(self, message: PhaseChanged) -> None:
        """Pass it on."""
        await self._tell_all(message)

    @EpisodeFinished.handler
    async def finish_episode(self, message: EpisodeFinished) -> None:
        """Pass it on."""
        await self._tell_all(message)

    @SessionArchived.handler
    async def archive_session(self, message: SessionArchived) -> None:
        """Pass it on."""
        await self._tell_all(message)

    @StepFinished.handler
    async def finish_step(self, message: StepFinished) -> None:
        """Pass it on."""
        await self._tell_all(message)

    @EvaluationFinished.handler
    async def finish_evaluation(self, message: EvaluationFinished) -> None:
        """Pass it on."""
        await self._tell_all(message)

    async def _tell_all(self, news: Message[Progress, None]) -> None:
        await self._on_thread(lambda listener: listener.hear(news))

    async def _on_thread(self, action: Callable[[Listener], None]) -> None:
        await to_thread.run_sync(self._each, action, limiter=self._limiter)

    def _each(self, action: Callable[[Listener], None]) -> None:
        """Call all of them, and raise afterwards: one that fails keeps no other from hearing, or from closing."""
        failures = [self._attempt(listener, action) for listener in self._listeners if listener.name not in self._deaf]
        for failure in failures:
            if failure is not None:
                raise failure

    def _attempt(self, listener: Listener, action: Callable[[Listener], None]) -> RunDirectoryError | None:
        try:
            action(listener)
        except Exception as error:  # noqa: BLE001 - reported, and for an essential listener raised
            self._deaf.add(listener.name)
            if not listener.is_essential:
                # Whatever it is, it must not cost a run of hours: a display has no say in training.
                is_disk = isinstance(error, OSError)
                _log.warning("switched_off", listener=listener.name, reason=repr(error), exc_info=not is_disk)
                return None
            failure = RunDirectoryError(
                f"{listener.name} could not be written: {error}. The run ends here, since its steps would leave no "
                "record. Free some space or mend the cause, and start it again with --resume."
            )
            failure.__cause__ = error
            return failure
        return None
