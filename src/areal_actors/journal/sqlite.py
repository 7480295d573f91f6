"""The journal in a file: group commit, and the coordination between writers and the thread that owns the file.

One thread owns the file. Events that are handed over while it commits wait in a queue and go into the next commit
together; one call wakes the event loop after each commit, for all of its writers::

    write ──▶ queue ──▶ owner thread: one transaction ──▶ event loop: wake its writers
    note  ──▶                 └── nothing to do: delete what is gone

``SqliteJournal`` combines writes into transactions and wakes their writers. ``Store`` is the file as its owner thread
uses it, and blocks.

Data that is no longer needed is deleted, and the file shrunk, in small steps between commits. Deleted are sessions that
were forgotten and belong to no waiting group, and groups that were consumed at or below the newest saved version, once
their sessions are forgotten. The views in ``migrations`` define which rows these are.
"""

from __future__ import annotations

import heapq
import os
import socket
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Self

from attrs import define

from areal_actors.domain import GroupConsumed, GroupQueued, JournalEvent, SessionForgotten, VersionSaved
from areal_actors.errors import JournalError
from areal_actors.journal.codec import TABLES, Statement, Table, encode
from areal_actors.journal.config import JournalConfig, JournalSync
from areal_actors.journal.migrations import migrate
from areal_actors.kernel import OwnThread
from areal_actors.lib.locks import LockHeld, hold
from areal_actors.lib.loops import Signal, running_loop

__all__ = [
    "SqliteJournal",
    "Store",
    "count_waiting_groups",
    "delete_gone",
    "delete_orphans",
    "filesystem_of",
    "is_network",
    "shrink",
]


_CHUNK = 64
"""Number of events that are read before they are passed to the event loop."""
_BUSY_COMMITS = 32
"""Number of commits after which some data is deleted even though more events wait."""


@define(eq=False)
class _QueuedEvents:
    """Events that were handed over together; ``signal`` is set if a writer waits for them."""

    events: tuple[JournalEvent, ...]
    signal: Signal | None = None
    error: JournalError | None = None


class SqliteJournal:
    """A ``Journal`` in an SQLite file. Created by ``open``, and used on the event loop that opened it.

    Events that cannot be stored (metadata that is not JSON) fail only their own ``write``. In a ``note``, they fail
    everything that follows, and so do errors of the disk.
    """

    def __init__(self, thread: OwnThread, config: JournalConfig) -> None:
        self._thread = thread
        self._config = config
        self._loop = running_loop()
        self._store: Store | None = None
        self._queue: deque[_QueuedEvents] = deque()
        self._is_scheduled = False
        self._is_posted = False
        self._is_closed = False
        self._failure: str | None = None
        self.num_commits = 0
        """Number of transactions so far; smaller than the number of writes if some were combined."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: Path, config: JournalConfig | None = None, *, now: Callable[[], float] = time.time
    ) -> AsyncIterator[SqliteJournal]:
        """Open the journal at ``path``, creating it if necessary. Leaving the block writes all events handed over.

        Raises:
            JournalError: the file is on a network filesystem, is in use, has a newer version, is not a journal, is
                damaged, or cannot be written.
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
                journal._post()
                journal._is_closed = True
                thread.post(journal._close)
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------------------------ on the event loop

    async def write(self, *events: JournalEvent) -> None:
        """Write as ``Journal.write``. Waiting here is the back-pressure of the disk."""
        signal = self._loop.new_signal()
        handed = _QueuedEvents(events, signal)
        self._hand_over(handed)
        await signal.wait()
        if handed.error is not None:
            raise handed.error

    def note(self, *events: JournalEvent) -> None:
        """Write as ``Journal.note``.

        It never raises, because its callers are about to end something and must complete that.
        """
        # The error of a full queue is kept for the next write.
        with suppress(JournalError):
            self._hand_over(_QueuedEvents(events))

    async def read(self) -> AsyncIterator[JournalEvent]:
        """Read as ``Journal.read``, a few events at a time. Raises ``JournalError`` if the file is damaged."""
        events: Iterator[JournalEvent] | None = None

        def read_some() -> list[JournalEvent]:
            nonlocal events
            events = events or self._opened.read()
            return list(islice(events, _CHUNK))

        while chunk := await self._thread.run(read_some):
            for event in chunk:
                yield event

    def _hand_over(self, handed: _QueuedEvents) -> None:
        if self._is_closed:
            raise JournalError("The journal is closed; nothing can be written to it any longer.")
        if len(self._queue) >= self._config.max_pending:
            self._failure = self._failure or (
                f"{len(self._queue)} writes to the journal wait for the disk, which seems to hang; look after it, then "
                "start the service again (journal.max_pending is the bound)."
            )
            raise JournalError(self._failure)
        self._queue.append(handed)
        if not self._is_scheduled:
            # Once everything has run that is ready now: many sessions hand over their turns in one pass of the event
            # loop, and the thread would otherwise commit the first of them alone.
            self._is_scheduled = True
            self._loop.call_soon_here(self._post)

    def _post(self) -> None:
        self._is_scheduled = False
        if self._queue and not self._is_posted and not self._is_closed:
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
        """Write all waiting events in one transaction, and wake their writers."""
        # Reset before the queue is emptied: a later event is in this batch, or posts again.
        self._is_posted = False
        batch: list[_QueuedEvents] = []
        while self._queue:
            batch.append(self._queue.popleft())
        statements = [statement for handed in batch for statement in self._encode(handed)]
        if statements and self._failure is None:
            try:
                self._opened.write(statements)
                self.num_commits += 1
            except JournalError as error:
                self._failure = str(error)
                for handed in batch:
                    handed.error = handed.error or JournalError(self._failure)
        waiting = [handed.signal for handed in batch if handed.signal is not None]
        if waiting:
            self._loop.call_soon(partial(_wake, waiting))
        # Under constant load the queue is never empty, and nothing would ever be deleted.
        if not self._queue or self.num_commits % _BUSY_COMMITS == 0:
            self._tidy()

    def _encode(self, handed: _QueuedEvents) -> Sequence[Statement]:
        if self._failure is None:
            try:
                return self._opened.encode(handed.events)
            except JournalError as error:
                handed.error = error
                if handed.signal is None:
                    self._failure = str(error)
        else:
            handed.error = JournalError(self._failure)
        return ()

    def _tidy(self) -> None:
        """Delete some unneeded data, and post another call if the queue is empty."""
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


