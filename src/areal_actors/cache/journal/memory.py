"""Journals that keep nothing beyond the process: none at all, and one that tests and embedders can look into."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from areal_actors.domain import Fact

__all__ = ["MemoryJournal", "NoJournal"]


class NoJournal:
    """Remembers nothing: what a process that nobody restarts needs."""

    async def write(self, *facts: Fact) -> None:
        """Forget them."""

    def note(self, *facts: Fact) -> None:
        """Forget them."""

    async def read(self) -> AsyncIterator[Fact]:
        """Nothing."""
        nothing: tuple[Fact, ...] = ()
        for fact in nothing:
            yield fact


class MemoryJournal:
    """Remembers the facts of one process, in ``facts``; begins with those of an earlier one."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self.facts: list[Fact] = list(facts)

    async def write(self, *facts: Fact) -> None:
        """Remember them."""
        self.facts.extend(facts)

    def note(self, *facts: Fact) -> None:
        """Remember them."""
        self.facts.extend(facts)

    async def read(self) -> AsyncIterator[Fact]:
        """All of them."""
        for fact in tuple(self.facts):
            yield fact
