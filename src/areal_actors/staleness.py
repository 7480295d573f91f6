"""How many episode groups may be live: arithmetic on frozen values. Their owner is ``actors/capacity.py``.

With C the most groups that may run at once, B the groups that one training step consumes, v the version served and η
the staleness that is tolerated, there is room for ::

    capacity = min(C - running, (η + v + 1)·B - (accepted + running))

groups: whatever runs or waits when version v is served will be consumed at version v + η at the latest. η = 0 makes
training synchronous. A permit put aside for an external agent counts as running. (AReaL, arXiv 2505.24298, equation 3.)
A run of a known number of steps admits no more than its steps consume.

The formula bounds how many groups are ahead, not how old a group is when it is trained: of uneven episodes the short
ones overtake the long ones, which are then too old. ``leaves_time`` is the other half: a step that trains only when all
other groups can still be trained in time makes the bound true of every group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from attrs import evolve, field, frozen
from attrs.validators import ge, optional

__all__ = ["CapacityLimits", "CapacityState", "StaleGroups", "is_too_stale", "leaves_time"]


class StaleGroups(StrEnum):
    """What becomes of groups that take so long that they would be too old when they are trained."""

    WAIT = "wait"
    """A step waits for them while they are young enough, and newer groups wait with it."""
    TRAIN = "train"
    """They are trained whatever their age, with the correction for their older weights."""
    REQUEUE = "requeue"
    """They are thrown away, and their problems are run again. Biased to short episodes."""
    DROP = "drop"
    """They are thrown away with their problems. Biased to short episodes and to problems that make them."""


@frozen(kw_only=True)
class CapacityLimits:
    """C, η and B of the formula. ``max_groups``, where it is known, is what the whole run consumes."""

    max_concurrent: int = field(validator=ge(1))
    max_staleness: int = field(default=0, validator=ge(0))
    batch_size: int = field(validator=ge(1))
    max_groups: int | None = field(default=None, validator=optional(ge(1)))


@frozen(kw_only=True)
class CapacityState:
    """The counters. ``accepted`` counts every group that was accepted as training data since the first version."""

    limits: CapacityLimits
    version: int = 0
    running: int = 0
    reserved: int = 0
    accepted: int = 0

    @classmethod
    def at_version(cls, limits: CapacityLimits, version: int) -> CapacityState:
        """As a run that consumed exactly its batches stands at ``version``: what a recovery starts from.

        Groups that were running or waiting at the crash are not counted: they are lost and will be run again.
        """
        return cls(limits=limits, version=version, accepted=version * limits.batch_size)

    @property
    def available(self) -> int:
        """How many more groups may start; negative where limits or versions moved under running groups."""
        live = self.running + self.reserved
        budget = (self.limits.max_staleness + self.version + 1) * self.limits.batch_size
        if self.limits.max_groups is not None:
            budget = min(budget, self.limits.max_groups)
        return min(self.limits.max_concurrent - live, budget - self.accepted - live)

    def start(self) -> CapacityState:
        """One more group runs."""
        return evolve(self, running=self.running + 1)

    def reserve(self) -> CapacityState:
        """One permit is put aside."""
        return evolve(self, reserved=self.reserved + 1)

    def claim_reserved(self) -> CapacityState:
        """A permit that was put aside is used."""
        return evolve(self, reserved=self.reserved - 1, running=self.running + 1)

    def settle(self, *, is_accepted: bool) -> CapacityState:
        """A running group is over; a rejected one leaves no trace."""
        return evolve(self, running=self.running - 1, accepted=self.accepted + is_accepted)

    def refund(self) -> CapacityState:
        """An accepted group was dropped before it was trained."""
        return evolve(self, accepted=self.accepted - 1)

    def advance(self, version: int) -> CapacityState:
        """A newer version is served. An older one is news that came late, and changes nothing."""
        return evolve(self, version=max(self.version, version))


def is_too_stale(head_version: int, *, version: int, max_staleness: int) -> bool:
    """Whether a group whose oldest token is of ``head_version`` is too old to train ``version`` with."""
    return version - head_version > max_staleness


def leaves_time(
    ready: Sequence[int], running: Sequence[int], *, version: int, batch_size: int, max_staleness: int
) -> bool:
    """Whether a step at ``version`` that trains the oldest ``ready`` groups leaves the others enough steps.

    ``ready`` and ``running`` are the versions at which groups were admitted. One that was admitted at v is young enough
    up to the step at v + η, and each step trains ``batch_size`` groups. As long as every step waits for this and groups
    are admitted by the formula of capacity, no group becomes too old. Groups that are too old already are past waiting
    for, and are left out.
    """
    oldest = version - max_staleness
    finished = Counter(admitted for admitted in ready if admitted >= oldest)
    waiting = Counter(admitted for admitted in running if admitted >= oldest)
    num_ready = num_all = 0
    for admitted in sorted(finished.keys() | waiting.keys()):
        num_ready += finished[admitted]
        num_all += finished[admitted] + waiting[admitted]
        num_later_places = (admitted - oldest) * batch_size
        if num_ready < min(batch_size, num_all - num_later_places):
            return False
    return True
