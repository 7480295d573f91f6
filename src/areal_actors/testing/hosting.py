"""Services without processes, at the plug point of the launcher: what they do next is said by the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from attrs import define, field

from areal_actors.domain import TrialId
from areal_actors.errors import ArealError

__all__ = ["ScriptedProvider", "ScriptedService"]


@define(kw_only=True, eq=False)
class ScriptedService:
    """A service that listens, until ``end`` is called or the launcher stops it."""

    url: str
    pid: int
    admin_key: str = field(default="sk-admin-scripted", repr=False)
    reason: str | None = None
    ended: anyio.Event = field(factory=anyio.Event)

    async def wait(self) -> str | None:
        """As ``RunningService.wait``."""
        await self.ended.wait()
        return self.reason

    def end(self, reason: str | None) -> None:
        """Die for this reason, or finish without one."""
        self.reason = reason
        self.ended.set()


@define(kw_only=True, eq=False)
class ScriptedProvider:
    """A ``ServiceProvider`` in memory. It keeps who is open, and counts starts and checkpoints."""

    url: str = "http://127.0.0.1:1"
    """Where every service is said to listen."""
    start_seconds: float = 0.0
    stop_seconds: float = 0.0
    failures: dict[TrialId, ArealError] = field(factory=dict)
    """Why the service of a trial does not start."""
    trials: tuple[TrialId, ...] = ()
    """What was served before."""
    sessions: set[str] = field(factory=set)
    """Ids and keys in any journal."""
    open_services: dict[TrialId, ScriptedService] = field(factory=dict)
    num_starts: Counter[TrialId] = field(factory=Counter)
    num_checkpoints: Counter[TrialId] = field(factory=Counter)
    max_open: int = 0
    """How many were open at once."""

    @asynccontextmanager
    async def open(self, trial: TrialId) -> AsyncIterator[ScriptedService]:
        """As ``ServiceProvider.open``."""
        self.num_starts[trial] += 1
        await anyio.sleep(self.start_seconds)
        if trial in self.failures:
            raise self.failures[trial]
        service = ScriptedService(url=self.url, pid=1000 + self.num_starts.total())
        self.open_services[trial] = service
        self.max_open = max(self.max_open, len(self.open_services))
        try:
            yield service
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.stop_seconds)
            if not service.ended.is_set():
                self.num_checkpoints[trial] += 1
            del self.open_services[trial]

    async def list_trials(self) -> tuple[TrialId, ...]:
        """As ``ServiceProvider.list_trials``."""
        return self.trials

    async def has_session(self, trial: TrialId, name: str) -> bool:  # noqa: ARG002 - names are unique
        """As ``ServiceProvider.has_session``."""
        return name in self.sessions
