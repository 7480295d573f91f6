"""How many episode groups may be in flight: arithmetic on frozen values. ``rollouts/capacity.py`` owns the state.

Let C be the most groups that may run at once, B the groups that one training step consumes, v the version served and η
the maximum staleness. The number of groups that may start is ::

    capacity = min(C - running, (η + v + 1)·B - (accepted + running))

All groups that run or wait when version v is served will be consumed at version v + η at the latest. η = 0 makes
training synchronous. A permit reserved for an external agent counts as running. (AReaL, arXiv 2505.24298, equation 3.)
A run with a known number of steps admits no more groups than its steps consume.

The formula bounds how many groups are ahead, not how old a group is when it is trained: if episodes differ in length,
short ones overtake long ones, which are then too old. ``leaves_time`` closes this gap: if a step only trains when all
other groups can still be trained in time, the bound holds for every group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from attrs import evolve, field, frozen
from attrs.validators import ge, optional


class StaleGroups(StrEnum):
    """The treatment of groups that take so long that they would be too old when they are trained."""

    # Measured with heavy-tailed durations at η = 4: 0.37 steps/s with WAIT, 1.02 with TRAIN, 0.88 with DROP. With DROP,
    # trained episodes had half the mean length of sampled ones.
    WAIT = "wait"
    """A step waits for them while they are young enough, and newer groups wait with it."""
    TRAIN = "train"
    """They are trained at any age, with the correction for their older weights."""
    REQUEUE = "requeue"
    """They are discarded, and their problems are run again. Biased to short episodes."""
    DROP = "drop"
    """They are discarded with their problems. Biased to short episodes and to problems that produce them."""


@frozen(kw_only=True)
class CapacityLimits:
    """C, η and B of the formula. ``max_groups``, if it is known, is the number that the whole run consumes.

    No group starts before ``first_version``, from which the formula counts versions: the steps before it train on given
    conversations.
    """

    max_concurrent: int = field(validator=ge(1))
    max_staleness: int = field(default=0, validator=ge(0))
    batch_size: int = field(validator=ge(1))
    max_groups: int | None = field(default=None, validator=optional(ge(0)))
    first_version: int = field(default=0, validator=ge(0))


@frozen(kw_only=True)
class CapacityState:
    """The counters. ``accepted`` counts every group that was accepted as training data since the first version."""

    limits: CapacityLimits
    version: int = 0
    running: int = 0
    reserved: int = 0
    accepted: int = 0
    is_trained: bool = False
    """Whether no step follows, so that only the number of running groups is limited."""

    @classmethod
    def at_version(cls, limits: CapacityLimits, version: int) -> CapacityState:
        """Return the state of a run that has consumed exactly its batches up to ``version``; a recovery starts from it.

        Groups that were running or waiting at the crash are not counted: they are lost and will be run again.
        """
        num_steps = max(0, version - limits.first_version)
        return cls(limits=limits, version=version, accepted=num_steps * limits.batch_size)

    @property
    def available(self) -> int:
        """Return how many more groups may start; negative if limits or versions changed while groups were running."""
        live = self.running + self.reserved
        if self.is_trained:
            return self.limits.max_concurrent - live
        num_steps = self.version - self.limits.first_version
        budget = (self.limits.max_staleness + num_steps + 1) * self.limits.batch_size if num_steps >= 0 else 0
        if self.limits.max_groups is not None:
            budget = min(budget, self.limits.max_groups)
        return min(self.limits.max_concurrent - live, budget - self.accepted - live)

    def start(self) -> CapacityState:
        """Count one more running group."""
        return evolve(self, running=self.running + 1)

    def reserve(self) -> CapacityState:
        """Reserve one permit."""
        return evolve(self, reserved=self.reserved + 1)

    def claim_reserved(self) -> CapacityState:
        """Use a reserved permit for a running group."""
        return evolve(self, reserved=self.reserved - 1, running=self.running + 1)

    def settle(self, *, is_accepted: bool) -> CapacityState:
        """Count a running group as finished; a rejected one is not counted any further."""
        return evolve(self, running=self.running - 1, accepted=self.accepted + is_accepted)

    def refund(self) -> CapacityState:
        """Undo the acceptance of a group that was dropped before it was trained."""
        return evolve(self, accepted=self.accepted - 1)

    def lift_staleness_limit(self) -> CapacityState:
        """Return the state after the last step."""
        return evolve(self, is_trained=True)

    def advance(self, version: int) -> CapacityState:
        """Set the version that is served. An older version arrived late, and changes nothing."""
        return evolve(self, version=max(self.version, version))


def is_too_stale(head_version: int, *, version: int, max_staleness: int) -> bool:
    """Return whether a group whose oldest token is of ``head_version`` is too old to train ``version`` with."""
    return version - head_version > max_staleness


def leaves_time(
    ready: Sequence[int], running: Sequence[int], *, version: int, batch_size: int, max_staleness: int
) -> bool:
    """Return whether a step at ``version`` that trains the oldest ``ready`` groups leaves the others enough steps.

    ``ready`` and ``running`` are the versions at which groups were admitted. A group admitted at v is young enough up
    to the step at v + η, and each step trains ``batch_size`` groups. As long as every step waits for this condition and
    groups are admitted by the formula of capacity, no group becomes too old. Groups that are already too old are
    ignored, because waiting for them is useless.
    """
    oldest = version - max_staleness
    finished = Counter(admitted for admitted in ready if admitted >= oldest)
    waiting = Counter(admitted for admitted in running if admitted >= oldest)
    num_ready = num_all = 0
    for admitted in sorted(finished.keys() | waiting.keys()):
        num_ready += finished[admitted]
        num_all += finished[admitted] + waiting[admitted]
        # Places in the steps after this one, up to the last step that may train these groups.
        num_later_places = (admitted - oldest) * batch_size
        if num_ready < min(batch_size, num_all - num_later_places):
            return False
    return True
