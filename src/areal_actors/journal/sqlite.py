"""The journal in an SQLite file, which one thread owns.

Writers hand their events to the thread and wait. The thread writes everything that was handed over meanwhile in one
transaction, so that many writers share one commit, and wakes them::

    write ──▶ queue ──▶ owner thread: one transaction per batch ──▶ event loop: wake the writers
    note ───▶   │                       └── nothing to do: delete what is gone
                └── beyond a bound, the disk counts as hung, and the journal as broken

``SqliteJournal`` is the part on the event loop; ``Store`` is the file, and blocks. Data that is no longer needed is
deleted in small steps between transactions: sessions that were forgotten and belong to no waiting
group, and groups that were consumed at or below the newest saved version, once their sessions are forgotten. The views
in ``tables`` define which rows these are.
"""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from attrs import define

from areal_actors.domain import GroupConsumed, GroupQueued, JournalEvent, SessionForgotten, VersionSaved
from areal_actors.errors import JournalError, ProtocolError
from areal_actors.journal.config import JournalConfig, JournalSync
from areal_actors.journal.tables import (
    SELECT_EVENTS,
    TABLES,
    RefusedEvent,
    create_tables,
    decode_row,
    encode_event,
)
from areal_actors.kernel import OwnThread
from areal_actors.kernel.remote.codec import Codec
from areal_actors.lib.locks import LockHeld, hold
from areal_actors.lib.loops import Signal, running_loop
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

MAX_PENDING = 100_000
"""Events that may wait for the thread. Beyond it, the disk counts as hung."""
BUSY_SECONDS = 30.0
"""How long a commit waits for another program that writes to the file by SQL."""
_PAGE = 64
"""Number of rows that are read at a time."""


@define(eq=False)
class _Write:
    """Events that were handed over together: all of them are written, or none."""

    events: Sequence[JournalEvent]
    signal: Signal | None
    """``None`` for a note."""
    error: JournalError | None = None


class SqliteJournal:
    """A ``Journal`` in an SQLite file. Created by ``open``, and used on the event loop that opened it.

    Events that cannot be stored (metadata that is not JSON, integers of more than 64 bits) fail only their own
    ``write``. In a ``note``, they fail everything that follows, and so do errors of the disk.
    """

    def __init__(self, thread: OwnThread, *, max_pending: int) -> None:
        self._thread = thread
        self._loop = running_loop()
        self._store: Store | None = None
        self._is_closed = False
        self.failure: str | None = None
        """As ``Journal.failure``."""
        self._is_broken = False
        """Whether the file cannot be written. A disk that hangs is a failure, too, but may write what waits for it."""
        self._waiting: deque[_Write] = deque()
        self._is_posted = False
        self._max_pending = max_pending
        self._num_handed_over = self._num_done = 0
        self.num_commits = 0
        """Number of transactions so far; smaller than the number of writes if some were written together."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path,
        config: JournalConfig | None = None,
        *,
        now: Callable[[], float] = time.time,
        max_pending: int = MAX_PENDING,
        busy_seconds: float = BUSY_SECONDS,
    ) -> AsyncIterator[SqliteJournal]:
        """Open the journal at ``path``, creating it if necessary. Leaving the block writes all events handed over.

        Raises:
            JournalError: the file is in use, was written by another release, is not a
                journal, is damaged, or cannot be written.
        """
        async with OwnThread.open() as thread:
            journal = cls(thread, max_pending=max_pending)

            def open_store() -> None:
                journal._store = Store.open(path, config or JournalConfig(), now=now, busy_seconds=busy_seconds)
                thread.post(journal._tidy)

            try:
                await thread.run(open_store)
                yield journal
            finally:
                journal._is_closed = True
                thread.post(journal._close)

    # ------------------------------------------------------------------------------------ on the event loop

    async def write(self, *events: JournalEvent) -> None:
        """Write as ``Journal.write``."""
        signal = self._loop.new_signal()
        write = self._hand_over(events, signal)
        await signal.wait()
        if write.error is not None:
            raise write.error

    def note(self, *events: JournalEvent) -> None:
        """Write as ``Journal.note``.

        It never raises, because its callers are about to end something and must complete that.
        """
        try:
            self._hand_over(events, None)
        except JournalError as error:
            self.failure = self.failure or str(error)

    async def read(self) -> AsyncIterator[JournalEvent]:
        """Read as ``Journal.read``, a few events at a time. Raises ``JournalError`` if the file is damaged."""
        seq = 0
        while True:
            page = await self._thread.run(partial(self._opened.read_page, seq))
            for seq, event in page:  # noqa: B007 - the last number is where the next page begins
                yield event
            if len(page) < _PAGE:
                return

    def _hand_over(self, events: Sequence[JournalEvent], signal: Signal | None) -> _Write:
        if self._is_closed:
            raise JournalError("The journal is closed; nothing can be written to it any longer.")
        if self.failure is not None:
            raise JournalError(self.failure)
        if self._num_handed_over - self._num_done + len(events) > self._max_pending:
            self.failure = (
                f"{self._max_pending} events wait to be written to {self._opened.path}: the disk seems to hang, or "
                "another program writes to the file. Check both, then start the service again."
            )
            raise JournalError(self.failure)
        write = _Write(events, signal)
        self._num_handed_over += len(events)
        self._waiting.append(write)
        if not self._is_posted:
            self._is_posted = True
            self._thread.post(self._write_waiting)
        return write

    # ---------------------------------------------------------------------------------- on the owner thread

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "open() opens it before it yields the journal"
        return self._store

    def _write_waiting(self) -> None:
        """Write what was handed over in one transaction, wake the writers, and delete some unneeded data."""
        # Reset before the writes are taken: a later one is among them, or posts again.
        self._is_posted = False
        writes: list[_Write] = []
        while self._waiting:
            writes.append(self._waiting.popleft())
        self._commit(writes)
        self._num_done += sum(len(write.events) for write in writes)
        self._loop.call_soon(partial(_wake, writes))
        self._tidy()

    def _commit(self, writes: Sequence[_Write]) -> None:
        # After an error of the disk, the file stays as it is, for the next process that opens the journal.
        if self._is_broken:
            self._fail(writes)
            return
        try:
            self._opened.write([event for write in writes for event in write.events])
            self.num_commits += 1
        except RefusedEvent as error:
            if len(writes) > 1:
                # Rare, so the others need not be quick. In order, because nothing after a note that fails is written.
                for write in writes:
                    self._commit([write])
            elif writes[0].signal is None:
                self._break(str(error))
            else:
                writes[0].error = error
        except JournalError as error:
            self._break(str(error))
            self._fail(writes)

    def _break(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._is_broken = True

    def _fail(self, writes: Sequence[_Write]) -> None:
        for write in writes:
            write.error = JournalError(str(self.failure))

    def _tidy(self) -> None:
        """Delete some unneeded data, and post another call if there may be more."""
        if self._store is None or self._is_broken or not self._store.has_gone:
            return
        try:
            self._store.retire()
        except JournalError as error:
            self._break(str(error))
        self._thread.post(self._tidy)

    def _close(self) -> None:
        if self._store is not None:
            self._write_waiting()
            self._store.close()
            self._store = None


def _wake(writes: Sequence[_Write]) -> None:
    for write in writes:
        if write.signal is not None:
            write.signal.set()


_MAX_WAL_BYTES = 16 << 20
_DAY_SECONDS = 86_400.0
_RETIRING = (SessionForgotten, GroupConsumed, GroupQueued, VersionSaved)
"""Events after which there may be data to delete."""
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors that the permissions of the files do not explain."""
_REFUSED = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError)
"""Errors of a value that SQLite cannot store."""
_BATCH = 64
"""Sessions that one transaction deletes: a few milliseconds for conversations of several turns."""
_OF_SESSIONS = ("turns", "rewards", "endings", "sessions", "forgotten")
_OF_GROUPS = ("group_sessions", "groups", "consumed")


