"""What a journal is, whatever keeps it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from areal_actors.domain import Fact

__all__ = ["Journal"]


class Journal(Protocol):
    """Facts, in the order in which they were handed over, whether one waits for them (``write``) or not (``note``)."""

    async def write(self, *facts: Fact) -> None:
        """Return when ``facts`` are durable, all or none of them, and everything that was handed over before.

        Who is cancelled while waiting does not know whether they are; they are written nonetheless. Raises
        ``JournalError`` if they cannot be written (the disk is full, say): then nothing of them is durable, and nothing
        that was handed over later will be before somebody has opened the journal anew.
        """

    def note(self, *facts: Fact) -> None:
        """Hand ``facts`` over without waiting. A failure is raised by the next ``write``."""

    def read(self) -> AsyncIterator[Fact]:
        """The facts from which everything that is not forgotten can be restored, in order.

        Facts of forgotten sessions and of consumed groups may be left out. Meant to be read once, before the first
        ``write``.
        """
        ...