_PAGE = 64
"""Number of rows that are read at a time."""
_BUSY_SECONDS = 30.0
"""How long a commit waits for another program that writes to the file by SQL."""
_MAX_WAL_BYTES = 16 << 20
_DAY_SECONDS = 86_400.0
_RETIRING = (SessionForgotten, GroupConsumed, GroupQueued, VersionSaved)
"""Events after which there may be data to delete."""


class Store:
    """An open journal. Created by ``open``; belongs to the thread that opened it."""

    def __init__(self, path: Path, config: JournalConfig, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self._config = config
        self._now = now
        self._stack = ExitStack()
        self._connection: sqlite3.Connection
        self._seq = 0
        self._fence = 0
        self.has_gone = True
        """Whether there may be data to delete."""

    @classmethod
    def open(cls, path: Path, config: JournalConfig, *, now: Callable[[], float] = time.time) -> Self:
        """Open the journal at ``path`` for this process alone, creating it if necessary.

        Raises:
            JournalError: the file is on a network filesystem, is in use, has a newer version, is not a journal, is
                damaged, or cannot be written.
        """
        store = cls(path, config, now=now)
        try:
            store._open()
        except (sqlite3.Error, OSError) as error:
            store.close()
            raise store._explained(error, "opened") from error
        except JournalError:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close the file and release its lock."""
        self._stack.close()

    # ---------------------------------------------------------------------------------------------- opening

    def _open(self) -> None:
        path = self.path = self.path.resolve()
        is_shared = is_network(filesystem_of(path))
        if is_shared and not self._config.allow_shared:
            raise JournalError(
                f"{path} lies on a network filesystem ({filesystem_of(path)}), where locks may be lost. Set "
                "journal.path to a local disk, or journal.allow_shared if no other machine uses it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._stack.enter_context(hold(path.with_name(f"{path.name}.lock")))
        except LockHeld as held:
            raise JournalError(
                f"{path} is in use by {held.holder}. Two services cannot share a journal: end the other one, or give "
                "this one another trial name or journal.path."
            ) from None
        # Conversations and the digests of keys. SQLite gives its further files the mode of this one.
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, cached_statements=64)
        self._stack.callback(self._connection.close)
        self._set_up(is_shared=is_shared)
        try:
            migrate(self._connection)
        except JournalError as error:
            raise JournalError(f"{path} cannot be used as a journal. {error}") from None
        self._connection.execute("BEGIN IMMEDIATE")
        # A lock can be lost on a network filesystem; the fence makes the next write of the former owner fail.
        self._fence = self._value("SELECT ifnull(max(value), 0) FROM meta WHERE key = 'fence'") + 1
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        rows = [("fence", self._fence), ("owner", owner), ("opened_at", self._now())]
        self._connection.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", rows)
        delete_orphans(self._connection)
        self._connection.execute("COMMIT")
        self._seq = max(self._value(f"SELECT ifnull(max(seq), 0) FROM {table.name}") for table in TABLES)  # noqa: S608

    def _set_up(self, *, is_shared: bool) -> None:
        run = self._connection.execute
        # This takes effect on a new file only.
        run("PRAGMA auto_vacuum = INCREMENTAL")
        # A write-ahead log needs memory shared by all readers, which several machines do not have.
        mode = run(f"PRAGMA journal_mode = {'TRUNCATE' if is_shared else 'WAL'}").fetchone()[0]
        if not is_shared and mode != "wal":
            raise JournalError(
                f"{self.path} lies on a filesystem without shared memory, which its write-ahead log needs. Set "
                "journal.path to a local disk."
            )
        run(f"PRAGMA synchronous = {'FULL' if self._config.sync is JournalSync.FULL else 'NORMAL'}")
        run(f"PRAGMA journal_size_limit = {_MAX_WAL_BYTES}")

    def _value(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    # ---------------------------------------------------------------------------------------------- writing

    def encode(self, events: Sequence[JournalEvent]) -> Sequence[Statement]:
        """Return the statements that write ``events`` after everything that was encoded before.

        Raises:
            JournalError: one of them holds a value that cannot be stored.
        """
        now = self._now()
        statements = [each for seq, event in enumerate(events, self._seq + 1) for each in encode(event, seq, now)]
        self._seq += len(events)
        self.has_gone = self.has_gone or any(isinstance(event, _RETIRING) for event in events)
        return statements

    def write(self, statements: Sequence[Statement]) -> None:
        """Execute ``statements`` in one transaction: all, or none if it raises.

        Raises:
            JournalError: they could not be written, or another process took the file over.
        """
        with self._transaction():
            # ``executemany`` prepares a statement once for a run of equal ones.
            for sql, same in groupby(statements, itemgetter(0)):
                self._connection.executemany(sql, map(itemgetter(1), same))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Open a transaction for the block. Raises ``JournalError`` if another process has taken the file over."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._check_fence()
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                try:
                    self._connection.execute("ROLLBACK")
                except sqlite3.Error:
                    # The disk failed. The next process that opens the file rolls the transaction back.
                    self._connection.close()
            if isinstance(error, (sqlite3.Error, OverflowError)):
                raise self._explained(error, "written") from error
            raise

    def _check_fence(self) -> None:
        if self._value("SELECT value FROM meta WHERE key = 'fence'") != self._fence:
            owner = self._connection.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()[0]
            raise JournalError(
                f"{self.path} was taken over by {owner}; nothing may be written to it from here. End this service."
            )

    def retire(self) -> None:
        """Delete some data that is no longer needed; ``has_gone`` says whether there may be more."""
        days = self._config.retention_days
        until = self._now() - days * _DAY_SECONDS if days else float("inf")
        with self._transaction():
            has_more = delete_gone(self._connection, until=until)
        try:
            is_large = shrink(self._connection)
        except sqlite3.Error as error:
            raise self._explained(error, "written") from error
        self.has_gone = has_more or is_large

    # ---------------------------------------------------------------------------------------------- reading

    def read(self) -> Iterator[JournalEvent]:
        """Yield the events to restore, in order.

        No cursor stays open between two events, so writes are possible meanwhile.

        Raises:
            JournalError: the file is damaged.
        """
        pages = [self._rows(number, table) for number, table in enumerate(TABLES)]
        for _, number, row in heapq.merge(*pages):
            table = TABLES[number]
            try:
                yield table.decode(dict(zip(table.columns, row, strict=True)))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise JournalError(
                    f"{self.path} is damaged: a row of {table.name} with {table.key[0]} {row[0]!r} cannot be read "
                    f"({error!r}). Move the file away, or delete the row."
                ) from error

    def _rows(self, number: int, table: Table) -> Iterator[tuple[int, int, tuple[object, ...]]]:
        seq = 0
        while True:
            try:
                rows = self._connection.execute(table.page, (seq, _PAGE)).fetchall()
            except sqlite3.Error as error:
                raise self._explained(error, "read") from error
            for seq, *row in rows:
                yield seq, number, tuple(row)
            if len(rows) < _PAGE:
                return

    # ----------------------------------------------------------------------------------------------- errors

    def _explained(self, error: BaseException, verb: str) -> JournalError:
        name = getattr(error, "sqlite_errorname", "") or ""
        reason = f"{error}" if not name else f"{error}, {name}"
        unusable = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")
        if isinstance(error, OSError) or name.startswith(unusable):
            advice = "Make the file and its directory writable, or set journal.path."
        elif name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            advice = "It is damaged, or no journal: move it away to begin a new one; .recover of the sqlite3 shell may "
            advice += "save it."
        elif name.startswith("SQLITE_BUSY"):
            advice = "Another program writes to it: end that program, and start this service again."
        else:
            advice = "Free some space, or look after the disk; then start the service again, which goes on from what "
            advice += "was written."
        return JournalError(f"{self.path} could not be {verb} ({reason}). {advice}")


def count_waiting_groups(path: Path) -> int:
    """Return how many groups of a journal that no process has open are in no saved version; 0 if it cannot be read."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            found: int = connection.execute("SELECT count(*) FROM waiting_groups").fetchone()[0]
            return found
    except sqlite3.Error:
        return 0


_BATCH = 64
"""Sessions that one transaction deletes: a few milliseconds for conversations of several turns."""
_RESERVE = 256
"""Free pages that are kept for later rows: a megabyte."""
_PAGES = 256
_OF_SESSIONS = ("turns", "rewards", "endings", "sessions", "forgotten")
_OF_GROUPS = ("group_sessions", "groups", "consumed")


def delete_gone(connection: sqlite3.Connection, *, until: float, limit: int = _BATCH) -> bool:
    """Delete some of the data that was consumed or forgotten before ``until``; return whether there may be more.

    Call it within a transaction.
    """
    done = connection.execute("SELECT group_id FROM finished_groups WHERE consumed_at <= ? LIMIT ?", (until, limit))
    num_groups = _delete(connection, _OF_GROUPS, "group_id", done.fetchall())
    gone = connection.execute("SELECT session FROM gone_sessions WHERE forgotten_at <= ? LIMIT ?", (until, limit))
    num_sessions = _delete(connection, _OF_SESSIONS, "session", gone.fetchall())
    connection.execute("DELETE FROM steps WHERE version <= (SELECT max(version) FROM saved_versions)")
    connection.execute("DELETE FROM saved_versions WHERE version < (SELECT max(version) FROM saved_versions)")
    return limit in (num_groups, num_sessions)


def _delete(connection: sqlite3.Connection, tables: Sequence[str], key: str, values: list[tuple[object]]) -> int:
    for table in tables if values else ():
        connection.executemany(f"DELETE FROM {table} WHERE {key} = ?", values)  # noqa: S608 - names of ours
    return len(values)


def delete_orphans(connection: sqlite3.Connection) -> None:
    """Delete rows that arrived after their session was forgotten. Call it within a transaction."""
    for table in ("turns", "rewards", "endings", "forgotten"):
        connection.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT session FROM sessions)")  # noqa: S608


