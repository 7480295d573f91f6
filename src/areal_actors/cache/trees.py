"""The style ``tree``: one packed row per session, in which branches share what they have in common.

A turn's tokens follow those of its token parent. What it read beyond them is shared with its siblings as far as they
read the same, so ``n`` choices of one prompt have the prompt once. What was sampled is never shared, not even where two
answers are equal: each sampled token has its own return. Turns stand in the order of request, hence after whatever they
follow.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt
from attrs import define, field

from areal_actors.cache.columns import Source, Span, checked_completion, columns_of, infos_of
from areal_actors.cache.history import ancestry
from areal_actors.domain import Interaction, InteractionId, Ints, Trajectory

__all__ = ["tree_rows"]

Indices = npt.NDArray[np.int64]


def tree_rows(source: Source) -> list[Trajectory]:
    """One row of all turns to train and of what stands before them; several where it would be longer than allowed.

    A turn that was trained in one row is context in the next.
    """
    trees = [_Tree(source)]
    for turn in source.trained:
        if source.max_tokens is not None and trees[-1].size_with(turn) > source.max_tokens:
            trees.append(_Tree(source))
        trees[-1].add(turn)
    return [tree.row() for tree in trees if tree.spans]


@define
class _Readings:
    """What turns read after one and the same token: their ids, sorted, and the nodes that hold them."""

    keys: list[bytes] = field(factory=list)
    nodes: list[Indices] = field(factory=list)

    def shared(self, ids: Ints) -> Indices:
        """The nodes of the longest beginning of ``ids`` that is there already; its neighbours have it."""
        at = bisect_left(self.keys, _key(ids))
        lengths = [(_agreement(ids, self.keys[near]), near) for near in (at - 1, at) if 0 <= near < len(self.keys)]
        length, near = max(lengths, default=(0, -1))
        return self.nodes[near][:length] if length else _NONE

    def add(self, ids: Ints, nodes: Indices) -> None:
        key = _key(ids)
        at = bisect_left(self.keys, key)
        if at == len(self.keys) or self.keys[at] != key:
            self.keys.insert(at, key)
            self.nodes.insert(at, nodes)


@define(eq=False)
class _End:
    """Where a turn's own tokens end: their last node (-1: nothing yet), how deep it is, and what was read after it."""

    node: int = -1
    depth: int = 0
    readings: _Readings = field(factory=_Readings)


class _Tree:
    """A row in the making."""

    def __init__(self, source: Source) -> None:
        self.spans: list[Span] = []
        self._source = source
        self._trained: set[InteractionId] = set()
        self._ends: dict[InteractionId | None, _End] = {None: _End()}
        self._ids: list[Ints] = []
        self._predecessors: list[npt.NDArray[np.integer]] = []
        self._size = 0

    def size_with(self, turn: Interaction) -> int:
        """The tokens of the row after ``turn`` was added."""
        missing = self._missing(turn)
        shared = self._ends[missing[0].token_parent].readings.shared(missing[0].prompt_suffix)
        return self._size - len(shared) + sum(len(t.prompt_suffix) + _num_sampled(t) for t in missing)

    def add(self, turn: Interaction) -> None:
        """Add what stands before ``turn``, as context, and its output, which is trained here."""
        for each in self._missing(turn):
            self._place(each)
        self._trained.add(turn.id)

    def row(self) -> Trajectory:
        """The row."""
        last = self.spans[-1].turn
        return Trajectory(
            session=self._source.session,
            interactions=tuple(span.turn.id for span in self.spans),
            input_ids=np.concatenate(self._ids),
            **columns_of(self.spans, self._size, self._source.returns, frozenset(self._trained)),
            reward=self._source.returns[last.id],
            tag=last.tag,
            predecessors=np.concatenate(self._predecessors),
            turn_infos=infos_of(self.spans, self._source),
        )

    def _missing(self, turn: Interaction) -> list[Interaction]:
        """The turn and those of its token parents that are not in the row, the oldest first."""
        return ancestry(turn, self._source.lookup, self._absent_parent)

    def _absent_parent(self, turn: Interaction) -> InteractionId | None:
        return None if turn.token_parent in self._ends else turn.token_parent

    def _place(self, turn: Interaction) -> None:
        parent = self._ends[turn.token_parent]
        shared = parent.readings.shared(turn.prompt_suffix)
        before = int(shared[-1]) if len(shared) else parent.node
        read = self._append(turn.prompt_suffix[len(shared) :], after=before)
        nodes = np.concatenate([shared, read])
        parent.readings.add(turn.prompt_suffix, nodes)
        depth = parent.depth + len(nodes)
        completion = checked_completion(turn, depth)
        self.spans.append(Span(turn, completion, self._size))
        sampled = self._append(completion.token_ids, after=int(nodes[-1]) if len(nodes) else parent.node)
        line = np.concatenate([[parent.node], nodes, sampled])
        self._ends[turn.id] = _End(node=int(line[-1]), depth=depth + len(sampled))

    def _append(self, ids: Ints, *, after: int) -> Indices:
        """New nodes for ``ids``, the first of them behind node ``after``."""
        nodes = np.arange(self._size, self._size + len(ids))
        if len(ids):
            self._ids.append(ids)
            self._predecessors.append(np.concatenate([[after], nodes[:-1]]))
            self._size += len(ids)
        return nodes


def _num_sampled(turn: Interaction) -> int:
    return 0 if turn.completion is None else len(turn.completion.token_ids)


def _key(ids: Ints) -> bytes:
    """Sorts as the ids do, one by one."""
    return ids.astype(">i4").tobytes()


def _agreement(ids: Ints, key: bytes) -> int:
    """How many ids at the beginning are those of ``key``."""
    other = np.frombuffer(key, ">i4")
    length = min(len(ids), len(other))
    differs = ids[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


_NONE: Indices = np.zeros(0, np.int64)
