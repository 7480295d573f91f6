"""The parts of a run that can live in processes of their own."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a worker can be."""

    PROXY = "proxy"
    """HTTP in, messages out."""
    SESSIONS = "sessions"
    """What shares the journal: sessions, exports, capacity, intake, accounts."""
    GENERATION = "generation"
    """An engine."""
    TRAINER = "trainer"
    """The policy and its optimiser."""
    ROLLOUT = "rollout"
    """Who runs agents on problems."""
