"""What every journal promises: the one in memory and the one in a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from areal_actors.domain import JournalEvent
from areal_actors.journal import Journal, JournalConfig, MemoryJournal, SqliteJournal, sqlite
from areal_actors_testing.journal_contract import JOURNAL_CHECKS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.__name__)
async def test_a_journal_in_memory(check):
    """It keeps the contract, if what an earlier one remembered is given to the next."""
    events: list[JournalEvent] = []

    @asynccontextmanager
    async def open_journal() -> AsyncIterator[Journal]:
        journal = MemoryJournal(events)
        yield journal
        events[:] = journal.events

    await check(open_journal)


@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.__name__)
async def test_a_journal_in_a_file(check, tmp_path):
    """It keeps the contract from one opening to the next."""
    await check(lambda: SqliteJournal.open(tmp_path / "journal.sqlite"))


@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.__name__)
async def test_a_journal_on_a_network_filesystem(check, tmp_path, monkeypatch):
    """It keeps the contract without a write-ahead log."""
    monkeypatch.setattr(sqlite, "filesystem_of", lambda path: "nfs4")
    await check(lambda: SqliteJournal.open(tmp_path / "journal.sqlite", JournalConfig(allow_shared=True)))