class Store:
    """The file of an open journal. Created by ``open``, and used by the thread that opened it."""

    def __init__(self, path: Path, config: JournalConfig, *, now: Callable[[], float], busy_seconds: float) -> None:
        self.path = path
        self._config = config
        self._now = now
        self._busy_seconds = busy_seconds
        self._stack = ExitStack()
        self._connection: sqlite3.Connection
        self._codec = Codec()
        self._seq = 0
        self._fence = 0
        self.has_gone = True
        """Whether there may be data to delete."""

    @classmethod
    def open(
        cls,
        path: Path,
        config: JournalConfig,
        *,
        now: Callable[[], float] = time.time,
        busy_seconds: float = BUSY_SECONDS,
    ) -> Self:
        """Open the journal at ``path`` for this process alone, as ``SqliteJournal.open``. Raises ``JournalError``."""
        store = cls(path.resolve(), config, now=now, busy_seconds=busy_seconds)
        try:
            store._open()
        except BaseException as error:
            store.close()
            if isinstance(error, (sqlite3.Error, OSError)):
                raise store._explained(error, "opened") from error
            raise
        return store

    def close(self) -> None:
        """Close the file and release the lock."""
        self._stack.close()

    def _open(self) -> None:
        path, kind = self.path, filesystem_of(self.path)
        is_shared = is_network(kind)
        if is_shared:
            detail = "Locks may be lost there, and every commit waits for the server. A local disk is safer and faster."
            _log.warning("journal_on_network_filesystem", path=str(path), filesystem=kind, detail=detail)
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
        self._connection = sqlite3.connect(path, timeout=self._busy_seconds, isolation_level=None, cached_statements=64)
        self._stack.callback(self._connection.close)
        self._set_up(is_shared=is_shared)
        try:
            create_tables(self._connection)
        except JournalError as error:
            raise JournalError(f"{path} cannot be used as a journal. {error}") from None
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        # A lock can be lost on a network filesystem; the fence makes the next write of the former owner fail.
        self._fence = self._value("SELECT ifnull(max(value), 0) FROM meta WHERE key = 'fence'") + 1
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        rows = [("fence", self._fence), ("owner", owner), ("opened_at", self._now())]
        self._connection.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", rows)
        # Rows that arrived after their session was forgotten and deleted.
        for table in ("turns", "rewards", "endings", "forgotten"):
            run(f"DELETE FROM {table} WHERE session NOT IN (SELECT session FROM sessions)")  # noqa: S608
        run("COMMIT")
        self._seq = max(self._value(f"SELECT ifnull(max(seq), 0) FROM {table.name}") for table in TABLES)  # noqa: S608

    def _set_up(self, *, is_shared: bool) -> None:
        run = self._connection.execute
        # A write-ahead log needs memory shared by all readers, which several machines do not have.
        mode = run(f"PRAGMA journal_mode = {'TRUNCATE' if is_shared else 'WAL'}").fetchone()[0]
        if not is_shared and mode != "wal":
            raise JournalError(
                f"{self.path} lies on a filesystem without shared memory, which its write-ahead log needs. Set "
                "journal.path to a local disk."
            )
        # On a network filesystem, another machine reads only what has left this one.
        is_synced = is_shared or self._config.sync == JournalSync.FULL
        run(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
        run(f"PRAGMA journal_size_limit = {_MAX_WAL_BYTES}")

    def _value(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    # ---------------------------------------------------------------------------------------------- writing

    def write(self, events: Sequence[JournalEvent]) -> None:
        """Write ``events`` in one transaction.

        Raises:
            RefusedEvent: one of them holds a value that cannot be stored. Nothing was written, and others can be.
            JournalError: they could not be written, or another process took the journal over.
        """
        seq, now = self._seq, self._now()
        try:
            with self._transaction():
                for event in events:
                    self._seq += 1
                    self._insert(event, now)
        except RefusedEvent:
            self._seq = seq
            raise

    def _insert(self, event: JournalEvent, now: float) -> None:
        try:
            for sql, values in encode_event(self._codec, event, self._seq, now):
                self._connection.execute(sql, values)
        except _REFUSED as error:
            raise RefusedEvent(f"A {type(event).__name__} cannot be written to the journal: {error}.") from error
        self.has_gone = self.has_gone or isinstance(event, _RETIRING)

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
            if isinstance(error, sqlite3.Error):
                raise self._explained(error, "written") from error
            raise

    def _check_fence(self) -> None:
        if self._value("SELECT value FROM meta WHERE key = 'fence'") != self._fence:
            (owner,) = self._connection.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
            raise JournalError(
                f"{self.path} was taken over by {owner}; nothing may be written to it from here. End this service."
            )

    def retire(self) -> None:
        """Delete some data that is no longer needed; ``has_gone`` says whether there may be more."""
        days, run = self._config.retention_days, self._connection.execute
        until = self._now() - days * _DAY_SECONDS if days else float("inf")
        queries = (
            (_OF_GROUPS, "group_id", "SELECT group_id FROM finished_groups WHERE consumed_at <= ? LIMIT ?"),
            (_OF_SESSIONS, "session", "SELECT session FROM gone_sessions WHERE forgotten_at <= ? LIMIT ?"),
        )
        has_more = False
        with self._transaction():
            for tables, key, query in queries:
                gone = run(query, (until, _BATCH)).fetchall()
                has_more = has_more or len(gone) == _BATCH
                for table in tables:
                    self._connection.executemany(f"DELETE FROM {table} WHERE {key} = ?", gone)  # noqa: S608
            run("DELETE FROM steps WHERE version <= (SELECT max(version) FROM saved_versions)")
            run("DELETE FROM saved_versions WHERE version < (SELECT max(version) FROM saved_versions)")
        self.has_gone = has_more

    # ---------------------------------------------------------------------------------------------- reading

    def read_page(self, seq: int, size: int = _PAGE) -> list[tuple[int, JournalEvent]]:
        """Return the next events to restore after number ``seq``, each with its number; fewer than ``size`` at the end.

        Raises:
            JournalError: the file is damaged.
        """
        try:
            rows = self._connection.execute(SELECT_EVENTS, (seq, size)).fetchall()
        except sqlite3.Error as error:
            raise self._explained(error, "read") from error
        page: list[tuple[int, JournalEvent]] = []
        for number, table, *row in rows:
            try:
                page.append((number, decode_row(self._codec, table, *row)))
            except (ProtocolError, ValueError, TypeError) as error:
                raise JournalError(
                    f"{self.path} is damaged: the row of {table} with seq {number} cannot be read ({error}). Move the "
                    "file away, or delete the row."
                ) from error
        return page

    # ----------------------------------------------------------------------------------------------- errors

    def _explained(self, error: BaseException, verb: str) -> JournalError:
        name = getattr(error, "sqlite_errorname", "") or ""
        reason = f"{error}" if not name else f"{error}, {name}"
        unusable = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")
        is_disk = isinstance(error, OSError) and error.errno in _DISK
        if (isinstance(error, OSError) and not is_disk) or name.startswith(unusable):
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
