"""Figures about actors and their mailboxes: frozen snapshots, cheap to take, never reset."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

__all__ = ["ActorState", "ActorStatistics", "SystemStatistics"]


class ActorState(StrEnum):
    """The phase of an actor's life."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CRASHED = "crashed"


@frozen(kw_only=True)
class ActorStatistics:
    """One actor. The first group of figures is the present, the second counts from the actor's first start."""

    name: str
    state: ActorState
    incarnation: int

    num_queued: int
    """Messages in the mailbox, those included that wait for a concurrent handler to have a free place."""
    num_parked: int
    """Of these, the ones that wait for such a place."""
    num_waiting_senders: int
    """Senders that wait for room: back-pressure at work."""
    num_running: int
    """Handlers that run now."""
    mailbox_size: int
    """The bound of the mailbox."""

    num_handled: int
    """Handlers that came to an end: with an answer, an error or, for what was told, without either."""
    num_failed: int
    """Of these, the ones that raised."""
    num_cancelled: int
    """Asks and streams whose asker left or ran out of time, queued or running."""
    num_dropped: int
    """Told messages that the actor did not live to handle."""
    mailbox_peak: int
    """The most messages that the mailbox ever held."""


@frozen(kw_only=True)
class SystemStatistics:
    """Every living actor of a system, in order of their start."""

    name: str
    actors: tuple[ActorStatistics, ...]

    @property
    def num_queued(self) -> int:
        """Messages in all mailboxes."""
        return sum(actor.num_queued for actor in self.actors)
