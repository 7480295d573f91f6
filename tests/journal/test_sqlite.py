"""Opening a journal, writing in groups, and refusing what cannot be written."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve

from areal_actors.domain import GroupId, GroupQueued, SessionStarted
from areal_actors.errors import JournalError
from areal_actors.journal import JournalConfig, JournalSync, SqliteJournal, sqlite
from areal_actors.journal.tables import FORMAT
from areal_actors_testing.journal_contract import create_session, create_start, create_turn

pytestmark = pytest.mark.anyio
BAD = evolve(create_start("bad"), metadata={"object": object()})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "journal.sqlite"


async def read_sessions(path):
    async with SqliteJournal.open(path) as journal:
        return [event.session async for event in journal.read() if isinstance(event, SessionStarted)]


def query(path, sql):
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(sql).fetchall()


# ---------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("sync", JournalSync)
async def test_writers_that_wait_together_share_a_commit(path, sync):
    """While the thread is busy, writes are collected."""
    leave = threading.Event()
    async with SqliteJournal.open(path, JournalConfig(sync=sync)) as journal:
        await journal.write(create_start("first"))
        journal._thread.post(leave.wait)
        before = journal.num_commits
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(journal.write, create_start(f"s{number}"))
            await anyio.wait_all_tasks_blocked()
            leave.set()
        num_commits = journal.num_commits - before

    assert num_commits == 1
    assert len(await read_sessions(path)) == 51


async def test_written_events_can_be_read_by_sql_at_once(path):
    """The journal is open meanwhile."""
    async with SqliteJournal.open(path) as journal:
        await journal.write(*create_session("a"))
        rows = query(path, "SELECT session, json_extract(output, '$.content'), num_output_tokens FROM turns")

    assert rows == [("a", "answer", 3)] * 2


async def test_disk_that_hangs_fails_the_journal_at_a_limit(path):
    """Events that wait are written once the disk responds; later ones are refused with the reason."""
    leave = threading.Event()
    async with SqliteJournal.open(path, max_pending=3) as journal:
        journal._thread.post(leave.wait)
        for number in range(3):
            journal.note(create_start(f"s{number}"))
        with pytest.raises(JournalError, match=r"3 events wait to be written to .* seems to hang"):
            await journal.write(create_start("s3"))
        leave.set()
        with pytest.raises(JournalError, match="seems to hang"):
            await journal.write(create_start("s4"))

    assert await read_sessions(path) == ["s0", "s1", "s2"]


async def test_program_that_holds_the_file_fails_the_write(path):
    """A commit waits for it first; the error names the cause. Earlier events stay."""
    async with SqliteJournal.open(path, busy_seconds=0.01) as journal:
        await journal.write(create_start("a"))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for name in ("b", "c"):
                with pytest.raises(JournalError, match=r"could not be written .*Another program writes to it"):
                    await journal.write(create_start(name))

    assert await read_sessions(path) == ["a"]


async def test_reading_continues_while_others_write(path):
    """No event from before is missed."""
    async with SqliteJournal.open(path) as journal:
        before = [create_start("a"), *(create_turn("a", number) for number in range(150))]
        await journal.write(*before)
        seen = []
        async for event in journal.read():
            seen.append(event)
            if len(seen) % 50 == 0:
                await journal.write(create_turn("a", 1000 + len(seen)))

    assert seen[: len(before)] == before


# ------------------------------------------------------------------------------------- events that are refused


@pytest.mark.parametrize(
    ("event", "error"),
    [
        pytest.param(BAD, "A SessionStarted cannot .* must be JSON", id="metadata"),
        pytest.param("an event", "A str cannot be written", id="another class"),
        pytest.param(
            GroupQueued(group=GroupId("g"), position=2**63, sessions=()), "A GroupQueued cannot", id="a long integer"
        ),
        pytest.param(
            GroupQueued(group=GroupId("g"), position=object(), sessions=()), "A GroupQueued cannot", id="an object"
        ),
    ],
)
async def test_event_that_cannot_be_stored_fails_its_own_write_only(path, event, error):
    """Other writes in the same commit succeed, and so do later ones."""
    errors = []

    async def write_both() -> None:
        with pytest.raises(JournalError, match=error):
            await journal.write(create_start("lost"), event)
        errors.append(error)

    async with SqliteJournal.open(path) as journal:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(journal.write, create_start("before"))
            tasks.start_soon(write_both)
            tasks.start_soon(journal.write, create_start("beside"))
        await journal.write(GroupQueued(group=GroupId("h"), position=2**63 - 1, sessions=()), create_start("after"))
        assert journal.failure is None

    assert errors == [error]
    assert sorted(await read_sessions(path)) == ["after", "before", "beside"]


async def test_refused_note_fails_every_later_write(path):
    """A note has no waiting caller, so the next write raises its error."""
    async with SqliteJournal.open(path) as journal:
        await journal.write(create_start("before"))
        journal.note(BAD)
        for _ in range(2):
            with pytest.raises(JournalError, match="object in a field of type Any"):
                await journal.write(create_start("after"))

    assert await read_sessions(path) == ["before"]


async def test_closed_journal_refuses_writes(path):
    """A write after the end raises instead of waiting forever; a note does not raise."""
    async with SqliteJournal.open(path) as journal:
        pass
    journal.note(create_start("a"))
    with pytest.raises(JournalError, match="closed"):
        await journal.write(create_start("a"))


# ------------------------------------------------------------------------------------------- opening, closing


async def test_files_are_readable_by_their_owner_only(path):
    """This holds for the files that SQLite adds, too, and for any umask."""
    old = os.umask(0)
    try:
        async with SqliteJournal.open(path) as journal:
            await journal.write(create_start("a"))
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.glob(f"{path.name}*")}
    finally:
        os.umask(old)

    assert {path.name, f"{path.name}-wal", f"{path.name}-shm"} <= set(modes)
    assert {mode for name, mode in modes.items() if not name.endswith(".lock")} == {0o600}


async def test_second_process_is_refused_by_name(path):
    """The first one is not disturbed."""
    async with SqliteJournal.open(path) as journal:
        with pytest.raises(JournalError, match=r"in use by process \d+ on .*: end the other one, or give"):
            await read_sessions(path)
        await journal.write(create_start("a"))

    assert await read_sessions(path) == ["a"]


@pytest.mark.parametrize("lose", [Path.unlink, lambda lock: lock.rename(lock.with_name("other"))])
async def test_writer_that_was_taken_over_fails(path, lose):
    """If the lock is lost with its file, the first process fails at its next write."""
    async with SqliteJournal.open(path) as first:
        await first.write(create_start("earlier"))
        lose(path.with_name("journal.sqlite.lock"))
        async with SqliteJournal.open(path) as second:
            await second.write(create_start("second"))
            with pytest.raises(JournalError, match="was taken over by process"):
                await first.write(create_start("first"))

    assert await read_sessions(path) == ["earlier", "second"]


async def test_network_filesystem_has_no_write_ahead_log(path, monkeypatch):
    """Its machines share no memory, which the log needs. Each commit is synced, so that other machines can read it."""
    monkeypatch.setattr(sqlite, "filesystem_of", lambda path: "nfs4")
    async with SqliteJournal.open(path) as journal:
        await journal.write(*create_session("a"))

        assert not path.with_name("journal.sqlite-wal").exists()
        assert await journal._thread.run(lambda: journal._opened._value("PRAGMA synchronous")) == 2
    monkeypatch.undo()

    assert await read_sessions(path) == ["a"]


async def test_directory_that_cannot_be_made_is_named(tmp_path):
    """For example, a file is in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/journal\.sqlite could not be opened .*or set journal\.path"):
        await read_sessions(tmp_path / "file" / "journal.sqlite")


