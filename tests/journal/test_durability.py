"""Acknowledged events survive kill -9 and a full disk; other events are there as a whole or not at all."""

from __future__ import annotations

import random
import resource
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from areal_actors.domain import RewardSet, SessionStarted, TurnEnded
from areal_actors.errors import JournalError
from areal_actors.journal import JournalConfig, JournalSync, SqliteJournal
from areal_actors.journal.sqlite import Store
from areal_actors_testing.journal_contract import create_session, create_start, create_turn, restorable

pytestmark = pytest.mark.anyio
CHILD = Path(__file__).with_name("acknowledging.py")


async def read_events(path: Path) -> tuple:
    async with SqliteJournal.open(path) as journal:
        return restorable([event async for event in journal.read()])


def kill_after(path: Path, incarnation: int, num_lines: int) -> list[str]:
    """Return what a child acknowledged until it was killed, having printed ``num_lines`` lines."""
    arguments = [sys.executable, str(CHILD), str(path), str(incarnation)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as child:
        lines = [child.stdout.readline() for _ in range(num_lines)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    return [line.decode().rstrip("\n") for line in lines if line.endswith(b"\n")]


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    """Three processes are killed at random moments. A reader by SQL finds their events as well."""
    path, acknowledged = tmp_path / "journal.sqlite", []
    chance = random.Random(5)
    for incarnation in range(3):
        acknowledged += kill_after(path, incarnation, chance.randrange(5, 400))
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        found = {name for (name,) in connection.execute("SELECT interaction FROM turns")}
    events = anyio.run(read_events, path)
    turns = {event.interaction.id: event for event in events if isinstance(event, TurnEnded)}
    forgotten = {line.split()[1] for line in acknowledged if line.startswith("forget")}
    words = [line.split() for line in acknowledged if line.split()[1] not in forgotten]

    assert len(words) > 5
    assert {name for kind, name, *_ in words if kind == "start"} <= {
        event.session for event in events if isinstance(event, SessionStarted)
    }
    for _, name, number in (each for each in words if each[0] == "turn"):
        assert turns[f"{name}-turn-{number}"] == create_turn(name, int(number), num_tokens=200)
    assert {event.interaction for event in events if isinstance(event, RewardSet)} == set(turns)
    assert set(turns) <= found


async def test_full_disk_fails_every_writer_and_loses_nothing_acknowledged(tmp_path):
    """Nothing that is handed over later is written before the journal is opened again."""
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
        resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, hard))  # the process sees a full disk
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
    assert {event.session for event in await read_events(path) if isinstance(event, SessionStarted)} == {
        f"s{number}" for number in written
    }


@pytest.mark.parametrize(("sync", "level"), [(JournalSync.NORMAL, 1), (JournalSync.FULL, 2)])
def test_sync_full_waits_for_the_disk_at_each_commit(tmp_path, sync, level):
    """SQLite syncs its write-ahead log before a commit returns, or does not."""
    store = Store.open(tmp_path / "journal.sqlite", JournalConfig(sync=sync))
    found = store._value("PRAGMA synchronous")
    store.close()

    assert found == level


async def test_damaged_file_is_refused_and_kept(tmp_path):
    """The error says what to do; nothing is overwritten."""
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"hello" * 1000)
    with pytest.raises(JournalError, match=r"journal\.sqlite could not be opened .* move it away"):
        await read_events(path)

    assert path.read_bytes() == b"hello" * 1000


@pytest.mark.parametrize("damage", ["record = x'010203'", "record = NULL", "output = '{'", "messages = '[3]'"])
async def test_damaged_row_is_named(tmp_path, damage):
    """Reading ends with the table and the number of the row."""
    path = tmp_path / "journal.sqlite"
    async with SqliteJournal.open(path) as journal:
        await journal.write(*create_session("a"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE turns SET {damage}")

    with pytest.raises(JournalError, match="the row of turns with seq 2 cannot be read"):
        await read_events(path)
