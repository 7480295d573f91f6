"""Whether every role of a run has somewhere to be: until then nothing is begun, and nothing is held for ever.

Workers are placed one by one, so that two runs that want more than there is may get a part each, and would wait for
each other without end. A run of which a role has waited for so long, while others had all they need, gives everything
back, and asks again after a while that no two runs choose alike. Here it is decided; ``upkeep`` does it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from areal_actors.domain import Role
from areal_actors.schedulers.base import Placement, PlacementState
from areal_actors.telemetry import get_logger

__all__ = ["Gathering"]

_log = get_logger(__name__)

_MAX_DOUBLINGS = 3


class Gathering:
    """The roles of one run, and the workers that are placed for them.

    Args:
        roles: those without which nothing can be done; one worker of each is enough.
        seconds: how long some may hold what they have while others wait. It doubles with each time that it was in
            vain, up to eightfold, lest a run that shares a full cluster with small jobs never holds on for long enough.
        jitter: from 0 to 1.
    """

    def __init__(self, roles: Iterable[Role], *, seconds: float, jitter: Callable[[], float] = random.random) -> None:
        self._roles, self._seconds, self._jitter = frozenset(roles), seconds, jitter
        self._members: dict[str, tuple[Role, Placement]] = {}
        self._num_in_vain = 0
        self._split_until: float | None = None
        self.round = 0
        """How often everything was given back."""
        self.opens_at = float("-inf")
        """When workers may be placed again."""

    @contextmanager
    def having(self, role: Role, placement: Placement) -> Iterator[None]:
        """A worker is placed while the block lasts."""
        self._members[placement.spec.name] = role, placement
        try:
            yield
        finally:
            del self._members[placement.spec.name]

    @property
    def is_whole(self) -> bool:
        """Whether each role has a worker that runs."""
        return self._roles <= self._find(PlacementState.RUNNING)

    @property
    def waiting(self) -> frozenset[Role]:
        """Roles that wait for room, as far as is known, while others have some."""
        running = self._find(PlacementState.RUNNING)
        there = running | self._find(PlacementState.UNKNOWN)
        return (self._roles & self._find(PlacementState.PENDING)) - there if running else frozenset()

    def look(self, *, now: float) -> None:
        """Give everything back if that is due: ``round`` is another one then."""
        if self.is_whole:
            self._num_in_vain = 0
        if not self.waiting:
            self._split_until = None
        elif self._split_until is None:
            patience = self._seconds * 2.0 ** min(self._num_in_vain, _MAX_DOUBLINGS)
            self._split_until = now + patience * (0.75 + self._jitter() / 2)
        elif now >= self._split_until:
            self._give_back(now)

    def _give_back(self, now: float) -> None:
        pause = self._seconds * (0.5 + self._jitter())
        _log.warning("roles_given_back", no_room_for=sorted(self.waiting), again_in_seconds=round(pause, 1))
        self._split_until, self.opens_at = None, now + pause
        self._num_in_vain += 1
        self.round += 1

    def _find(self, state: PlacementState) -> frozenset[Role]:
        return frozenset(role for role, placement in self._members.values() if placement.status.state is state)
