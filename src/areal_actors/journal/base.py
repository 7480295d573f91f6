"""The interface of a journal, and journals without a file: one that stores nothing, one in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from areal_actors.domain import JournalEvent


class Journal(Protocol):
    """A log of events, in the order in which ``write`` (which waits) or ``note`` (which does not) received them."""

    @property
    def failure(self) -> str | None:
        """Why nothing can be written any longer, with what to do; ``None`` while events can be written."""
        ...

    async def write(self, *events: JournalEvent) -> None:
        """Return when ``events`` are durable, all or none of them, with everything that was handed over before.

        A caller that is cancelled while waiting cannot know whether they are durable; they are written nevertheless.
        Raises ``JournalError`` if they cannot be written (for example because the disk is full): none of them is
        durable then, and no later event will be before the journal is opened again.
        """

    def note(self, *events: JournalEvent) -> None:
        """Hand ``events`` over without waiting. A failure is raised by the next ``write``."""

    def read(self) -> AsyncIterator[JournalEvent]:
        """Yield the events from which everything that is not forgotten can be restored, in order.

        Events of forgotten sessions and of consumed groups may be omitted. Meant to be read once, before the first
        ``write``.
        """
        ...


class NoJournal:
    """Stores nothing, for processes that are not restarted."""

    failure: str | None = None

    async def write(self, *events: JournalEvent) -> None:
        """Discard the events."""

    def note(self, *events: JournalEvent) -> None:
        """Discard the events."""

    async def read(self) -> AsyncIterator[JournalEvent]:
        """Yield nothing."""
        nothing: tuple[JournalEvent, ...] = ()
        for event in nothing:
            yield event


class MemoryJournal:
    """Keeps the events of one process in ``events``, after those of an earlier one."""

    failure: str | None = None

    def __init__(self, events: Iterable[JournalEvent] = ()) -> None:
        self.events: list[JournalEvent] = list(events)

    async def write(self, *events: JournalEvent) -> None:
        """Store the events."""
        self.events.extend(events)

    def note(self, *events: JournalEvent) -> None:
        """Store the events."""
        self.events.extend(events)

    async def read(self) -> AsyncIterator[JournalEvent]:
        """Yield all events."""
        for event in tuple(self.events):
            yield event
