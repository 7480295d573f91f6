"""Messages to the exporter: what goes in of sessions and groups, and what is lent to the trainer."""

from __future__ import annotations

from attrs import field, frozen

from areal_actors.core import Message
from areal_actors.domain import DataPosition, Episode, Group, SessionId

__all__ = [
    "AcknowledgeLease",
    "BeginGroup",
    "DeliverGroup",
    "Draw",
    "Drawn",
    "ExportSession",
    "Exports",
    "Lease",
    "LeaseGroups",
    "SaveVersion",
]


class Exports:
    """Address of the exporter: from ended sessions to training rows, and the queue of finished groups."""


@frozen(kw_only=True)
class ExportSession(Message[Exports, Episode]):
    """The training rows of an ended session. Asking again, also with another discount, builds them again."""

    session: SessionId
    discount: float | None = None
    style: str | None = None
    member: int = 0


@frozen(kw_only=True)
class Draw:
    """The problem of a group: its ``position`` in the run, and its ``row`` if the order of the dataset is not kept."""

    position: int
    row: int | None = None


@frozen(kw_only=True)
class BeginGroup(Message[Exports, Draw]):
    """A permit of ``version`` was granted to a training group. Replies with its problem, one of ``num_problems``.

    The group is waited for from now on.
    """

    version: int
    num_problems: int | None = None


@frozen(kw_only=True)
class DeliverGroup(Message[Exports, bool]):
    """A finished group. Replies whether it is accepted as training data; delivering it twice queues it once."""

    group: Group


@frozen(kw_only=True)
class Drawn:
    """What became of the groups that were delivered since the last lease.

    ``tokens`` and ``turns`` are those of each successful episode, trained or not. ``dropped`` and ``requeued`` count
    groups that had become too stale, ``replaced`` those without signal whose places others took;
    ``replaced_rewards`` are those of the episodes of the latter. ``held_seconds`` is how long the lease had groups
    enough, and waited for older ones. ``easy`` and ``hard`` are the sizes of the pools, where there are some.
    """

    tokens: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    dropped: int = 0
    requeued: int = 0
    replaced: int = 0
    replaced_rewards: tuple[float, ...] = ()
    held_seconds: float = 0.0
    easy: int | None = None
    hard: int | None = None


@frozen(kw_only=True)
class Lease:
    """Groups on loan to the trainer, at most ``max_staleness`` versions old; ``None``: as old as they happen to be."""

    id: int
    groups: tuple[Group, ...]
    max_staleness: int | None = None
    drawn: Drawn = field(factory=Drawn)


@frozen(kw_only=True)
class LeaseGroups(Message[Exports, Lease]):
    """Wait for ``num_groups`` groups to train ``version`` with; ``max_staleness`` is η.

    The oldest come first, in order of their problems. An unacknowledged lease is offered again, as it was.
    """

    num_groups: int
    version: int
    max_staleness: int


@frozen(kw_only=True)
class AcknowledgeLease(Message[Exports, DataPosition]):
    """The groups of a lease were trained: forget them. Replies with how far the problems have been consumed."""

    lease: int


@frozen(kw_only=True)
class SaveVersion(Message[Exports, None]):
    """The weights of ``version`` are safe on disk: what they were trained with need not be kept any longer."""

    version: int
