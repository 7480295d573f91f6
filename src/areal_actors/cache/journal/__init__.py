"""The journal: facts in order, durable before their consequences are told. ``base`` is what the actors see of it."""

from __future__ import annotations

from areal_actors.cache.journal.base import Journal
from areal_actors.cache.journal.memory import MemoryJournal, NoJournal

__all__ = ["Journal", "MemoryJournal", "NoJournal"]
