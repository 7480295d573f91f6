"""The journal in files: a log that events are appended to, and the SQLite file into which they are moved.

An event is durable once it is in the log, which its writer appends on the event loop, in some microseconds. Every
second, and when it is large, the log continues in a new file, and the thread that owns the SQLite file executes the
statements of the former one in a transaction and removes it::

    write, note ──▶ append to the log ─┬─▶ return
                                       └─▶ (sync: full) owner thread: sync the log ──▶ event loop: wake the writers
    each second ──▶ next file of the log ──▶ owner thread: one transaction, remove the former file
                                                        └── nothing to do: delete what is gone

``SqliteJournal`` coordinates both; ``Store`` is the files, and blocks.

Data that is no longer needed is deleted, and the file shrunk, in small steps between transactions. Deleted are sessions
that were forgotten and belong to no waiting group, and groups that were consumed at or below the newest saved version,
once their sessions are forgotten. The views in ``migrations`` define which rows these are.
"""

from __future__ import annotations

import errno
import glob
import heapq
import os
import socket
import sqlite3
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Self
from zlib import crc32

import anyio
import msgspec
from attrs import define, field

from areal_actors.domain import JournalEvent
from areal_actors.errors import JournalError
from areal_actors.journal.codec import TABLES, Sql, Statement, Table, encode
from areal_actors.journal.config import JournalConfig, JournalSync
from areal_actors.journal.migrations import migrate
from areal_actors.kernel import OwnThread
from areal_actors.lib.atomic_write import sync_path
from areal_actors.lib.locks import LockHeld, hold
from areal_actors.lib.loops import Signal, running_loop
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger

__all__ = [
    "SqliteJournal",
    "Store",
    "count_waiting_groups",
    "delete_gone",
    "delete_orphans",
    "filesystem_of",
    "find_logs",
    "is_network",
    "settle",
    "shrink",
]

_log = get_logger(__name__)

_CHUNK = 64
"""Number of events that are read before they are passed to the event loop."""
_MOVE_SECONDS = 1.0
"""How long an event may be in the log only, where no reader of SQL sees it."""


@define(eq=False)
class _Writer:
    """A writer that waits until the log is on the disk."""

    signal: Signal
    error: JournalError | None = None


