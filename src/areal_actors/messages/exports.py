"""Messages to the exporter: sessions and groups that go in, and the groups that are leased to the trainer."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from areal_actors.domain import DataPosition, Episode, Group, PoolSizes, SessionId
from areal_actors.kernel import Message


class Exports:
    """Address of the exporter: from ended sessions to training rows, and the queue of finished groups."""


@frozen(kw_only=True)
class ExportSession(Message[Exports, Episode]):
    """Build the training rows of an ended session. They are built anew each time, possibly with another discount."""

    session: SessionId
    discount: float | None = None
    style: str | None = None
    member: int = 0


@frozen(kw_only=True)
class Draw:
    """The problem of a group: its ``position`` in its ``source``, and its ``row`` if that is not run in order.

    ``finished`` are episodes of the group that an earlier process finished, and that are not run again.
    """

    source: str = ""
    position: int
    row: int | None = None
    finished: tuple[Episode, ...] = ()


@frozen(kw_only=True)
class BeginGroup(Message[Exports, Draw]):
    """Assign a problem to a training group that was granted a permit of ``version``.

    Replies with the group's problem. The exporter waits for the group from now on. ``num_problems`` are the numbers of
    problems by source, as far as they are known.
    """

    version: int
    num_problems: Mapping[str, int] = field(factory=dict)


@frozen(kw_only=True)
class StoreEpisodes(Message[Exports, None]):
    """Store the episodes of one member of a group that is not complete, so that a restart does not run them again."""

    group: Group
    member: int


@frozen(kw_only=True)
class DeliverGroup(Message[Exports, bool]):
    """Deliver a finished group. Replies whether it is accepted as training data; delivering twice queues it once."""

    group: Group


@frozen(kw_only=True)
class UntrainedGroup:
    """A group that was delivered and whose place another group took: its source, and how its episodes ended.

    ``rewards`` are those of its successful episodes. ``num_rejected`` of the ``num_failed`` others were rejected.
    """

    source: str
    rewards: tuple[float, ...]
    num_failed: int
    num_rejected: int = 0

    @property
    def num_episodes(self) -> int:
        """The number of its episodes."""
        return len(self.rewards) + self.num_failed

    @property
    def is_rejected(self) -> bool:
        """Whether its workflow rejected it on purpose: no episode failed otherwise."""
        return 0 < self.num_rejected == self.num_failed


@frozen(kw_only=True)
class Drawn:
    """Counts of the groups that were delivered since the last lease.

    ``tokens`` and ``turns`` have one entry for each successful episode, trained or not. ``dropped`` and ``requeued``
    count groups that had become too stale, ``replaced`` lists those without signal, and ``failed`` those without
    anything to train. ``held_seconds`` is how long the lease had enough groups but waited for older ones. ``pools`` are
    the sizes of the pools of the sources that are drawn by difficulty.
    """

    tokens: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    dropped: int = 0
    requeued: int = 0
    replaced: tuple[UntrainedGroup, ...] = ()
    failed: tuple[UntrainedGroup, ...] = ()
    held_seconds: float = 0.0
    pools: Mapping[str, PoolSizes] = field(factory=dict)


@frozen(kw_only=True)
class Lease:
    """Groups that are leased to the trainer, at most ``max_staleness`` versions old; ``None`` means no limit."""

    id: int
    groups: tuple[Group, ...]
    max_staleness: int | None = None
    drawn: Drawn = field(factory=Drawn)


@frozen(kw_only=True)
class LeaseGroups(Message[Exports, Lease]):
    """Wait for ``num_groups`` groups to train ``version`` with; ``max_staleness`` is η.

    The oldest come first, in order of their problems. An unacknowledged lease is offered again unchanged.
    """

    num_groups: int
    version: int
    max_staleness: int


@frozen(kw_only=True)
class AcknowledgeLease(Message[Exports, DataPosition]):
    """Forget the groups of a lease, which were trained. Replies with how far the problems have been consumed."""

    lease: int


@frozen(kw_only=True)
class DiscardLease(Message[Exports, None]):
    """Forget the groups of a lease in the journal, because training them failed: a resumed run samples them again."""

    lease: int


@frozen(kw_only=True)
class SaveVersion(Message[Exports, None]):
    """Report that the weights of ``version`` are on disk, so that the sessions they were trained with can be freed."""

    version: int
