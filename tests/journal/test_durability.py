"""What was acknowledged survives: kill -9, a torn log, a full disk. What was not is there whole or not at all."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import RewardSet, SessionForgotten, SessionId, SessionStarted, TurnEnded
from areal_actors.errors import JournalError
from areal_actors.journal import JournalConfig, JournalSync, SqliteJournal, find_logs, migrations, settle
from areal_actors.journal.sqlite import Store
from areal_actors_testing.journal_contract import create_session, create_start, create_turn, restorable

pytestmark = pytest.mark.anyio
CHILD = Path(__file__).with_name("acknowledging.py")


async def facts_of(path: Path) -> tuple:
    async with SqliteJournal.open(path) as journal:
        return restorable([event async for event in journal.read()])


def kill_after(path: Path, life: int, num_lines: int) -> list[str]:
    """What a child acknowledged until it was killed, having printed ``num_lines`` lines."""
    with subprocess.Popen([sys.executable, str(CHILD), str(path), str(life)], stdout=subprocess.PIPE) as child:
        lines = [child.stdout.readline() for _ in range(num_lines)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    return [line.decode().rstrip("\n") for line in lines if line.endswith(b"\n")]


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    """After three lives that ended at moments of chance, every acknowledged event is there, and none by half."""
    path, acknowledged = tmp_path / "journal.sqlite", []
    chance = random.Random(5)
    for life in range(3):
        acknowledged += kill_after(path, life, chance.randrange(5, 400))
    events = anyio.run(facts_of, path)
    turns = {event.interaction.id: event for event in events if isinstance(event, TurnEnded)}
    forgotten = {line.split()[1] for line in acknowledged if line.startswith("forget")}
    words = [line.split() for line in acknowledged if line.split()[1] not in forgotten]

    assert len(words) > 5
    assert {name for kind, name, *_ in words if kind == "start"} <= {
        f.session for f in events if isinstance(f, SessionStarted)
    }
    for _, name, number in (each for each in words if each[0] == "turn"):
        assert create_turn(name, int(number), num_tokens=200) == turns[f"{name}-turn-{number}"]
    assert {f.interaction for f in events if isinstance(f, RewardSet)} == set(turns)


async def test_a_torn_log_loses_only_what_was_torn(tmp_path):
    """A kill or a power loss may cut the end of the log: what stands before the cut is read."""
    path, copy = tmp_path / "journal.sqlite", tmp_path / "copy" / "journal.sqlite"
    copy.parent.mkdir()
    async with SqliteJournal.open(path) as journal:
        for number in range(20):
            await journal.write(*create_session(f"s{number}"))
        for name in (path, path.with_name("journal.sqlite-wal"), *find_logs(path)):
            shutil.copy(name, copy.parent)
    (log,) = find_logs(copy)
    os.truncate(log, log.stat().st_size * 2 // 3)
    events = await facts_of(copy)
    num_sessions = sum(isinstance(event, SessionStarted) for event in events)

    assert 0 < num_sessions < 20
    assert tuple(event for number in range(num_sessions) for event in create_session(f"s{number}")) == events


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, b"\xff" * 40], ids=["cut", "zeros", "ones"])
async def test_what_follows_a_damage_is_kept_aside(tmp_path, damage):
    """After a power loss: later events may depend on the missing ones, and are not restored. Their files are kept."""
    path = tmp_path / "journal.sqlite"
    store = Store.open(path, JournalConfig())
    for number in range(3):
        for event in create_session(f"s{number}"):
            store.append(store.encode((event,)))
        store.next_log()
    store.close()
    _, second, _ = find_logs(path)
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2] + damage)
    events = await facts_of(path)
    num_events = len(create_session("s0"))

    assert create_session("s0") == events[:num_events]
    assert events[num_events:] == create_session("s1")[: len(events) - num_events]
    assert num_events < len(events) < 2 * num_events
    assert [] == find_logs(path)
    assert 2 == len(list(tmp_path.glob("journal.sqlite-damaged-*")))


async def test_a_missing_file_of_the_log_is_named(tmp_path):
    """What follows it is not restored without it, nor lost: the journal is refused until it is back, or told to go on.

    Files that were moved before, and those of several processes, are no gap.
    """
    path, kept = tmp_path / "journal.sqlite", []
    for number in range(6):
        if number % 3 == 0:
            # Each of two processes leaves three files; the second one moves those of the first.
            store = Store.open(path, JournalConfig())
        store.append(store.encode(create_session(f"s{number}")))
        store.next_log()
        if number % 3 == 2:
            store.close()
    first, second, third = find_logs(path)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(
        JournalError, match=f"{second.name} is missing, with events .* move {third.name} and those after"
    ):
        await facts_of(path)
    with pytest.raises(JournalError, match=f"{second.name} is missing"):
        await facts_of(path)
    assert third.exists()
    assert not first.exists()
    second.write_bytes(kept)

    assert tuple(event for number in range(6) for event in create_session(f"s{number}")) == await facts_of(path)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_whatever_files_are_missing_no_event_is_restored_without_those_before_it(is_missing):
    """The end of the log cannot be missed; otherwise the journal is refused, and the rest of the log is still there."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal.sqlite")
        store = Store.open(path, JournalConfig())
        for number in range(len(is_missing)):
            store.append(store.encode((create_start(f"s{number}"),)))
            store.next_log()
        store.close()
        logs = find_logs(path)
        for log, is_removed in zip(logs, is_missing, strict=True):
            if is_removed:
                log.unlink()
        num_before = next((number for number, is_removed in enumerate(is_missing) if is_removed), len(is_missing))
        after = [log for log in logs[num_before:] if log.exists()]
        if after:
            with pytest.raises(JournalError, match="is missing"):
                Store.open(path, JournalConfig())
            assert after == find_logs(path)
            for log in after:
                log.unlink()
        opened = Store.open(path, JournalConfig())
        events = tuple(opened.read())
        opened.close()

    assert tuple(create_start(f"s{number}") for number in range(num_before)) == events


