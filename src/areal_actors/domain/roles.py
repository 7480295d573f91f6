"""The parts of a run that can run in separate processes, and the states of a run."""

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


class RunStatus(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    SERVING = "serving"
    """All steps were made, and a service goes on answering with the trained weights."""
    FINISHED = "finished"
    """All steps were made, or a goal was reached. The weights are saved."""
    INTERRUPTED = "interrupted"
    """It was told to stop, and can be resumed."""
    FAILED = "failed"
    """An error ended it. It can be resumed once the cause is removed."""
    KILLED = "killed"
    """Its process is gone without a word. It can be resumed. This is only read, never written."""
