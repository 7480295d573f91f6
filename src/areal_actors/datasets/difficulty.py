"""Problems drawn by how often they are solved: pools of easy, normal and hard ones, as an option.

A problem that is always or never solved gives no gradient, and still costs its episodes. With pools, problems whose
last group solved them nearly always or nearly never are drawn less often, and come back when the policy has changed::

    rollout: {difficulty: {enabled: true, easy_fraction: 0.05, hard_fraction: 0.2}}

With ``easy_fraction: 0``, problems that are solved are drawn only where there are no others. Each of several sources
has its own pools.

Draws are a function of seed, position and the solve rates known until then. This state is plain data (``PoolsState``),
kept in checkpoints, so that a resumed run draws the same problems as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from attrs import field, frozen
from attrs.validators import and_, ge, gt, le, lt

from areal_actors.domain import AssignedProblem, DrawnProblem, Group, PoolSizes, PoolsState

_STREAM = 0x706F6F6C
"""Separates these random numbers from the permutations of epochs, which have the same seed."""


class Pool(IntEnum):
    """Difficulty of a problem for the policy. A problem that was not run yet is normal."""

    EASY = 0
    NORMAL = 1
    HARD = 2


@frozen(kw_only=True)
class DifficultyConfig:
    """Pools of problems by solve rate, the share of a problem's last group with at least ``solved_reward``.

    From ``easy_above`` on a problem is easy, up to ``hard_below`` it is hard. ``easy_fraction`` and ``hard_fraction``
    are the shares of the draws that these pools get; the rest goes to all others, including new ones. The share of an
    empty pool goes to the normal ones, and if there are none, to all problems. Within a pool, the problems that were
    drawn least come first.
    """

    enabled: bool = False
    solved_reward: float = field(default=1.0, validator=and_(gt(-math.inf), lt(math.inf)))  # rejects NaN, too
    easy_above: float = field(default=0.9, validator=and_(ge(0), le(1)))
    hard_below: float = field(default=0.1, validator=and_(ge(0), le(1)))
    easy_fraction: float = field(default=0.05, validator=and_(ge(0), le(1)))
    hard_fraction: float = field(default=0.2, validator=and_(ge(0), le(1)))

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` for pools that overlap, or shares that add up to more than 1."""
        if self.hard_below >= self.easy_above:
            raise ValueError(f"hard_below ({self.hard_below:g}) has to be less than easy_above ({self.easy_above:g})")
        if self.easy_fraction + self.hard_fraction > 1:
            raise ValueError(f"easy_fraction and hard_fraction add up to {self.easy_fraction + self.hard_fraction:g}")


class ProblemPools:
    """Draws rows of a dataset of ``num_problems``; a plain object with a single owner.

    ``start`` is the state in the checkpoint from which a run continues; rows that the dataset no longer has are
    dropped.
    """

    def __init__(
        self, config: DifficultyConfig, *, num_problems: int, seed: int = 0, start: PoolsState | None = None
    ) -> None:
        self._config = config
        self._seed = seed
        self._num_drawn_N = np.zeros(num_problems, np.int64)
        self._solve_rate_N = np.full(num_problems, np.nan)
        self._assigned: dict[int, int] = {}
        for known in start.problems if start is not None else ():
            if known.row < num_problems:
                self._num_drawn_N[known.row] = known.num_drawn
                self._solve_rate_N[known.row] = np.nan if known.solve_rate is None else known.solve_rate
        for assigned in start.assigned if start is not None else ():
            if assigned.row < num_problems:
                self._assigned[assigned.position] = assigned.row

    def draw(self, position: int) -> int:
        """Return the row to run at ``position``: the same one until ``learn`` says that the position is done."""
        if position in self._assigned:
            return self._assigned[position]
        random = np.random.default_rng((_STREAM, self._seed, position))
        share = random.random()
        wanted = Pool.NORMAL
        if share < self._config.easy_fraction:
            wanted = Pool.EASY
        elif share < self._config.easy_fraction + self._config.hard_fraction:
            wanted = Pool.HARD
        pools_N = self._pools
        # The last choice is never empty: a dataset has problems.
        choices = (pools_N == wanted, pools_N == Pool.NORMAL, pools_N >= 0)
        chosen = next(choice for choice in choices if choice.any())
        fewest = self._num_drawn_N[chosen].min()
        rows = np.flatnonzero(chosen & (self._num_drawn_N == fewest))
        row = int(random.choice(rows))
        self._assigned[position] = row
        self._num_drawn_N[row] += 1
        return row

    def assign(self, position: int, row: int) -> None:
        """Record that ``row`` was drawn for ``position`` by an earlier process, unless the state contains it."""
        if position not in self._assigned and row < len(self._num_drawn_N):
            self._assigned[position] = row
            self._num_drawn_N[row] += 1

    def learn(self, position: int, group: Group) -> None:
        """Record how often the problem at ``position`` was solved. A group whose episodes all failed is ignored."""
        row = self._assigned.pop(position, None)
        rewards = [episode.reward for episode in group.episodes if episode.failure is None]
        if row is not None and rewards:
            self._solve_rate_N[row] = np.mean([reward >= self._config.solved_reward for reward in rewards])

    def count(self, pool: Pool) -> int:
        """Return the number of problems in ``pool``."""
        return int((self._pools == pool).sum())

    def sizes(self) -> PoolSizes:
        """Return the numbers of problems in the pools, and how often those that were run were solved."""
        known = self._solve_rate_N[~np.isnan(self._solve_rate_N)]
        return PoolSizes(
            easy=self.count(Pool.EASY),
            hard=self.count(Pool.HARD),
            num_run=len(known),
            solve_rate=float(known.mean()) if len(known) else None,
        )

    def summary(self) -> PoolsState:
        """Return the state for a checkpoint: the problems that were drawn, and those at positions that are not done."""
        rates: Sequence[float] = self._solve_rate_N.tolist()
        return PoolsState(
            problems=tuple(
                DrawnProblem(
                    row=row,
                    num_drawn=int(self._num_drawn_N[row]),
                    solve_rate=None if np.isnan(rates[row]) else rates[row],
                )
                for row in np.flatnonzero(self._num_drawn_N).tolist()
            ),
            assigned=tuple(AssignedProblem(position=at, row=row) for at, row in sorted(self._assigned.items())),
        )

    @property
    def _pools(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        pools_N = np.full(len(self._solve_rate_N), int(Pool.NORMAL), np.int64)
        pools_N[self._solve_rate_N >= self._config.easy_above] = Pool.EASY
        pools_N[self._solve_rate_N <= self._config.hard_below] = Pool.HARD
        return pools_N
