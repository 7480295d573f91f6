"""The export style ``tree``: one packed row per session, in which branches share their common tokens.

A turn's tokens follow those of its token parent. Prompt tokens beyond that are shared with siblings as far as they are
equal, so ``n`` choices of one prompt contain the prompt once. Sampled tokens are never shared, even if two answers are
equal, because each sampled token has its own return. Turns are in order of request, and therefore after the turns that
they follow.
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
    """Return one row of all turns to train and their context, or several if it would be longer than allowed.

    A turn that is trained in one row is context in the next.
    """
    trees = [_Tree(source)]
    for turn in source.trained:
        if source.max_tokens is not None and trees[-1].size_with(turn) > source.max_tokens:
            trees.append(_Tree(source))
        trees[-1].add(turn)
    return [tree.row() for tree in trees if tree.spans]


@define
class _Readings:
    """Prompt parts that were read after the same token: their ids, sorted, and the nodes that hold them."""

    keys: list[bytes] = field(factory=list)
    nodes: list[Indices] = field(factory=list)

    def shared(self, ids: Ints) -> Indices:
        """Return the nodes of the longest known prefix of ``ids``, which one of its sorted neighbours has."""
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
    """The end of a turn's tokens: the last node (-1: none yet), its depth, and the prompt parts read after it."""

    node: int = -1
    depth: int = 0
    readings: _Readings = field(factory=_Readings)


class _Tree:
    """A row under construction."""

    def __init__(self, source: Source) -> None:
        self.spans: list[Span] = []
        self._source = source
        self._trained: set[InteractionId] = set()
        self._ends: dict[InteractionId | None, _End] = {None: _End()}
        self._ids: list[Ints] = []
        self._predecessors: list[npt.NDArray[np.integer]] = []
        self._size = 0

    def size_with(self, turn: Interaction) -> int:
        """Return the number of tokens of the row after ``turn`` was added."""
        missing = self._missing(turn)
        shared = self._ends[missing[0].token_parent].readings.shared(missing[0].prompt_suffix)
        return self._size - len(shared) + sum(len(t.prompt_suffix) + _num_sampled(t) for t in missing)

    def add(self, turn: Interaction) -> None:
        """Add the context of ``turn``, and its output, which is trained here."""
        for each in self._missing(turn):
            self._place(each)
        self._trained.add(turn.id)

    def row(self) -> Trajectory:
        """Return the finished row."""
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
        """Return the turn and its token parents that are not in the row, oldest first."""
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
        """Append nodes for ``ids``, the first of them after node ``after``."""
        nodes = np.arange(self._size, self._size + len(ids))
        if len(ids):
            self._ids.append(ids)
            self._predecessors.append(np.concatenate([[after], nodes[:-1]]))
            self._size += len(ids)
        return nodes


def _num_sampled(turn: Interaction) -> int:
    return 0 if turn.completion is None else len(turn.completion.token_ids)


def _key(ids: Ints) -> bytes:
    """Return a key that sorts as the ids do."""
    return ids.astype(">i4").tobytes()


def _agreement(ids: Ints, key: bytes) -> int:
    """Return how many ids at the start agree with those of ``key``."""
    other = np.frombuffer(key, ">i4")
    length = min(len(ids), len(other))
    differs = ids[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


_NONE: Indices = np.zeros(0, np.int64)
