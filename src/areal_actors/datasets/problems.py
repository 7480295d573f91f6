"""Which problem stands at which position: a pure function, so that a resumed run goes on exactly where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np

from areal_actors.domain import Problem
from areal_actors.errors import DatasetError

__all__ = ["Problems", "find_overlap"]

_ABOUT_THE_SOURCE = "metadata"
"""The key under which generators say how they made a problem, which does not make it another one."""


class Problems:
    """A finite list of problems, read in epochs without end; each epoch is a permutation of its own.

    ``seed`` draws the permutations. Raises ``DatasetError`` for an empty list.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, seed: int = 0, is_shuffled: bool = True) -> None:
        if not len(rows):
            raise DatasetError("The dataset has no problems; check its source, and what selects from it.")
        self._rows = rows
        self._seed = seed
        self._is_shuffled = is_shuffled
        # Two epochs: the last groups of one are asked for again while the next one has begun.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """The number of problems of one epoch."""
        return len(self._rows)

    def at(self, position: int, row: int | None = None) -> Problem:
        """The problem at ``position``, counted over all epochs from 0. What an agent does to its data stays with it.

        With ``row``, that problem stands there, whatever the epoch would have. Raises ``IndexError`` for a negative
        position.
        """
        if position < 0:
            raise IndexError(f"Problems are counted from 0; there is none at {position}.")
        if row is not None:
            return self._problem(position, row)
        epoch, index = divmod(position, len(self._rows))
        return self._problem(position, self._order(epoch)[index])

    def all(self) -> tuple[Problem, ...]:
        """Every problem once, in the order of the source: what an evaluation runs."""
        return tuple(self._problem(index, index) for index in range(len(self._rows)))

    def _problem(self, position: int, row: int) -> Problem:
        return Problem(position=position, data=deepcopy(dict(self._rows[row])))

    def _permutation(self, epoch: int) -> list[int]:
        if not self._is_shuffled:
            return list(range(len(self._rows)))
        order: list[int] = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)).tolist()
        return order


def find_overlap(train: Problems, held_out: Problems) -> int:
    """How many held-out problems are also trained on.

    Two problems are the same if their JSON is, whatever their ``metadata``; values that JSON does not have count by
    what they print.
    """
    seen = {_fingerprint(problem) for problem in train.all()}
    return sum(_fingerprint(problem) in seen for problem in held_out.all())


def _fingerprint(problem: Problem) -> str:
    told = {str(key): value for key, value in problem.data.items() if key != _ABOUT_THE_SOURCE}
    return json.dumps(told, sort_keys=True, default=repr)
