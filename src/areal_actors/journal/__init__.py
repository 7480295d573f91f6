"""The journal: events in order, durable before their consequences are reported.

``base`` is the interface for actors.
"""

from __future__ import annotations

from areal_actors.journal.base import Journal as Journal
from areal_actors.journal.base import MemoryJournal as MemoryJournal
from areal_actors.journal.base import NoJournal as NoJournal
from areal_actors.journal.config import JournalConfig as JournalConfig
from areal_actors.journal.config import JournalSync as JournalSync
from areal_actors.journal.recovery import RecoveredSession as RecoveredSession
from areal_actors.journal.recovery import RestoredGroups as RestoredGroups
from areal_actors.journal.recovery import as_of as as_of
from areal_actors.journal.recovery import read_journal as read_journal
from areal_actors.journal.recovery import recover as recover
from areal_actors.journal.recovery import restate as restate
from areal_actors.journal.recovery import restore_groups as restore_groups
from areal_actors.journal.sqlite import SqliteJournal as SqliteJournal
