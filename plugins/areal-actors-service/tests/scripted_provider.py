"""Services without processes, at the plug point of the launcher, controlled by the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from attrs import define, field

from areal_actors.errors import ArealError
from areal_actors_service.messages import TrialId

__all__ = ["ScriptedProvider", "ScriptedService"]


@define(kw_only=True, eq=False)
class ScriptedService:
    """A service that runs until ``end`` is called or the launcher stops it."""

    url: str
    pid: int
    admin_key: str = field(default="sk-admin-scripted", repr=False)
    reason: str | None = None
    ended: anyio.Event = field(factory=anyio.Event)

    async def wait(self) -> str | None:
        """Wait for the end, like ``RunningService.wait``."""
        await self.ended.wait()
        return self.reason

    def end(self, reason: str | None) -> None:
        """End with this failure, or normally without one."""
        self.reason = reason
        self.ended.set()


@define(kw_only=True, eq=False)
class ScriptedProvider:
    """A ``ServiceProvider`` in memory. It tracks open services, and counts starts and checkpoints."""

    url: str = "http://127.0.0.1:1"
    """The reported URL of every service."""
    start_seconds: float = 0.0
    stop_seconds: float = 0.0
    failures: dict[TrialId, ArealError] = field(factory=dict)
    """Trials whose service fails to start, with the error."""
    trials: tuple[TrialId, ...] = ()
    """Trials that were served before."""
    sessions: set[str] = field(factory=set)
    """Ids and keys that are in any journal."""
    open_services: dict[TrialId, ScriptedService] = field(factory=dict)
    num_starts: Counter[TrialId] = field(factory=Counter)
    num_checkpoints: Counter[TrialId] = field(factory=Counter)
    max_open: int = 0
    """Maximum number of services open at the same time."""

    @asynccontextmanager
    async def open(self, trial: TrialId) -> AsyncIterator[ScriptedService]:
        """Open a service, like ``ServiceProvider.open``."""
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
        """Return ``trials``."""
        return self.trials

    async def has_session(self, trial: TrialId, name: str) -> bool:
        """Return whether ``name`` is in ``sessions``."""
        return name in self.sessions
