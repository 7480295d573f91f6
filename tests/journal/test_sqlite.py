"""One file, one owner: who may open a journal, how writes become one commit, and what is refused."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve

from areal_actors.domain import GroupId, GroupQueued, SessionStarted
from areal_actors.errors import JournalError
from areal_actors.journal import JournalConfig, JournalSync, SqliteJournal, find_logs, sqlite
from areal_actors.journal.migrations import MIGRATIONS
from areal_actors_testing.journal_contract import create_session, create_start, create_turn

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "journal.sqlite"


async def sessions_of(path):
    async with SqliteJournal.open(path) as journal:
        return [event.session async for event in journal.read() if isinstance(event, SessionStarted)]


@pytest.fixture
async def held(path):
    """An open journal whose owner thread is held until the event is set."""
    leave = threading.Event()
    async with SqliteJournal.open(path) as journal:
        await journal.write(create_start("first"))
        journal._thread.post(leave.wait)
        yield journal, leave
        leave.set()


async def test_writes_that_wait_together_wait_for_the_disk_once(path):
    """With ``sync: full``, whatever is appended while the disk is waited for is synced together."""
    leave = threading.Event()
    async with SqliteJournal.open(path, JournalConfig(sync=JournalSync.FULL)) as journal:
        await journal.write(create_start("first"))
        journal._thread.post(leave.wait)
        before = journal.num_syncs
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(journal.write, create_start(f"s{number}"))
            await anyio.wait_all_tasks_blocked()
            leave.set()
        num_syncs = journal.num_syncs - before

    assert 1 == num_syncs
    assert 51 == len(await sessions_of(path))


async def test_a_disk_that_cannot_be_synced_fails_the_journal(path, monkeypatch):
    """With ``sync: full``, every writer is told, and nothing is taken any longer."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with SqliteJournal.open(path, JournalConfig(sync=JournalSync.FULL)) as journal:
        await journal.write(create_start("a"))
        monkeypatch.setattr(os, "fsync", fail)
        for _ in range(2):
            with pytest.raises(JournalError, match=r"could not be written .*Input/output error"):
                await journal.write(create_start("b"))


async def test_a_write_that_is_durable_needs_no_other_thread(held):
    """The log is appended on the event loop: with ``sync: normal``, a writer waits for nothing."""
    journal, _ = held

    assert journal.try_write(create_start("second"))


async def test_a_disk_that_hangs_fails_the_journal_at_a_bound(path):
    """Events that wait are counted; beyond the bound nothing is taken any longer, and it is said why.

    To those who write: who notes something is about to end a turn or a session, which has to end all the same.
    """
    leave = threading.Event()
    async with SqliteJournal.open(path, JournalConfig(max_pending=3)) as journal:
        journal._thread.post(leave.wait)
        for number in range(4):
            journal.note(create_start(f"s{number}"))
        with pytest.raises(JournalError, match=r"3 events wait to be moved from the log into .* seems to hang"):
            await journal.write(create_start("s4"))
        leave.set()
        with pytest.raises(JournalError, match="seems to hang"):
            await journal.write(create_start("s5"))
    journal.note(create_start("s6"))
    with pytest.raises(JournalError, match="is closed"):
        await journal.write(create_start("s7"))

    assert ["s0", "s1", "s2"] == await sessions_of(path)


async def test_only_the_owner_reads_the_journal(path):
    """Nor the files that SQLite puts beside it, whatever the umask of the process is."""
    old = os.umask(0)
    try:
        async with SqliteJournal.open(path) as journal:
            await journal.write(create_start("a"))
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.glob(f"{path.name}*")}
    finally:
        os.umask(old)

    assert {path.name, f"{path.name}-wal", f"{path.name}-shm"} <= set(modes)
    assert {0o600} == {mode for name, mode in modes.items() if not name.endswith(".lock")}


async def test_a_second_opener_is_refused(path):
    """Whoever comes second learns who has the file, and the first is not disturbed."""
    async with SqliteJournal.open(path) as journal:
        with pytest.raises(JournalError, match=r"in use by process \d+ on .*: end the other one, or give"):
            await sessions_of(path)
        await journal.write(create_start("a"))

    assert ["a"] == await sessions_of(path)


@pytest.mark.parametrize("lose", [Path.unlink, lambda lock: lock.rename(lock.with_name("other"))])
@pytest.mark.parametrize("earlier", [(), ("earlier",)])
async def test_a_writer_that_was_taken_over_writes_no_more(path, lose, earlier):
    """A lock that was lost with its file does not let two write: the first fails at its next write."""
    with pytest.raises(JournalError, match="was taken over by process"):
        async with SqliteJournal.open(path) as first:
            for name in earlier:
                await first.write(create_start(name))
            lose(path.with_name("journal.sqlite.lock"))
            async with SqliteJournal.open(path) as second:
                await second.write(create_start("second"))
                await first.write(create_start("first"))

    assert [*earlier, "second"] == await sessions_of(path)


