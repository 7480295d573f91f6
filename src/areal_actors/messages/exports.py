"""Messages to the exporter: what goes in of sessions and groups, and what is lent to the trainer."""

from __future__ import annotations

from attrs import frozen

from areal_actors.core import Message
from areal_actors.domain import DataPosition, Episode, Group, SessionId

__all__ = [
    "AcknowledgeLease",
    "DeliverGroup",
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
class DeliverGroup(Message[Exports, bool]):
    """A finished group. Replies whether it is accepted as training data; delivering it twice queues it once."""

    group: Group


@frozen(kw_only=True)
class Lease:
    """Groups on loan to the trainer. ``dropped`` counts groups that had become too stale since the last lease."""

    id: int
    groups: tuple[Group, ...]
    dropped: int = 0


@frozen(kw_only=True)
class LeaseGroups(Message[Exports, Lease]):
    """Wait for ``num_groups`` groups that are at most ``max_staleness`` versions older than ``version``.

    They come in order of their problems. An unacknowledged lease is offered again, as it was.
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
