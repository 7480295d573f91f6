"""Messages to the capacity granter: requests for permits, and the news that settles them."""

from __future__ import annotations

from attrs import frozen

from areal_actors.kernel import Message


class Capacity:
    """Address of the capacity granter: how many episode groups may be live."""


@frozen(kw_only=True)
class Permit:
    """A lease on the right to run one group. ``version`` is that of the newest weights when it was granted."""

    id: int
    version: int


@frozen(kw_only=True)
class CapacityView:
    """The granter's counters. ``available`` may be negative after the limits were changed."""

    version: int
    running: int
    accepted: int
    reserved: int
    available: int


@frozen(kw_only=True)
class AcquirePermit(Message[Capacity, Permit]):
    """Wait until one more group may run, first come, first served."""

    holder: str


@frozen(kw_only=True)
class ReservePermit(Message[Capacity, CapacityView]):
    """Reserve one permit for a session that an external agent will start (``POST /grant_capacity``).

    Raises ``CapacityExhausted`` at once if there is none.
    """


@frozen(kw_only=True)
class ClaimPermit(Message[Capacity, Permit]):
    """Take a reserved permit, or else a free one. Raises ``CapacityExhausted`` at once if there is neither."""

    holder: str


@frozen(kw_only=True)
class RestorePermit(Message[Capacity, Permit]):
    """Take a permit for a group that an earlier process had admitted, whether or not there is room."""

    holder: str


@frozen(kw_only=True)
class LiftStalenessLimit(Message[Capacity, None]):
    """News: training is over, so no group can become too old. Only the number of live groups is limited from now on."""


@frozen(kw_only=True)
class SettlePermit(Message[Capacity, None]):
    """End the permit of a group that is over: accepted as training data, or rejected and refunded.

    Settling twice is harmless.
    """

    permit: int
    is_accepted: bool


@frozen(kw_only=True)
class RefundGroup(Message[Capacity, None]):
    """Refund an accepted group that was dropped as too stale before it was trained; another may take its place."""


@frozen(kw_only=True)
class VersionAdvanced(Message[Capacity, None]):
    """News: a batch was consumed and new weights are served."""

    version: int


@frozen(kw_only=True)
class DescribeCapacity(Message[Capacity, CapacityView]):
    """Return the counters, for progress and checkpoints."""