async def test_a_writer_whose_lock_was_removed_goes_on_until_another_takes_it(path):
    """No process can have read the log before it has a lock of its own."""
    async with SqliteJournal.open(path) as journal:
        await journal.write(create_start("a"))
        path.with_name("journal.sqlite.lock").unlink()
        await journal.write(create_start("b"))
        await journal.write(create_start("c"))

    assert ["a", "b", "c"] == await sessions_of(path)


async def test_a_program_that_writes_by_sql_is_waited_for_and_then_told(path, monkeypatch):
    """Nobody else may hold the file for long; the error says that somebody does. What was written before is kept."""
    monkeypatch.setattr(sqlite, "_BUSY_SECONDS", 0.01)
    async with SqliteJournal.open(path) as journal:
        await journal.write(create_start("a"))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await journal.write(create_start("b"))
        assert [] == [event async for event in journal.read()]
        with pytest.raises(JournalError, match=r"could not be written .*Another program writes to it"):
            await journal.write(create_start("c"))
        other.close()

    assert ["a", "b"] == await sessions_of(path)


async def test_events_are_in_the_tables_after_a_while(path, monkeypatch):
    """Readers by SQL see them, although nothing else is written; no file of the log is left over."""
    monkeypatch.setattr(sqlite, "_MOVE_SECONDS", 0.0)
    async with SqliteJournal.open(path) as journal:
        for number in range(3):
            await journal.write(create_start(f"s{number}"))
            # A deadline of now, and then the other thread.
            for _ in range(3):
                await checkpoint()
                await journal._thread.run(int)
            assert number + 1 == change(path, "SELECT count(*) FROM sessions")[0][0]
        assert [] == find_logs(path)


async def test_a_large_log_is_moved_before_its_time(path, monkeypatch):
    """The log is read into memory as a whole, and disk space is taken twice while it waits."""
    monkeypatch.setattr(sqlite, "_MAX_LOG_BYTES", 1000)
    async with SqliteJournal.open(path) as journal:
        await journal.write(create_start("a"), create_turn("a", 0, num_tokens=200))
        await journal._thread.run(int)

        assert [] == find_logs(path)
        assert [("a",)] == change(path, "SELECT session FROM turns")


async def test_a_row_that_sqlite_refuses_does_not_close_the_journal_for_good(path, caplog):
    """It was acknowledged, so it is logged; everything else is there."""
    async with SqliteJournal.open(path) as journal:
        group = GroupQueued(group=GroupId("g"), position=None, sessions=())  # type: ignore[arg-type]
        await journal.write(create_start("a"), group, create_start("b"))

    assert ["a", "b"] == await sessions_of(path)
    assert "journal_row_refused" in caplog.text


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, 10**5000], ids=["2^63", "2^64", "-2^63-1", "long"])
async def test_integers_beyond_64_bits_fail_alone(path, number):
    """No column could hold them. The journal goes on, and so does one in which the log can hold them."""
    async with SqliteJournal.open(path) as journal:
        await journal.write(create_start("before"))
        with pytest.raises(JournalError, match=r"GroupQueued cannot .*: an integer has more than 64 bits"):
            await journal.write(create_start("lost"), GroupQueued(group=GroupId("g"), position=number, sessions=()))
        await journal.write(GroupQueued(group=GroupId("h"), position=2**63 - 1, sessions=()), create_start("after"))
        assert journal.failure is None

    assert ["before", "after"] == await sessions_of(path)


async def test_values_that_are_none_of_sql_fail_alone(path):
    """Such as an integer of numpy in an embedder's event."""
    async with SqliteJournal.open(path) as journal:
        with pytest.raises(JournalError, match=r"A value cannot be written to the journal: .*numpy\.int64"):
            await journal.write(GroupQueued(group=GroupId("g"), position=np.int64(5), sessions=()))  # type: ignore[arg-type]
        await journal.write(create_start("after"))

    assert ["after"] == await sessions_of(path)


async def test_what_is_no_fact_is_refused(path):
    """A slip of a caller's does not end the owner thread."""
    async with SqliteJournal.open(path) as journal:
        with pytest.raises(JournalError, match="A str cannot be written"):
            await journal.write("a event")  # type: ignore[arg-type]
        await journal.write(create_start("a"))

    assert ["a"] == await sessions_of(path)


