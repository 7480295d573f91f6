"""The reporter: receives the news of a run and passes them to listeners that write and display them.

::

    everybody ──tells──▶ Progress ──on one worker thread──▶ metrics.jsonl · TensorBoard · dumps · samples · display

Listeners do blocking work, so they are called on a worker thread, one message at a time and in order. While they are
busy the mailbox fills and the senders wait. A listener that fails and is not essential (a display, dumps) is switched
off with one clear message, and the run continues. While the disk is full, it misses messages, which are counted, and
goes on when there is space. ``metrics.jsonl`` is essential: a run without a record of its steps
is worthless, and a full disk will not take a checkpoint either, so the run ends with the reason.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from anyio import CapacityLimiter, get_cancelled_exc_class, to_thread

from areal_actors.domain import RunStatus
from areal_actors.errors import RunDirectoryError
from areal_actors.kernel import Actor, Context, Message
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    EpisodeFinished,
    EvaluationFinished,
    GroupsTrained,
    PhaseChanged,
    Progress,
    RowsTrained,
    RunEnded,
    ServiceOpened,
    SessionArchived,
    SessionsCounted,
    StepFinished,
)

_log = get_logger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Listener:
    """A writer or display of news. Its methods may block; they are called on a thread, one at a time."""

    name: str
    """Its name in log messages."""
    is_essential = False
    """Whether the run ends if it fails."""

    def open(self) -> None:
        """Prepare, before the first message."""

    def on_event(self, news: Message[Progress, None]) -> None:
        """Process one message, or ignore it."""

    def close(self) -> None:
        """Finish, after the last message. Also called if ``open`` failed."""


class ProgressReporter(Actor[Progress]):
    """Passes news to the listeners. Raises ``RunDirectoryError`` when an essential listener fails."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = list(listeners)
        self._deaf: set[str] = set()
        self._num_missed = Counter[str]()
        """Messages that a listener could not write because the disk was full."""
        self._has_ended = False
        self._limiter: CapacityLimiter

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:  # noqa: ARG002
        """Open the listeners, and close them in any case."""
        # A dedicated thread, so that other work cannot delay the display.
        self._limiter = CapacityLimiter(1)
        try:
            await self._on_thread(lambda listener: listener.open(), is_news=False)
            yield
        except get_cancelled_exc_class():
            # The whole run was cancelled from outside, which no other actor had the time to say.
            if not self._has_ended:
                await self.pass_on(RunEnded(status=RunStatus.INTERRUPTED))
            raise
        finally:
            # A listener that was switched off is still closed.
            self._deaf.clear()
            for name, number in self._num_missed.items():
                _log.warning("records_missing", listener=name, number=number)
            await self._on_thread(lambda listener: listener.close(), is_news=False)

    async def pass_on(self, news: Message[Progress, None]) -> None:
        """Pass a message to the listeners."""
        self._has_ended |= isinstance(news, RunEnded)
        await self._on_thread(lambda listener: listener.on_event(news))

    for _news in (
        PhaseChanged,
        ServiceOpened,
        SessionsCounted,
        EpisodeFinished,
        SessionArchived,
        GroupsTrained,
        RowsTrained,
        StepFinished,
        RunEnded,
        EvaluationFinished,
    ):
        _news.handler(pass_on)

    async def _on_thread(self, action: Callable[[Listener], None], *, is_news: bool = True) -> None:
        await to_thread.run_sync(self._each, action, is_news, limiter=self._limiter)

    def _each(self, action: Callable[[Listener], None], is_news: bool) -> None:  # noqa: FBT001 - for ``run_sync``
        """Call all active listeners, and raise the first error of an essential one afterwards.

        A listener that fails does not keep the others from being called or closed.
        """
        failed: RunDirectoryError | None = None
        for listener in [listener for listener in self._listeners if listener.name not in self._deaf]:
            try:
                action(listener)
            except Exception as error:  # noqa: BLE001 - reported, and for an essential listener raised
                if listener.is_essential:
                    failure = RunDirectoryError(
                        f"{listener.name} could not be written: {error}. The run ends here, since its steps would "
                        "leave no record. Free some space or mend the cause, and start it again with --resume."
                    )
                    failure.__cause__ = error
                    failed = failed or failure
                    self._deaf.add(listener.name)
                elif is_news and isinstance(error, OSError) and error.errno in _FULL:
                    # Nothing of this message was written; the next one is tried again.
                    self._num_missed[listener.name] += 1
                    if self._num_missed[listener.name] == 1:
                        _log.warning("records_missed", listener=listener.name, reason=str(error))
                else:
                    # No error of a display may end a run of several hours.
                    self._deaf.add(listener.name)
                    is_disk = isinstance(error, OSError)
                    _log.warning("switched_off", listener=listener.name, reason=repr(error), exc_info=not is_disk)
        if failed is not None:
            raise failed
