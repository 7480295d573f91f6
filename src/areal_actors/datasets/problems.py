"""Which problem stands at which position: a pure function, so that a resumed run goes on exactly where it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from areal_actors.domain import Problem
from areal_actors.errors import DatasetError

__all__ = ["Problems", "find_overlap"]


class Problems:
    """A finite list of problems, read in epochs without end. Each epoch is a permutation of its own, drawn from ``seed``.

    Raises ``DatasetError`` for an empty list.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, seed: int = 0, is_shuffled: bool = True) -> None:
        if not rows:
            raise DatasetError("The dataset has no problems; check its source, and what selects from it.")
        self._rows = rows
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """The number of problems of one epoch."""
        return len(self._rows)

    def at(self, position: int) -> Problem:
        """The problem at ``position``, counted over all epochs from 0."""
        epoch, index = divmod(position, len(self._rows))
        return Problem(position=position, data=dict(self._rows[self._order(epoch)[index]]))

    def all(self) -> tuple[Problem, ...]:
        """Every problem once, in the order of the source: what an evaluation runs."""
        return tuple(Problem(position=index, data=dict(row)) for index, row in enumerate(self._rows))

    def _permutation(self, epoch: int) -> list[int]:
        if not self._is_shuffled:
            return list(range(len(self._rows)))
        order: list[int] = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)).tolist()
        return order


def find_overlap(train: Problems, held_out: Problems) -> int:
    """How many held-out problems are also trained on. Problems are equal if their JSON is."""
    seen = {_fingerprint(problem) for problem in train.all()}
    return sum(_fingerprint(problem) in seen for problem in held_out.all())


def _fingerprint(problem: Problem) -> bytes:
    return orjson.dumps(dict(problem.data), option=orjson.OPT_SORT_KEYS, default=repr)