async def test_without_the_files_after_a_missing_one_the_journal_goes_on(tmp_path):
    """As its error says."""
    path = tmp_path / "journal.sqlite"
    store = Store.open(path, JournalConfig())
    for number in range(3):
        store.append(store.encode(create_session(f"s{number}")))
        store.next_log()
    store.close()
    first, second, third = find_logs(path)
    for removed in (first, second):
        removed.unlink()
    with pytest.raises(JournalError, match=f"{second.name} is missing, with events 1 to "):
        await facts_of(path)
    third.rename(tmp_path / "aside")

    assert () == await facts_of(path)


@pytest.mark.parametrize("name", ["journal[1].sqlite", "j*.sqlite"])
async def test_a_log_is_found_by_any_name(tmp_path, name):
    """The name of the journal is no pattern."""
    store = Store.open(tmp_path / name, JournalConfig())
    store.append(store.encode(create_session("a")))
    store.close()
    (tmp_path / "jx.sqlite-log-00000001-00000001").write_bytes(b"of another journal")

    assert create_session("a") == await facts_of(tmp_path / name)
    assert ["jx.sqlite-log-00000001-00000001"] == [path.name for path in tmp_path.glob("*-log-*")]


@pytest.mark.parametrize("index", [1, 2])
async def test_a_file_that_a_power_loss_emptied_is_a_damage(tmp_path, index):
    """Zeros at the end of the log, or an empty file within it: the rest is kept aside, and not restored."""
    path = tmp_path / "journal.sqlite"
    store = Store.open(path, JournalConfig())
    for number in range(3):
        store.append(store.encode(create_session(f"s{number}")))
        store.next_log()
    store.close()
    log = find_logs(path)[index]
    log.write_bytes(b"" if index == 1 else bytes(log.stat().st_size))

    assert tuple(event for number in range(index) for event in create_session(f"s{number}")) == await facts_of(path)
    assert 3 - index == len(list(tmp_path.glob("journal.sqlite-damaged-*")))


