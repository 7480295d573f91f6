"""The contract of journals: in memory, in a file, and in a file on a network filesystem."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from areal_actors.domain import JournalEvent
from areal_actors.journal import Journal, MemoryJournal, SqliteJournal, sqlite
from areal_actors_testing.journal_contract import JOURNAL_CHECKS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.__name__)
async def test_memory_journal_keeps_the_contract(check):
    """Each journal begins with the events of the one before."""
    events: list[JournalEvent] = []

    @asynccontextmanager
    async def open_journal() -> AsyncIterator[Journal]:
        journal = MemoryJournal(events)
        yield journal
        events[:] = journal.events

    await check(open_journal)


@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.__name__)
async def test_sqlite_journal_keeps_the_contract(check, tmp_path):
    """Each opening reads what the one before has written."""
    await check(lambda: SqliteJournal.open(tmp_path / "journal.sqlite"))


@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.__name__)
async def test_sqlite_journal_on_a_network_filesystem_keeps_the_contract(check, tmp_path, monkeypatch):
    """There is no write-ahead log."""
    monkeypatch.setattr(sqlite, "filesystem_of", lambda path: "nfs4")
    await check(lambda: SqliteJournal.open(tmp_path / "journal.sqlite"))
