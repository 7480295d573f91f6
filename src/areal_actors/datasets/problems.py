"""The problem at each position of a run: a pure function, so that a resumed run continues exactly where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np

from areal_actors.domain import Problem
from areal_actors.errors import DatasetError

_ABOUT_THE_SOURCE = "metadata"
"""Key under which generators describe how they made a problem; it is ignored when problems are compared."""


class Problems:
    """A finite list of problems, read in epochs without end; each epoch has a different permutation.

    ``seed`` draws the permutations. Raises ``DatasetError`` for an empty list.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, seed: int = 0, is_shuffled: bool = True) -> None:
        if not len(rows):
            raise DatasetError("The dataset has no problems; check its source, and what selects from it.")
        self._rows = rows
        self._seed = seed
        self._is_shuffled = is_shuffled
        # Two epochs: the last groups of one are still requested when the next one has begun.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """Return the number of problems in one epoch."""
        return len(self._rows)

    def at(self, position: int, row: int | None = None) -> Problem:
        """Return the problem at ``position``, counted over all epochs from 0. Its data is a copy for the agent.

        If ``row`` is given, that problem is returned instead of the one of the epoch. Raises ``IndexError`` for a
        negative position.
        """
        if position < 0:
            raise IndexError(f"Problems are counted from 0; there is none at {position}.")
        if row is not None:
            return self._problem(position, row)
        epoch, index = divmod(position, len(self._rows))
        return self._problem(position, self._order(epoch)[index])

    def all(self) -> tuple[Problem, ...]:
        """Return every problem once, in the order of the source, for an evaluation."""
        return tuple(self._problem(index, index) for index in range(len(self._rows)))

    def _problem(self, position: int, row: int) -> Problem:
        # A copy, because an agent may change its data and the row is used again.
        return Problem(position=position, data=deepcopy(dict(self._rows[row])))

    def _permutation(self, epoch: int) -> list[int]:
        if not self._is_shuffled:
            return list(range(len(self._rows)))
        order: list[int] = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)).tolist()
        return order


def find_overlap(held_out: Problems, *train: Problems) -> int:
    """Return how many held-out problems are also trained on, in any of several datasets.

    Two problems are the same if their JSON is equal without ``metadata``; values that JSON cannot represent are
    compared by their ``repr``.
    """
    seen = {_fingerprint(problem) for one in train for problem in one.all()}
    return sum(_fingerprint(problem) in seen for problem in held_out.all())


def _fingerprint(problem: Problem) -> str:
    told = {str(key): value for key, value in problem.data.items() if key != _ABOUT_THE_SOURCE}
    return json.dumps(told, sort_keys=True, default=repr)