class SqliteJournal:
    """A ``Journal`` in an SQLite file and a log. Created by ``open``, and used on the event loop that opened it.

    Events that cannot be stored (metadata that is not JSON, integers of more than 64 bits) fail only their own
    ``write``. In a ``note``, they fail everything that follows, and so do errors of the disk.
    """

    def __init__(self, thread: OwnThread, config: JournalConfig) -> None:
        self._thread = thread
        self._loop = running_loop()
        self._store: Store | None = None
        self._is_closed = False
        self.failure: str | None = None
        """As ``Journal.failure``."""
        self._is_synced = config.sync == JournalSync.FULL
        self._waiting: deque[_Writer] = deque()
        self._is_posted = False
        self._appended = anyio.Event()
        self.num_syncs = 0
        """How often writers waited for the disk so far; smaller than the number of writes if some waited together."""

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
        config = config or JournalConfig()
        async with OwnThread.open() as thread, open_tasks() as tasks:
            journal = cls(thread, config)
            try:
                await thread.run(partial(journal._open, path, config, now))
                tasks.start_soon(journal._move_regularly)
                yield journal
            finally:
                tasks.cancel_scope.cancel()
                journal._is_closed = True
                thread.post(journal._close)

    # ------------------------------------------------------------------------------------ on the event loop

    def try_write(self, *events: JournalEvent) -> bool:
        """Write as ``Journal.try_write``: unless the log has to be synced."""
        if self._is_synced:
            return False
        self._append(events)
        return True

    async def write(self, *events: JournalEvent) -> None:
        """Write as ``Journal.write``. It waits only where the log has to be synced."""
        self._append(events)
        if not self._is_synced:
            return
        writer = _Writer(self._loop.new_signal())
        self._waiting.append(writer)
        if not self._is_posted:
            self._is_posted = True
            self._thread.post(self._sync)
        await writer.signal.wait()
        if writer.error is not None:
            raise writer.error

    def note(self, *events: JournalEvent) -> None:
        """Write as ``Journal.note``.

        It never raises, because its callers are about to end something and must complete that.
        """
        try:
            self._append(events)
        except JournalError as error:
            self.failure = self.failure or str(error)

    async def read(self) -> AsyncIterator[JournalEvent]:
        """Read as ``Journal.read``, a few events at a time. Raises ``JournalError`` if the file is damaged."""
        self._opened.next_log()
        self._thread.post(self._move)
        events: Iterator[JournalEvent] | None = None

        def read_some() -> list[JournalEvent]:
            nonlocal events
            events = events or self._opened.read()
            return list(islice(events, _CHUNK))

        while chunk := await self._thread.run(read_some):
            for event in chunk:
                yield event

    def _append(self, events: Sequence[JournalEvent]) -> None:
        if self._is_closed:
            raise JournalError("The journal is closed; nothing can be written to it any longer.")
        if self.failure is not None:
            raise JournalError(self.failure)
        store = self._opened
        statements = store.encode(events)
        try:
            is_due = store.append(statements)
        except ValueError as error:
            raise JournalError(str(error)) from error
        except JournalError as error:
            self.failure = str(error)
            raise
        if is_due:
            store.next_log()
            self._thread.post(self._move)
        elif not self._appended.is_set():
            self._appended.set()

    async def _move_regularly(self) -> None:
        while True:
            await self._appended.wait()
            await anyio.sleep(_MOVE_SECONDS)
            self._appended = anyio.Event()
            self._opened.next_log()
            self._thread.post(self._move)

    # ---------------------------------------------------------------------------------- on the owner thread

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "open() opens it before anybody has the journal"
        return self._store

    def _open(self, path: Path, config: JournalConfig, now: Callable[[], float]) -> None:
        self._store = Store.open(path, config, now=now)
        # On a network filesystem, another machine reads what has left this one.
        self._is_synced = self._is_synced or self._store.is_shared
        self._thread.post(self._tidy)

    def _close(self) -> None:
        if self._store is not None:
            self._store.next_log()
            self._move()
            self._store.close()
            self._store = None

    def _sync(self) -> None:
        """Wait for the disk, and wake the writers that had appended before."""
        # Reset before the writers are taken: a later one is among them, or posts again.
        self._is_posted = False
        writers: list[_Writer] = []
        while self._waiting:
            writers.append(self._waiting.popleft())
        try:
            self._opened.sync()
            self.num_syncs += 1
        except JournalError as error:
            self.failure = self.failure or str(error)
        if self.failure is not None:
            for writer in writers:
                writer.error = JournalError(self.failure)
        self._loop.call_soon(partial(_wake, [writer.signal for writer in writers]))

    def _move(self) -> None:
        """Execute the statements of the log's former files, and delete some unneeded data."""
        try:
            # After an error of the disk, the log stays as it is, for the next process that opens the journal.
            if self.failure is None:
                self._opened.move()
        except JournalError as error:
            self.failure = str(error)
        self._tidy()

    def _tidy(self) -> None:
        """Delete some unneeded data, and post another call if there may be more."""
        if self._store is None or self.failure is not None or not self._store.has_gone:
            return
        try:
            self._store.retire()
        except JournalError as error:
            self.failure = str(error)
        self._thread.post(self._tidy)


def _wake(signals: Sequence[Signal]) -> None:
    for signal in signals:
        signal.set()


_HEAD = struct.Struct("<II")
_ENCODER = msgspec.msgpack.Encoder()


