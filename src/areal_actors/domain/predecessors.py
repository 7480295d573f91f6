"""Several branches in one row: for each token the one before it, and what follows from that.

A row of T tokens is usually one sequence. The row of a tree holds each token once, however many branches go through
it; ``predecessors`` int32 [T] names the index of the token before each one, -1 where a branch begins at a root. It is
less than the token's own index, so ancestors stand first, and a token sees its ancestors and itself::

    ids            s  u  a  b  c  d          s u a b c    and    s u a d
    predecessors  -1  0  1  2  3  2
    positions      0  1  2  3  4  3

Everything here works on runs, in which each token follows the one beside it: long rows have few of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from areal_actors.domain.arrays import Ints

__all__ = ["branch_ends", "is_tree_order", "path_to", "tree_attention_mask", "tree_position_ids"]

Indices = npt.NDArray[np.int64]


def is_tree_order(predecessors: npt.NDArray[Any]) -> bool:
    """Whether each of ``predecessors`` [T] is -1 or the index of an earlier token."""
    return bool(((predecessors >= -1) & (predecessors < np.arange(len(predecessors)))).all())


def tree_position_ids(predecessors: Ints) -> Ints:
    """The number of ancestors of each token, int32 [T]."""
    depths = np.zeros(len(predecessors), np.int32)
    for start, stop in _runs(predecessors):
        before = int(predecessors[start])
        first = 0 if before < 0 else int(depths[before]) + 1
        depths[start:stop] = np.arange(first, first + stop - start)
    return depths


def tree_attention_mask(predecessors: Ints) -> npt.NDArray[np.bool_]:
    """Whether token i sees token j, bool [T, T]: itself and its ancestors."""
    seen = np.zeros((len(predecessors), len(predecessors)), np.bool_)
    for start, stop in _runs(predecessors):
        before = int(predecessors[start])
        if before >= 0:
            seen[start:stop] = seen[before]
        seen[start:stop, start:stop] = np.tri(stop - start, dtype=np.bool_)
    return seen


def branch_ends(predecessors: Ints) -> Indices:
    """The tokens that no other one follows, in order, int64 [number of branches]."""
    is_end = np.ones(len(predecessors), np.bool_)
    is_end[predecessors[predecessors >= 0]] = False
    return np.flatnonzero(is_end)


def path_to(end: int, predecessors: Ints) -> Indices:
    """The ancestors of token ``end``, the root first, and itself: int64 [depth + 1]."""
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
    """Where tokens do not follow their neighbour; a root begins a run, too, if it is the first token."""
    follows = predecessors == np.arange(-1, len(predecessors) - 1)
    follows[:1] = False
    return np.flatnonzero(~follows)
