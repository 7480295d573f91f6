"""The problem at each position of a run: a pure function, so that a resumed run continues exactly where it was."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
from attrs import evolve

from areal_actors.domain import Problem
from areal_actors.errors import DatasetError

__all__ = ["MixedProblems", "Problems", "TrainingProblems", "find_overlap"]

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


class MixedProblems:
    """The problems of several sources, each in its own epochs; ``weights`` are their shares of the positions.

    A position goes to the source that is furthest behind its share. So after n positions the number of a source
    differs from its share of n by less than the number of sources, and a resumed run draws as an uninterrupted one.
    """

    def __init__(self, sources: Mapping[str, Problems], weights: Mapping[str, float]) -> None:
        self._sources = dict(sources)
        total = math.fsum(weights[name] for name in sources)
        self._shares = {name: weights[name] / total for name in sources}
        self._counts = dict.fromkeys(sources, 0)
        self._places: list[tuple[str, int]] = []
        """The source of each position so far, and the position within it."""

    def __len__(self) -> int:
        """Return the number of problems of all sources."""
        return sum(map(len, self._sources.values()))

    def at(self, position: int, row: int | None = None) -> Problem:
        """Return the problem at ``position``, with the name of its source. Raises ``IndexError`` for a negative one."""
        assert row is None, "problems of several sources are run in their order"
        if position < 0:
            raise IndexError(f"Problems are counted from 0; there is none at {position}.")
        while len(self._places) <= position:
            num = len(self._places) + 1
            name = max(self._shares, key=lambda name: self._shares[name] * num - self._counts[name])
            self._places.append((name, self._counts[name]))
            self._counts[name] += 1
        name, index = self._places[position]
        return evolve(self._sources[name].at(index), position=position, source=name)

    def all(self) -> tuple[Problem, ...]:
        """Return every problem of every source once."""
        return tuple(
            evolve(problem, source=name) for name, problems in self._sources.items() for problem in problems.all()
        )


TrainingProblems = Problems | MixedProblems


def find_overlap(train: TrainingProblems, held_out: Problems) -> int:
    """Return how many held-out problems are also trained on.

    Two problems are the same if their JSON is equal without ``metadata``; values that JSON cannot represent are
    compared by their ``repr``.
    """
    seen = {_fingerprint(problem) for problem in train.all()}
    return sum(_fingerprint(problem) in seen for problem in held_out.all())


def _fingerprint(problem: Problem) -> str:
    told = {str(key): value for key, value in problem.data.items() if key != _ABOUT_THE_SOURCE}
    return json.dumps(told, sort_keys=True, default=repr)
