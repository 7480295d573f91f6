"""Opening the journal of a service, where its configuration wants one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_actors.cache.journal import Journal, JournalConfig, SqliteJournal
from areal_actors.dashboard import RunDirectory

__all__ = ["open_journal"]


@asynccontextmanager
async def open_journal(config: JournalConfig, directory: RunDirectory) -> AsyncIterator[Journal | None]:
    """The journal of the run in ``directory``; ``None`` where there is to be none. Raises ``JournalError``."""
    if not config.enabled:
        yield None
        return
    async with SqliteJournal.open(config.path or directory.journal, config) as journal:
        yield journal
