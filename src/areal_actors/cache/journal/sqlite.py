"""The journal in a file: who waits for which commit, and how many writes become one.

One thread owns the file. Facts that are handed over while it commits wait in a queue and go into the next commit
together; one call wakes the event loop after each, however many writers wait::

    write ──▶ queue ──▶ owner thread: one transaction ──▶ event loop: wake its writers
    note  ──▶                 └── nothing to do: delete what is gone
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path

from attrs import define

from areal_actors.cache.journal.codec import Statement
from areal_actors.cache.journal.config import JournalConfig
from areal_actors.cache.journal.store import Store
from areal_actors.core import OwnThread
from areal_actors.core.loops import Signal, running_loop
from areal_actors.domain import Fact
from areal_actors.errors import JournalError

__all__ = ["SqliteJournal"]

_CHUNK = 64
"""Facts that are read before the event loop gets them."""
_BUSY_COMMITS = 32
"""Commits after which something is deleted even though more is to be written."""


@define(eq=False)
class _Handed:
    """What was handed over at once; ``signal`` is its writer's, if anybody waits."""

    facts: tuple[Fact, ...]
    signal: Signal | None = None
    error: JournalError | None = None


class SqliteJournal:
    """A ``Journal`` in an SQLite file. Made by ``open``, and used on the event loop that opened it.

    Facts that no journal can hold (metadata that is no JSON) fail their own ``write`` and no other; those of a
    ``note``, and whatever is the fault of the disk, fail everything that comes after.
    """

    def __init__(self, thread: OwnThread, config: JournalConfig) -> None:
        self._thread = thread
        self._config = config
        self._loop = running_loop()
        self._store: Store | None = None
        self._queue: deque[_Handed] = deque()
        self._is_posted = False
        self._is_closed = False
        self._failure: str | None = None
        self.num_commits = 0
        """Transactions so far; less than the writes where several became one."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: Path, config: JournalConfig | None = None, *, now: Callable[[], float] = time.time
    ) -> AsyncIterator[SqliteJournal]:
        """The journal at ``path``, made if there is none; leaving the block writes what was handed over.

        Raises:
            JournalError: it lies on a network filesystem, is in use, of a newer version, no journal, damaged, or cannot
                be written.
        """
        failure: Exception | None = None
        async with OwnThread.open() as thread:
            journal = cls(thread, config or JournalConfig())
            try:
                await thread.run(partial(journal._open, path, now))
                yield journal
            except Exception as error:  # noqa: BLE001 - raised below, where no task group wraps it
                failure = error
            finally:
                journal._is_closed = True
                thread.post(journal._close)
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------------------------ on the event loop

    async def write(self, *facts: Fact) -> None:
        """As ``Journal.write``. To wait here is the back-pressure of the disk."""
        signal = self._loop.new_signal()
        handed = _Handed(facts, signal)
        self._hand_over(handed)
        await signal.wait()
        if handed.error is not None:
            raise handed.error

    def note(self, *facts: Fact) -> None:
        """As ``Journal.note``: never raises, because whoever notes is about to end something and must end it."""
        with suppress(JournalError):  # that of a full queue is kept for the next write
            self._hand_over(_Handed(facts))

    async def read(self) -> AsyncIterator[Fact]:
        """As ``Journal.read``, a few facts at a time. Raises ``JournalError`` if the file is damaged."""
        facts: Iterator[Fact] | None = None

        def read_some() -> list[Fact]:
            nonlocal facts
            facts = facts or self._opened.read()
            return list(islice(facts, _CHUNK))

        while chunk := await self._thread.run(read_some):
            for fact in chunk:
                yield fact

    def _hand_over(self, handed: _Handed) -> None:
        if self._is_closed:
            raise JournalError("The journal is closed; nothing can be written to it any longer.")
        if len(self._queue) >= self._config.max_pending:
            self._failure = self._failure or (
                f"{len(self._queue)} writes to the journal wait for the disk, which seems to hang; look after it, then "
                "start the service again (journal.max_pending is the bound)."
            )
            raise JournalError(self._failure)
        self._queue.append(handed)
        if not self._is_posted:
            self._is_posted = True
            self._thread.post(self._commit)

    # ---------------------------------------------------------------------------------- on the owner thread

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "open() opens it before anybody has the journal"
        return self._store

    def _open(self, path: Path, now: Callable[[], float]) -> None:
        self._store = Store.open(path, self._config, now=now)
        self._thread.post(self._tidy)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _commit(self) -> None:
        """Write everything that waits, in one transaction, and wake whoever waits for it."""
        self._is_posted = False  # before the queue is emptied: who hands over now either is seen, or posts anew
        batch = self._take()
        statements = [statement for handed in batch for statement in self._encode(handed)]
        if statements and self._failure is None:
            try:
                self._opened.write(statements)
                self.num_commits += 1
            except JournalError as error:
                self._fail(batch, str(error))
        waiting = [handed.signal for handed in batch if handed.signal is not None]
        if waiting:
            self._loop.call_soon(partial(_wake, waiting))
        if not self._queue or self.num_commits % _BUSY_COMMITS == 0:
            self._tidy()

    def _take(self) -> list[_Handed]:
        batch: list[_Handed] = []
        while self._queue:
            batch.append(self._queue.popleft())
        return batch

    def _encode(self, handed: _Handed) -> Sequence[Statement]:
        if self._failure is None:
            try:
                return self._opened.encode(handed.facts)
            except JournalError as error:
                handed.error = error
                if handed.signal is None:
                    self._failure = str(error)
        else:
            handed.error = JournalError(self._failure)
        return ()

    def _fail(self, batch: Sequence[_Handed], reason: str) -> None:
        self._failure = reason
        for handed in batch:
            handed.error = handed.error or JournalError(reason)

    def _tidy(self) -> None:
        """Delete a little of what is gone, and come back to it when nothing else is to be done."""
        if self._store is None or self._failure is not None or not self._store.has_gone:
            return
        try:
            self._store.retire()
        except JournalError as error:
            self._failure = str(error)
        if not self._queue:
            self._thread.post(self._tidy)


def _wake(signals: Sequence[Signal]) -> None:
    for signal in signals:
        signal.set()