async def test_a_network_filesystem_is_refused_unless_it_is_allowed(path, monkeypatch):
    """There, locks and shared memory are not what they are on a disk: no log, and a file of its own for each commit."""
    monkeypatch.setattr(sqlite, "filesystem_of", lambda path: "nfs4")
    with pytest.raises(JournalError, match=r"network filesystem \(nfs4\).*Set journal.path to a local disk, or"):
        await sessions_of(path)
    async with SqliteJournal.open(path, JournalConfig(allow_shared=True)) as journal:
        await journal.write(*create_session("a"))

        assert not path.with_name("journal.sqlite-wal").exists()
    monkeypatch.undo()

    assert ["a"] == await sessions_of(path)


async def test_a_place_that_cannot_be_written_is_named(tmp_path):
    """A file where a directory should be, say."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/journal\.sqlite could not be opened .*or set journal\.path"):
        await sessions_of(tmp_path / "file" / "journal.sqlite")


async def test_a_newer_journal_is_refused_by_name(path):
    """A program does not write what it does not know."""
    await sessions_of(path)
    change(path, f"PRAGMA user_version = {len(MIGRATIONS) + 1}")

    with pytest.raises(JournalError, match=rf"journal.*has version {len(MIGRATIONS) + 1}.*newer areal_actors wrote"):
        await sessions_of(path)


async def test_another_programs_database_is_refused(path):
    """Nothing is added to it."""
    path.parent.mkdir()
    change(path, "CREATE TABLE theirs (x)")

    with pytest.raises(JournalError, match="database of another program"):
        await sessions_of(path)


async def test_what_cannot_be_written_fails_alone(path):
    """Metadata that is not JSON fails its own write, all of it; those who wait for the same commit do not notice."""
    bad = evolve(create_start("bad"), metadata={"object": object()})
    async with SqliteJournal.open(path) as journal:
        with pytest.raises(JournalError, match="object is not JSON"):
            await journal.write(create_start("good and lost"), bad)
        await journal.write(create_start("good"))

    assert ["good"] == await sessions_of(path)


async def test_a_note_that_cannot_be_written_is_told_by_the_next_write(path):
    """Nobody waits for it, so that everything after it fails."""
    bad = evolve(create_start("bad"), metadata={"object": object()})
    async with SqliteJournal.open(path) as journal:
        await journal.write(create_start("before"))
        journal.note(bad)
        for _ in range(2):
            with pytest.raises(JournalError, match="object is not JSON"):
                await journal.write(create_start("after"))

    assert ["before"] == await sessions_of(path)


async def test_a_closed_journal_takes_nothing(path):
    """A write after the end is an error and does not wait forever."""
    async with SqliteJournal.open(path) as journal:
        pass
    with pytest.raises(JournalError, match="closed"):
        await journal.write(create_start("a"))


async def test_an_error_of_the_block_comes_out_as_it_is(path):
    """No group is wrapped around it, and what was handed over is written."""
    with pytest.raises(KeyError, match="mine"):
        async with SqliteJournal.open(path) as journal:
            journal.note(create_start("a"))
            raise KeyError("mine")

    assert ["a"] == await sessions_of(path)


async def test_a_cancelled_owner_lets_go_of_the_file(path):
    """However its block ends, the next one can open the journal."""
    with anyio.CancelScope() as scope:
        async with SqliteJournal.open(path) as journal:
            journal.note(create_start("a"))
            scope.cancel()
            await checkpoint()

    assert ["a"] == await sessions_of(path)


async def test_reading_goes_on_while_others_write(path):
    """Facts that come meanwhile are read or not; nothing of before is missed."""
    async with SqliteJournal.open(path) as journal:
        before = [create_start("a"), *(create_turn("a", number) for number in range(150))]
        await journal.write(*before)
        seen = []
        async for event in journal.read():
            seen.append(event)
            if len(seen) % 50 == 0:
                await journal.write(create_turn("a", 1000 + len(seen)))

    assert before == seen[: len(before)]


async def test_others_may_read_by_sql_meanwhile(path):
    """An open journal is not a secret: the shell of SQLite shows what was committed."""
    async with SqliteJournal.open(path) as journal:
        await journal.write(*create_session("a"))
        # Reading moves what is in the log; otherwise it takes a second.
        assert create_session("a") == tuple([event async for event in journal.read()])
        rows = change(path, "SELECT session, json_extract(output, '$[0].content'), num_output_tokens FROM turns")

    assert [("a", "answer", 3)] * 2 == rows


def change(path, sql):
    connection = sqlite3.connect(path)
    try:
        with connection:
            return connection.execute(sql).fetchall()
    finally:
        connection.close()
