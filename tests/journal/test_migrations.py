"""Journals of earlier versions are brought up to date, step by step, and lose nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from areal_actors.domain import GroupId, GroupQueued, SessionId
from areal_actors.errors import JournalError
from areal_actors.journal import SqliteJournal
from areal_actors.journal.migrations import APPLICATION_ID, MIGRATIONS, migrate
from areal_actors_testing.journal_contract import create_session

VERSION_1 = Path(__file__).with_name("version_1.sql")
"""What ``.dump`` said of a journal of version 1. It is never written anew: it stands for files that people have."""
VERSION_3 = Path(__file__).with_name("version_3.sql")
"""The same of version 3, the last one without the sampling settings of a turn."""

ADDED = "ALTER TABLE sessions ADD COLUMN note TEXT DEFAULT 'none';\nCREATE INDEX by_note ON sessions (note);\n"


def number(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])


def restored(path, dump, *, version):
    """A file of ``version`` with what ``dump`` says."""
    connection = sqlite3.connect(path)
    connection.executescript(dump.read_text(encoding="utf-8"))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    return path


@pytest.fixture
def old(tmp_path):
    """A file of version 1."""
    return restored(tmp_path / "journal.sqlite", VERSION_1, version=1)


@pytest.fixture
def connection(old):
    connection = sqlite3.connect(old, isolation_level=None)
    yield connection
    connection.close()


@pytest.mark.anyio
@pytest.mark.parametrize(("dump", "version"), [(VERSION_1, 1), (VERSION_3, 3)])
async def test_journals_of_earlier_versions_are_read(tmp_path, dump, version):
    """Whatever version this program writes, it restores what they had written; how turns sampled is unknown."""
    async with SqliteJournal.open(restored(tmp_path / "journal.sqlite", dump, version=version)) as journal:
        events = [event async for event in journal.read()]

    group = GroupQueued(group=GroupId("g"), position=1, sessions=(SessionId("a"),), data={"question": "2 + 2"})
    assert [*create_session("a"), group] == events


def test_a_new_step_changes_what_is_there(connection):
    """SQL of several statements, and a function, each in its turn; what was there stays."""

    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE sessions SET note = session || '!'")

    migrate(connection, (*MIGRATIONS, ADDED, fill))

    assert len(MIGRATIONS) + 2 == number(connection, "PRAGMA user_version")
    assert [("a!",)] == connection.execute("SELECT note FROM sessions").fetchall()
    migrate(connection, (*MIGRATIONS, ADDED, fill))  # nothing is left to be done


def test_a_step_that_fails_leaves_the_version_before(connection):
    """The steps before it are done, and nothing of itself."""
    broken = "ALTER TABLE sessions ADD COLUMN other TEXT;\nNONSENSE;\n"
    with pytest.raises(sqlite3.OperationalError, match="NONSENSE"):
        migrate(connection, (*MIGRATIONS, ADDED, broken))

    assert len(MIGRATIONS) + 1 == number(connection, "PRAGMA user_version")
    assert 0 == number(connection, "SELECT count(*) FROM pragma_table_info('sessions') WHERE name = 'other'")


def test_an_older_program_refuses_by_name(connection):
    """Going back is not possible, and it says from where."""
    migrate(connection, (*MIGRATIONS, ADDED))

    with pytest.raises(JournalError, match=f"version {len(MIGRATIONS) + 1}.* up to {len(MIGRATIONS)}: a newer"):
        migrate(connection)
