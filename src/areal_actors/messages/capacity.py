"""Messages to the capacity granter: permits, and the news that settles them."""

from __future__ import annotations

from attrs import frozen

from areal_actors.core import Message

__all__ = [
    "AcquirePermit",
    "Capacity",
    "CapacityView",
    "ClaimPermit",
    "DescribeCapacity",
    "Permit",
    "RefundGroup",
    "ReservePermit",
    "RestorePermit",
    "SettlePermit",
    "VersionAdvanced",
]


class Capacity:
    """Address of the capacity granter: how many episode groups may be live."""


@frozen(kw_only=True)
class Permit:
    """The right to run one group; a lease. ``version`` is that of the newest weights when it was granted."""

    id: int
    version: int


@frozen(kw_only=True)
class CapacityView:
    """The granter's counters. ``available`` may be negative after a change of limits."""

    version: int
    running: int
    accepted: int
    reserved: int
    available: int


@frozen(kw_only=True)
class AcquirePermit(Message[Capacity, Permit]):
    """Wait until one more group may run, first come first served."""

    holder: str


@frozen(kw_only=True)
class ReservePermit(Message[Capacity, CapacityView]):
    """Put one permit aside for a session that an external agent will start (``POST /grant_capacity``).

    Raises ``CapacityExhausted`` at once when there is none.
    """


@frozen(kw_only=True)
class ClaimPermit(Message[Capacity, Permit]):
    """Take a reserved permit, or else a free one; raises ``CapacityExhausted`` at once when there is neither."""

    holder: str


@frozen(kw_only=True)
class RestorePermit(Message[Capacity, Permit]):
    """A permit for a group that an earlier process had admitted: there is no question of room."""

    holder: str


@frozen(kw_only=True)
class SettlePermit(Message[Capacity, None]):
    """The group of a permit is over: accepted as training data, or rejected and refunded. Twice is harmless."""

    permit: int
    is_accepted: bool


@frozen(kw_only=True)
class RefundGroup(Message[Capacity, None]):
    """An accepted group was dropped before it was trained (too stale): another may take its place."""


@frozen(kw_only=True)
class VersionAdvanced(Message[Capacity, None]):
    """News: a batch was consumed and new weights are served."""

    version: int


@frozen(kw_only=True)
class DescribeCapacity(Message[Capacity, CapacityView]):
    """The counters, for progress and checkpoints."""