@define(eq=False)
class LogFile:
    """A file of the log, open for appending. Created by ``create``. One thread appends, another one syncs.

    It is a sequence of frames::

        length, CRC-32 (uint32 each, little-endian) │ msgpack: [number of the last event, [[statement, values], ...]]

    The text of a statement stands in the first frame of a file that uses it, in later ones its number. So a later
    version of this program can execute what an earlier one had appended. The first frame has no statements, and the
    number of the last event before the file: a file that is missing is noticed.
    """

    path: Path
    descriptor: int
    size: int = field(default=0, init=False)
    is_dirty: bool = field(default=False, init=False)
    """Whether something was appended since the last sync."""
    _is_named: bool = field(default=False, init=False)
    _numbers: dict[str, int] = field(factory=dict, init=False)
    _buffer: bytearray = field(factory=bytearray, init=False)

    @classmethod
    def create(cls, path: Path, *, after: int) -> LogFile:
        """Create the file at ``path``, for events after number ``after``. Only its owner may read it.

        Raises:
            OSError: the disk is full, or fails.
        """
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        log = cls(path, os.open(path, flags, 0o600))
        try:
            log.append((), after)
        except OSError:
            log.close()
            raise
        return log

    def append(self, statements: Sequence[Statement], last: int) -> None:
        """Append a frame of the statements of events up to number ``last``: all, or none if it raises.

        Raises:
            OSError: the disk is full, or fails.
            TypeError: a value is none of SQL.
        """
        numbers, is_new = self._numbers, False
        encoded: list[tuple[str | int, tuple[Sql, ...]]] = []
        for sql, values in statements:
            number = numbers.get(sql)
            is_new = is_new or number is None
            encoded.append((sql if number is None else number, values))
        # The buffer is that of the frame before, so that it need not grow again.
        frame = self._buffer
        _ENCODER.encode_into((last, encoded), frame, _HEAD.size)
        _HEAD.pack_into(frame, 0, len(frame) - _HEAD.size, crc32(memoryview(frame)[_HEAD.size :]))
        try:
            written = os.write(self.descriptor, frame)
            while written < len(frame):
                written += os.write(self.descriptor, memoryview(frame)[written:])
        except OSError:
            # Complete frames are read, and this one may be complete.
            os.ftruncate(self.descriptor, self.size)
            raise
        if is_new:
            for sql, _ in statements:
                numbers.setdefault(sql, len(numbers))
        self.size += len(frame)
        self.is_dirty = True

    def sync(self) -> None:
        """Wait until the file, its name, and everything that was appended are on the disk. Raises ``OSError``."""
        if self.is_dirty:
            self.is_dirty = False
            os.fsync(self.descriptor)
        if not self._is_named:
            sync_path(self.path.parent)
            self._is_named = True

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def find_logs(path: Path) -> list[Path]:
    """Return the files of the log of the journal at ``path``, in the order in which they were created."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}-log-*"))


def read_log(path: Path) -> tuple[list[tuple[int, list[Statement]]], bytes]:
    """Return the frames of a file (number of the last event, statements), and what follows the last whole one.

    A process that was killed, or a disk that was full, leaves the beginning of a frame at the end. Raises ``OSError``.
    """
    content, start = path.read_bytes(), 0
    frames: list[tuple[int, list[Statement]]] = []
    texts: list[str] = []
    while start < len(content):
        if len(content) - start < _HEAD.size:
            return frames, content[start:]
        length, checksum = _HEAD.unpack_from(content, start)
        body = content[start + _HEAD.size : start + _HEAD.size + length]
        # A power loss may leave zeros, which would be an empty frame.
        if not body or len(body) < length or crc32(body) != checksum:
            return frames, content[start:]
        start += _HEAD.size + length
        last, encoded = msgspec.msgpack.decode(body)
        for sql, _ in encoded:
            if isinstance(sql, str) and sql not in texts:
                texts.append(sql)
        frames.append((last, [(sql if isinstance(sql, str) else texts[sql], tuple(values)) for sql, values in encoded]))
    return frames, b""


_NUM_FRAMES = 64
"""Frames of the log that one transaction executes. Larger ones hold the lock of the file for long."""
_MAX_LOG_BYTES = 4 << 20
"""Size at which the log continues in the next file before its time."""
_PAGE = 64
"""Number of rows that are read at a time."""
_BUSY_SECONDS = 30.0
"""How long a commit waits for another program that writes to the file by SQL."""
_MAX_WAL_BYTES = 16 << 20
_DAY_SECONDS = 86_400.0
_RETIRING = {table.insertion for table in TABLES if table.name in ("forgotten", "consumed", "groups", "saved_versions")}
"""Statements after which there may be data to delete."""
_OF_STEPS = {table.insertion for table in TABLES if table.name in ("groups", "steps", "consumed", "saved_versions")}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors that the permissions of the files do not explain."""
_SET = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"