def shrink(connection: sqlite3.Connection) -> bool:
    """Return some free pages to the filesystem if there are many; return whether there are more."""
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    surplus = num_free - max(_RESERVE, num_pages // 4)
    if surplus <= 0:
        return False
    # ``executescript`` steps the statement to its end; ``execute`` would step it once, which frees one page.
    connection.executescript(f"PRAGMA incremental_vacuum({min(surplus, _PAGES)})")
    return bool(surplus > _PAGES)


_NETWORK = (
    *("afs", "beegfs", "ceph", "cifs", "coda", "gcsfuse", "gfs2", "glusterfs", "gpfs", "juicefs"),
    *("lustre", "mountpoint-s3", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs"),
    *("pvfs2", "s3fs", "smb3", "smbfs", "sshfs", "wekafs"),
)
_MOUNTS = Path("/proc/mounts")


def is_network(filesystem: str) -> bool:
    """Return whether filesystems of this type can be mounted on several machines. ``fuse.sshfs`` counts as sshfs."""
    return filesystem.removeprefix("fuse.") in _NETWORK


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Return the type of the filesystem that contains ``path``, according to the kernel's table ``mounts``.

    Returns an empty string if the system has no such table.
    """
    if mounts is None:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape") if _MOUNTS.exists() else ""
    found = Path(), ""
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(code, character)
        mounted = Path(point)
        # Of several mounts on one directory, the last one is visible.
        if path.is_relative_to(mounted) and len(mounted.parts) >= len(found[0].parts):
            found = mounted, kind
    return found[1]
