"""The journal: events in order, durable before their consequences are reported.

``base`` is the interface for actors.
"""

from __future__ import annotations

from areal_actors.journal.base import Journal, MemoryJournal, NoJournal
from areal_actors.journal.config import JournalConfig, JournalSync
from areal_actors.journal.episodes import (
    RecordedEpisode,
    Recording,
    RestoredEpisodes,
    restore_episodes,
    start_episode,
)
from areal_actors.journal.recovery import (
    RecoveredSession,
    RestoredGroups,
    as_of,
    read_journal,
    recover,
    restate,
    restore_groups,
)
from areal_actors.journal.sqlite import SqliteJournal

__all__ = [
    "Journal",
    "JournalConfig",
    "JournalSync",
    "MemoryJournal",
    "NoJournal",
    "RecordedEpisode",
    "Recording",
    "RecoveredSession",
    "RestoredEpisodes",
    "RestoredGroups",
    "SqliteJournal",
    "as_of",
    "read_journal",
    "recover",
    "restate",
    "restore_episodes",
    "restore_groups",
    "start_episode",
]