async def test_events_that_were_moved_are_not_moved_again(tmp_path):
    """A process may be killed after the transaction, and before it removes the file of the log."""
    path = tmp_path / "journal.sqlite"
    async with SqliteJournal.open(path) as journal:
        await journal.write(*create_session("a"))
        (log,) = find_logs(path)
        content = log.read_bytes()
        await journal.write(SessionForgotten(session=SessionId("a")))
    log.write_bytes(content)

    assert () == await facts_of(path)


async def test_a_log_of_an_earlier_version_is_read_by_a_later_one(tmp_path, monkeypatch):
    """Its file has the statements' texts, which fit tables with more columns."""
    path = tmp_path / "journal.sqlite"
    store = Store.open(path, JournalConfig())
    store.append(store.encode(create_session("a")))
    store.close()
    added = "ALTER TABLE turns ADD COLUMN later TEXT;"
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, added))
    monkeypatch.setattr(migrations.migrate, "__defaults__", (migrations.MIGRATIONS,))

    assert create_session("a") == await facts_of(path)


async def test_readers_by_sql_find_what_a_killed_process_wrote(tmp_path):
    """``settle`` moves the log, unless a process has the journal open."""
    path = tmp_path / "journal.sqlite"
    store = Store.open(path, JournalConfig())
    store.append(store.encode(create_session("a")))
    settle(path)
    assert 1 == len(find_logs(path))
    store.close()
    settle(path)

    assert [] == find_logs(path)
    with closing(sqlite3.connect(path)) as connection:
        assert [(2,)] == connection.execute("SELECT count(*) FROM turns").fetchall()


async def test_a_full_disk_is_told_to_every_writer_and_ends_the_writing(tmp_path):
    """What was written stays; nothing that was handed over later is written before the journal is opened anew."""
    path = tmp_path / "journal.sqlite"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    written, failed = [], []

    async def write(number: int) -> None:
        try:
            await journal.write(create_start(f"s{number}"), create_turn(f"s{number}", 0, num_tokens=5000))
            written.append(number)
        except JournalError as error:
            failed.append(str(error))

    async with SqliteJournal.open(path) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, hard))  # what a full disk is to this process
        try:
            while not failed:
                async with anyio.create_task_group() as tasks:
                    for number in range(len(written), len(written) + 3):
                        tasks.start_soon(write, number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        journal.note(create_start("late"))
        with pytest.raises(JournalError, match="Free some space"):
            await journal.write(create_start("later"))
        assert journal.failure is not None
        assert "Free some space" in journal.failure

    assert len(written) > 3
    assert all(str(path) in message and "could not be written" in message for message in failed)
    assert {f"s{number}" for number in written} == {
        f.session for f in await facts_of(path) if isinstance(f, SessionStarted)
    }


async def test_power_loss_is_survived_where_that_was_asked_for(tmp_path):
    """With ``sync: full`` each commit waits for the disk, by default none does."""
    async with (
        SqliteJournal.open(tmp_path / "a") as normal,
        SqliteJournal.open(tmp_path / "b", JournalConfig(sync=JournalSync.FULL)) as full,
    ):
        query = "PRAGMA synchronous"

        assert 1 == await normal._thread.run(lambda: normal._opened._value(query))
        assert 2 == await full._thread.run(lambda: full._opened._value(query))


async def test_a_damaged_file_is_named(tmp_path):
    """What is not a database, and a database with a broken page, are told with what to do; nothing is overwritten."""
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"hello" * 1000)
    with pytest.raises(JournalError, match=r"journal\.sqlite could not be opened .* move it away"):
        await facts_of(path)

    assert b"hello" * 1000 == path.read_bytes()


async def test_a_damaged_row_is_named(tmp_path):
    """A row that makes no event ends the reading with the table and the row."""
    path = tmp_path / "journal.sqlite"
    async with SqliteJournal.open(path) as journal:
        await journal.write(*create_session("a"))
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE turns SET token_ids = x'010203'")
    connection.close()

    with pytest.raises(JournalError, match="a row of turns with session 'a' cannot be read"):
        await facts_of(path)
