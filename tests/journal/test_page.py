"""The page on the journal describes its tables, settings and queries correctly."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from attrs import fields

from areal_actors.domain import GroupId, GroupQueued, SessionId
from areal_actors.journal import JournalConfig
from areal_actors.journal.sqlite import Store
from areal_actors_testing.journal_contract import create_session, create_start

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "journal.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def connection(tmp_path):
    """A journal with a session that ended and waits in a group, and one that is open."""
    path = tmp_path / "journal.sqlite"
    store = Store.open(path, JournalConfig())
    group = GroupQueued(group=GroupId("g"), position=3, sessions=(SessionId("support-1"),))
    store.write((*create_session("support-1"), group, create_start("support-2")))
    store.close()
    connection = sqlite3.connect(path)
    yield connection
    connection.close()


def test_queries_of_the_page_run(connection):
    """Each runs as it stands."""
    answers = [connection.execute(query).fetchall() for query in QUERIES]

    assert [
        [("support-2", "1970-01-01 00:00:01", None, 0, None)],
        [(0, "user", "question 0"), (0, "assistant", "answer"), (1, "user", "question 1"), (1, "assistant", "answer")],
        [(4, 2, 0.25)],
        [("g", 3, 1)],
        [],
    ] == answers


def test_every_column_is_described(connection):
    """Tables and columns of the page are those of the file."""
    tables = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", PAGE.split("## Tables")[1], re.MULTILINE)
    described = {name: set(re.findall(r"`(\w+)`", columns)) for name, columns in tables}
    turns = PAGE.split("The columns of `turns`:")[1].split("## Queries")[0]
    described["turns"] = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in turns.splitlines() if "|" in line))
    )
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = {
        name: {row[1] for row in connection.execute(f"PRAGMA table_info({name})")} - {"seq", "record"} for name in names
    }

    assert columns == described


def test_every_setting_is_described():
    """The table of settings is that of the class."""
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.split("## Settings")[1].split("##")[0], re.MULTILINE)

    assert [field.name for field in fields(JournalConfig)] == [name for name in listed if name != "JournalConfig"]
