"""Tree rows: several branches in one row, described by each token's predecessor.

A row of T tokens is usually one sequence. The row of a tree holds each token once, even if several branches share it.
``predecessors`` int32 [T] is the index of the token before each one, -1 where a branch begins at a root. It is less
than the token's own index, so ancestors come first, and a token attends to its ancestors and itself::

    ids            s  u  a  b  c  d          s u a b c    and    s u a d
    predecessors  -1  0  1  2  3  2
    positions      0  1  2  3  4  3

All functions work on runs, in which each token follows its neighbour in the row: long rows have few runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from areal_actors.domain.arrays import Ints

__all__ = ["branch_ends", "is_tree_order", "path_to", "tree_attention_mask", "tree_position_ids"]

Indices = npt.NDArray[np.int64]


def is_tree_order(predecessors: npt.NDArray[Any]) -> bool:
    """Return whether each of ``predecessors`` [T] is -1 or the index of an earlier token."""
    return bool(((predecessors >= -1) & (predecessors < np.arange(len(predecessors)))).all())


def tree_position_ids(predecessors: Ints) -> Ints:
    """Return the number of ancestors of each token, int32 [T]."""
    depths = np.zeros(len(predecessors), np.int32)
    for start, stop in _runs(predecessors):
        before = int(predecessors[start])
        first = 0 if before < 0 else int(depths[before]) + 1
        depths[start:stop] = np.arange(first, first + stop - start)
    return depths


def tree_attention_mask(predecessors: Ints) -> npt.NDArray[np.bool_]:
    """Return whether token i attends to token j, bool [T, T]: to itself and its ancestors."""
    seen = np.zeros((len(predecessors), len(predecessors)), np.bool_)
    for start, stop in _runs(predecessors):
        before = int(predecessors[start])
        if before >= 0:
            seen[start:stop] = seen[before]
        seen[start:stop, start:stop] = np.tri(stop - start, dtype=np.bool_)
    return seen


def branch_ends(predecessors: Ints) -> Indices:
    """Return the tokens without a successor, in order, int64 [number of branches]."""
    is_end = np.ones(len(predecessors), np.bool_)
    is_end[predecessors[predecessors >= 0]] = False
    return np.flatnonzero(is_end)


def path_to(end: int, predecessors: Ints) -> Indices:
    """Return the ancestors of token ``end``, root first, and the token itself: int64 [depth + 1]."""
    starts = _run_starts(predecessors)
    parts: list[Indices] = []
    while end >= 0:
        start = int(starts[np.searchsorted(starts, end, side="right") - 1])
        parts.append(np.arange(start, end + 1))
        end = int(predecessors[start])
    return np.concatenate(parts[::-1])


def _runs(predecessors: Ints) -> list[tuple[int, int]]:
    starts = _run_starts(predecessors).tolist()
    return list(zip(starts, [*starts[1:], len(predecessors)], strict=True)) if starts else []


def _run_starts(predecessors: Ints) -> Indices:
    """Return where tokens do not follow their neighbour. The first token of the row always begins a run."""
    follows = predecessors == np.arange(-1, len(predecessors) - 1)
    follows[:1] = False
    return np.flatnonzero(~follows)
