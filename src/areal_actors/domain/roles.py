"""The parts of a run that can run in separate processes."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Roles of a worker."""

    PROXY = "proxy"
    """The HTTP proxy, which turns requests into messages."""
    SESSIONS = "sessions"
    """The actors that share the journal: sessions, exports, capacity, intake, accounts."""
    GENERATION = "generation"
    """An engine."""
    TRAINER = "trainer"
    """The policy and its optimizer."""
    ROLLOUT = "rollout"
    """The runner of agents."""