class Store:
    """An open journal. Created by ``open``.

    One thread encodes and appends events, and calls ``next_log``. Everything else belongs to the thread that opened it.
    """

    def __init__(self, path: Path, config: JournalConfig, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self._config = config
        self._now = now
        self._stack = ExitStack()
        self._connection: sqlite3.Connection
        self._seq = 0
        self._fence = 0
        self._lock_path = f"{path}.lock"
        self._lock = 0
        self._lock_state = 0, 0
        self._log: LogFile | None = None
        self._logs: deque[LogFile] = deque()
        """The files that were not moved yet, with the present one."""
        self._num_logs = self._log_start = 0
        self._appended = 0
        """Number of the last event that was appended to the log."""
        self._moved = 0
        """Number of the last event that is in the tables."""
        self.is_shared = False
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
        """Close the files and release the lock. What is in the log only is moved when the journal is opened again."""
        for log in self._logs:
            log.close()
        self._logs.clear()
        self._stack.close()

    # ---------------------------------------------------------------------------------------------- opening

    def _open(self) -> None:
        path = self.path = self.path.resolve()
        is_shared = self.is_shared = is_network(filesystem_of(path))
        if is_shared and not self._config.allow_shared:
            raise JournalError(
                f"{path} lies on a network filesystem ({filesystem_of(path)}), where locks may be lost. Set "
                "journal.path to a local disk, or journal.allow_shared if no other machine uses it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_path = f"{path}.lock"
        try:
            self._lock = self._stack.enter_context(hold(Path(self._lock_path))).descriptor
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
        self._connection.executemany(_SET, rows)
        self._connection.execute("COMMIT")
        # From here on, a former owner finds at its next write that it is replaced; what it appended before is read.
        seqs = [self._value(f"SELECT ifnull(max(seq), 0) FROM {table.name}") for table in TABLES]  # noqa: S608
        # Rows with higher numbers may have been deleted since; journals of earlier versions have no number.
        self._moved = max(*seqs, self._value("SELECT ifnull(max(value), 0) FROM meta WHERE key = 'moved'"))
        self._move_former()
        self._seq = self._appended = self._moved
        self._connection.execute("BEGIN IMMEDIATE")
        delete_orphans(self._connection)
        self._connection.execute("COMMIT")

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
        run(f"PRAGMA synchronous = {'FULL' if self._config.sync == JournalSync.FULL else 'NORMAL'}")
        run(f"PRAGMA journal_size_limit = {_MAX_WAL_BYTES}")

    def _value(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    def _move_former(self) -> None:
        """Execute what earlier processes have left in the log."""
        paths = find_logs(self.path)
        for number, path in enumerate(paths):
            is_last, is_empty = number + 1 == len(paths), not path.stat().st_size
            rest = self._move_file(path)
            # The beginning of a frame is shorter than its head, or than its head says.
            is_begun = len(rest) < _HEAD.size or len(rest) - _HEAD.size < _HEAD.unpack_from(rest)[0]
            if not is_begun if is_last else rest or is_empty:
                # After a loss of power. Later events may depend on those that are missing.
                aside = [
                    each.rename(each.with_name(each.name.replace("-log-", "-damaged-"))) for each in paths[number:]
                ]
                _log.warning("journal_log_damaged", kept=[str(each) for each in aside])
                break
            path.unlink()

    def _move_file(self, path: Path) -> bytes:
        """Execute the statements in a file of the log, and return what could not be read.

        Raises:
            JournalError: they could not be written, or a file before this one is missing.
        """
        frames, rest = read_log(path)
        first, statements = frames[0] if frames else (0, [])
        if not statements and first > self._moved:
            stem, _, number = path.name.rpartition("-")
            missing = f"{stem}-{int(number) - 1:08}" if int(number) > 1 else f"the file before {path.name}"
            raise JournalError(
                f"{self.path} cannot be opened: {missing} is missing, with events {self._moved + 1} to {first} of its "
                f"log. Put it back; or move {path.name} and those after it away, to go on without what they have, "
                "which may depend on what is missing."
            )
        # A process that was killed before it removed the file had executed them.
        new = [(last, statements) for last, statements in frames if last > self._moved]
        for start in range(0, len(new), _NUM_FRAMES):
            part = new[start : start + _NUM_FRAMES]
            self._execute(list(chain.from_iterable(statements for _, statements in part)), part[-1][0])
        return rest

    # ---------------------------------------------------------------------------------------------- writing

    def encode(self, events: Sequence[JournalEvent]) -> Sequence[Statement]:
        """Return the statements that write ``events`` after everything that was encoded before.

        Raises:
            JournalError: one of them holds a value that cannot be stored.
        """
        now = self._now()
        statements = [each for seq, event in enumerate(events, self._seq + 1) for each in encode(event, seq, now)]
        self._seq += len(events)
        return statements

    def append(self, statements: Sequence[Statement]) -> bool:
        """Append ``statements`` to the log: all, or none if it raises. With ``sync``, they survive a loss of power.

        Returns whether the log should be moved at once: it is large, or has statements of groups, which are few, and
        which a copy of the SQLite file has to have if it is made after that of a checkpoint.

        Raises:
            JournalError: they could not be written, or another process took the journal over.
            ValueError: a value is none of SQL. Nothing was written, and others can be.
        """
        if self._seq - self._moved > self._config.max_pending:
            raise JournalError(
                f"{self._config.max_pending} events wait to be moved from the log into {self.path}: the disk seems to "
                "hang, or another program writes to the file. Look after it, then start the service again "
                "(journal.max_pending is the bound)."
            )
        if not statements:
            return False
        try:
            log = self._log
            is_new = log is None
            if log is None:
                self._num_logs += 1
                name = f"{self.path.name}-log-{self._fence:08}-{self._num_logs:08}"
                log = self._log = LogFile.create(self.path.with_name(name), after=self._appended)
                self._logs.append(log)
                self._log_start = self._seq
            log.append(statements, self._seq)
            self._appended = self._seq
        except OSError as error:
            raise self._explained(error, "written") from error
        except TypeError as error:
            raise ValueError(f"A value cannot be written to the journal: {error}.") from error
        # After appending: a process that takes the lock later reads the log. Such a process needs a new file of the
        # lock, for which ours is removed or renamed. Both change ours, which is seen in a fifth of the time.
        lock = os.fstat(self._lock)
        if is_new or (lock.st_nlink, lock.st_ctime_ns) != self._lock_state:
            with suppress(OSError):  # it was removed, and no process has taken it since
                if Path(self._lock_path).stat().st_ino != lock.st_ino:
                    owner = Path(self._lock_path).read_text(errors="replace").strip()
                    raise self._taken_over(owner or "another process")
                self._lock_state = lock.st_nlink, lock.st_ctime_ns
        return (
            log.size >= _MAX_LOG_BYTES
            or self._seq - self._log_start > self._config.max_pending // 2
            or not _OF_STEPS.isdisjoint(map(itemgetter(0), statements))
        )

    def next_log(self) -> None:
        """Let ``move`` take what was appended, and later events be appended to another file."""
        self._log = None

    def sync(self) -> None:
        """Wait until everything that was appended is on the disk.

        Raises:
            JournalError: the disk fails, or another process has taken the journal over.
        """
        try:
            for log in tuple(self._logs):
                log.sync()
            self._check_fence()
        except (OSError, sqlite3.Error) as error:
            raise self._explained(error, "written") from error

    def move(self) -> None:
        """Execute the statements of the log's former files, and remove these files.

        Raises:
            JournalError: they could not be written, or another process took the journal over.
        """
        while self._logs and self._logs[0] is not self._log:
            log = self._logs[0]
            try:
                self._move_file(log.path)
                self._logs.popleft().close()
                log.path.unlink()
            except OSError as error:
                raise self._explained(error, "written") from error

    def _execute(self, statements: Sequence[Statement], last: int) -> None:
        """Execute ``statements``, those of events up to number ``last``, in one transaction."""
        with self._transaction():
            # ``executemany`` prepares a statement once for a run of equal ones.
            for sql, same in groupby(statements, itemgetter(0)):
                rows = [values for _, values in same]
                self.has_gone = self.has_gone or sql in _RETIRING
                try:
                    self._connection.executemany(sql, rows)
                except (sqlite3.IntegrityError, sqlite3.DataError, OverflowError):
                    self._execute_each(sql, rows)
            self._connection.execute(_SET, ("moved", last))
        self._moved = last

    def _execute_each(self, sql: str, rows: Sequence[tuple[Sql, ...]]) -> None:
        """Leave out the rows that SQLite refuses, which would otherwise keep the journal from being opened."""
        for row in rows:
            try:
                self._connection.execute(sql, row)
            except (sqlite3.IntegrityError, sqlite3.DataError, OverflowError) as error:
                _log.error("journal_row_refused", statement=sql.split(" (", maxsplit=1)[0], reason=str(error))

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
            raise self._taken_over(owner)

    def _taken_over(self, owner: str) -> JournalError:
        return JournalError(
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


def count_waiting_groups(path: Path) -> int:
    """Return how many groups of a journal that no process has open are in no saved version; 0 if it cannot be read."""
    settle(path)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            found: int = connection.execute("SELECT count(*) FROM waiting_groups").fetchone()[0]
            return found
    except sqlite3.Error:
        return 0


def settle(path: Path) -> None:
    """Move what a process that was killed has left in the log of the journal at ``path``, for readers by SQL.

    A process that has the journal open does this itself, every second. Errors are left to the reader.
    """
    if find_logs(path):
        with suppress(JournalError):
            Store.open(path, JournalConfig(allow_shared=True)).close()


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