@pytest.mark.parametrize(("format_", "age"), [(FORMAT - 1, "an earlier"), (FORMAT + 1, "a newer")])
async def test_journal_of_another_release_is_refused(path, format_, age):
    """The error names both formats and what to do. The file is not changed."""
    await read_sessions(path)
    query(path, f"PRAGMA user_version = {format_}")

    with pytest.raises(JournalError, match=rf"has format {format_}, .* format {FORMAT}: {age} release .* move"):
        await read_sessions(path)
    assert query(path, "PRAGMA user_version") == [(format_,)]


async def test_database_of_another_program_is_refused(path):
    """Nothing is added to it."""
    path.parent.mkdir()
    query(path, "CREATE TABLE theirs (x)")

    with pytest.raises(JournalError, match="database of another program"):
        await read_sessions(path)


async def test_error_of_the_block_is_raised_as_it_is(path):
    """It is not wrapped in a group, and events that were handed over are written."""
    with pytest.raises(KeyError, match="mine"):
        async with SqliteJournal.open(path) as journal:
            journal.note(create_start("a"))
            raise KeyError("mine")

    assert await read_sessions(path) == ["a"]


async def test_cancelled_block_releases_the_file(path):
    """The next process can open the journal."""
    with anyio.CancelScope() as scope:
        async with SqliteJournal.open(path) as journal:
            journal.note(create_start("a"))
            scope.cancel()
            await checkpoint()

    assert await read_sessions(path) == ["a"]
