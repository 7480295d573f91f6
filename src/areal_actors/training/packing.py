"""Packing of rows into forward passes: rows one after another, or token tries that compute a shared prefix once.

In the ``flat`` layout rows follow each other in one packed row without padding, and none attends to another. For models
that accept no such packs they are stacked and padded on the right. In the ``tree`` layout the rows of a group are
merged while their ids agree. A trie of U nodes becomes one packed row of U tokens; a node's position is its depth, and
it attends to its ancestors and itself::

    row 0   s u a b c            nodes      s u a b c d e x
    row 1   s u a d e     ->     positions  0 1 2 3 4 3 4 2
    row 2   s u x                d attends to s u a d; x to s u x

A token that several rows train is one node and still one term per row: each row has its own weight and advantage. Nodes
below which nothing is trained are not computed, as their predictions are not used (in both layouts).

The points where rows diverge are found by sorting them, so a trie costs vector operations per row instead of a
dictionary per token. The sorted order also lists nodes depth first: the nodes below a node follow it directly. Hence
one number for each node defines the whole mask: node i attends to node j if ``j <= i < subtree_ends[j]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from areal_actors.domain import Ints
from areal_actors.training.batch import Indices, TrainingRow
from areal_actors.training.distributions import Distributions

_PAD = 0
"""Token id that pads short rows. Any id would do: no real token attends to it, and its predictions are not read."""


@frozen(kw_only=True)
class Segment:
    """A run of nodes without a branch: queries ``start`` to ``stop`` attend to ``ancestors``, and causally to the run.

    ``ancestors`` int64 [A] are the nodes above the first one, from the root down.
    """

    start: int
    stop: int
    ancestors: Indices = field(eq=False)

    def shifted(self, offset: int) -> Segment:
        """Return the same run with all nodes moved by ``offset``."""
        return Segment(start=self.start + offset, stop=self.stop + offset, ancestors=self.ancestors + offset)


@frozen(kw_only=True)
class Trie:
    """Merged rows of U nodes: ``ids`` and ``depths`` int64 [U], ancestors first.

    ``paths`` gives each row's nodes, in the order of ``rows``. ``segments`` are the runs of nodes that the rows added.
    """

    rows: tuple[int, ...]
    ids: Indices = field(eq=False)
    depths: Indices = field(eq=False)
    paths: tuple[Indices, ...] = field(eq=False)
    segments: tuple[Segment, ...] = field(eq=False)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, U."""
        return len(self.ids)


@frozen(kw_only=True)
class Pack:
    """One forward pass: R rows of L positions, and the positions in it that predict the trained tokens.

    ``input_ids`` and ``position_ids`` are int64 [R, L]. If ``segments`` is ``None``, rows are plain causal ones;
    otherwise R is 1 and the segments, which cover all L positions in order and depth first, define which positions
    attend to which. ``rows``
    names the batch rows inside; for their trained tokens, row by row, ``sources`` int64 [n] is the index into R·L that
    predicts the token, and ``targets`` int64 [n] its id. ``num_tokens`` excludes padding. ``distributions`` are those
    that the targets were sampled from; ``None`` means the plain softmax. ``routed_experts`` int32
    [R·L, layers, k] are those that the engine recorded for each position, -1 where it recorded none, if all rows have
    them. Of a token that several rows share, those of the first row are taken.
    """

    input_ids: Indices = field(eq=False)
    position_ids: Indices = field(eq=False)
    segments: tuple[Segment, ...] | None = field(eq=False)
    rows: tuple[int, ...]
    sources: Indices = field(eq=False)
    targets: Indices = field(eq=False)
    num_tokens: int
    distributions: Distributions | None = field(default=None, eq=False)
    routed_experts: Ints | None = field(default=None, eq=False)


def pack_flat(rows: Sequence[TrainingRow], indices: Sequence[int], *, max_tokens: int) -> list[Pack]:
    """Return forward passes of the rows ``indices``, one after another, at most ``max_tokens`` positions each.

    A longer row gets a pass to itself. Every one of these rows must train a token.
    """
    # Rows without ancestors are tries, too: hence no padding, and 0.67 to 0.72 times the time of padded ragged rows
    # (10M parameters, one core).
    alone = [build_trie([_input_ids(rows[index])], [index]) for index in indices]
    return [_packed(rows, chosen) for chosen in _fill_row(alone, max_tokens=max_tokens)]


def pack_padded(rows: Sequence[TrainingRow], indices: Sequence[int], *, max_tokens: int) -> list[Pack]:
    """Return forward passes of the rows ``indices``, right-padded, at most ``max_tokens`` positions each.

    These need no attention mask, so any model computes them. A longer row gets a pass to itself. Every one of these
    rows must train a token.
    """
    # In descending length, each pass padded to its first row: rows of similar length share a pass, so padding is small.
    bins: list[list[int]] = []
    for index in sorted(indices, key=lambda index: -_needed(rows[index])):
        if bins and (len(bins[-1]) + 1) * _needed(rows[bins[-1][0]]) <= max_tokens:
            bins[-1].append(index)
        else:
            bins.append([index])
    packs = []
    for chosen in bins:
        sequences = [_input_ids(rows[index]).astype(np.int64) for index in chosen]
        length = max(map(len, sequences))
        padded = [np.pad(ids, (0, length - len(ids)), constant_values=_PAD) for ids in sequences]
        packs.append(
            _create_pack(
                rows,
                [(row, slot * length + np.arange(_needed(rows[row]))) for slot, row in enumerate(chosen)],
                input_ids=np.stack(padded),
                position_ids=np.tile(np.arange(length), (len(sequences), 1)),
                segments=None,
                num_tokens=sum(map(len, sequences)),
            )
        )
    return packs


def pack_tree(rows: Sequence[TrainingRow], indices: Sequence[int], *, max_tokens: int) -> list[Pack]:
    """Return forward passes of tries of the rows ``indices``, at most ``max_tokens`` positions each.

    A longer row gets a pass to itself. Only rows of the same group are merged. A group whose trie exceeds the bound is
    split into several. Every one of these rows must train a token.
    """
    groups: dict[int, list[int]] = {}
    for index in indices:
        groups.setdefault(rows[index].group, []).append(index)
    tries: list[Trie] = []
    for members in groups.values():
        sequences = {index: _input_ids(rows[index]) for index in members}
        # Lexicographic neighbours share the most, so that a cut between two of them computes the least twice.
        ordered = sorted(members, key=lambda index: _sort_key(sequences[index]))
        current: list[int] = []
        size, previous = 0, np.zeros(0, dtype=np.int32)
        for index in ordered:
            added = len(sequences[index]) - _common_prefix(previous, sequences[index])
            if current and size + added > max_tokens:
                tries.append(build_trie([sequences[i] for i in current], current))
                current, size, added = [], 0, len(sequences[index])
            current, size, previous = [*current, index], size + added, sequences[index]
        tries.append(build_trie([sequences[i] for i in current], current))
    return [_packed(rows, chosen) for chosen in _fill_row(tries, max_tokens=max_tokens)]


def subtree_ends(segments: Sequence[Segment]) -> npt.NDArray[np.int32]:
    """Return, for each of the L positions up to the last of ``segments``, the end of its subtree, int32 [L].

    The nodes below node j are those from j + 1 up to this end, so that i attends to j exactly if ``j <= i < ends[j]``.
    Positions that are neither in a segment nor an ancestor of one have 0: none attends to them.
    """
    ends = np.zeros(segments[-1].stop, dtype=np.int32)
    for segment in segments:  # in ascending order, so that the last segment below a node sets its end
        ends[segment.start : segment.stop] = segment.stop
        ends[segment.ancestors] = segment.stop
    return ends


def node_depths(segments: Sequence[Segment]) -> npt.NDArray[np.int32]:
    """Return the number of ancestors of each of the L positions up to the last of ``segments``, int32 [L].

    Positions that are neither in a segment nor an ancestor of one have 0.
    """
    depths = np.zeros(segments[-1].stop, dtype=np.int32)
    for segment in segments:
        num_above, size = len(segment.ancestors), segment.stop - segment.start
        depths[segment.ancestors] = np.arange(num_above)
        depths[segment.start : segment.stop] = np.arange(num_above, num_above + size)
    return depths


def build_trie(sequences: Sequence[Ints], rows: Sequence[int]) -> Trie:
    """Merge ``sequences`` (int32 [T_i], none empty) by equal prefixes; ``rows`` are their names in the result.

    The result lists the sequences in lexicographic order, so that neighbours share the most.
    """
    order = sorted(range(len(sequences)), key=lambda index: _sort_key(sequences[index]))
    paths: list[Indices] = []
    ids: list[Ints] = []
    segments: list[Segment] = []
    num_nodes, previous = 0, np.zeros(0, dtype=np.int32)
    for index in order:
        sequence = sequences[index]
        shared = _common_prefix(previous, sequence)
        ancestors = paths[-1][:shared] if paths else np.zeros(0, dtype=np.int64)
        stop = num_nodes + len(sequence) - shared
        paths.append(np.concatenate([ancestors, np.arange(num_nodes, stop)]))
        ids.append(sequence[shared:])
        if stop > num_nodes:
            segments.append(Segment(start=num_nodes, stop=stop, ancestors=ancestors))
        num_nodes, previous = stop, sequence
    depths = [len(segment.ancestors) + np.arange(segment.stop - segment.start) for segment in segments]
    return Trie(
        rows=tuple(rows[index] for index in order),
        ids=np.concatenate(ids).astype(np.int64),
        depths=np.concatenate(depths).astype(np.int64),
        paths=tuple(paths),
        segments=tuple(segments),
    )


# ------------------------------------------------------------------------------------------------------- tries


def _sort_key(sequence: Ints) -> bytes:
    # Big-endian bytes of ids, which are never negative, sort like the ids themselves.
    return sequence.astype(">i4").tobytes()


def _common_prefix(first: Ints, second: Ints) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


# ------------------------------------------------------------------------------------------------------- packs


def _packed(rows: Sequence[TrainingRow], tries: Sequence[Trie]) -> Pack:
    """Concatenate tries in a single row; tokens of one trie do not attend to another."""
    offsets = np.cumsum([0, *(trie.num_nodes for trie in tries)])
    places = [
        (index, path + offset)
        for trie, offset in zip(tries, offsets, strict=False)
        for index, path in zip(trie.rows, trie.paths, strict=True)
    ]
    return _create_pack(
        rows,
        places,
        input_ids=np.concatenate([trie.ids for trie in tries])[None],
        position_ids=np.concatenate([trie.depths for trie in tries])[None],
        segments=tuple(
            segment.shifted(int(offset))
            for trie, offset in zip(tries, offsets, strict=False)
            for segment in trie.segments
        ),
        num_tokens=int(offsets[-1]),
    )


def _create_pack(
    rows: Sequence[TrainingRow],
    places: Sequence[tuple[int, Indices]],
    *,
    input_ids: Indices,
    position_ids: Indices,
    segments: tuple[Segment, ...] | None,
    num_tokens: int,
) -> Pack:
    """Return the pass of the rows in ``places``, each with the indices int64 [T] of its tokens in the pass."""
    chosen = [rows[index] for index, _ in places]
    targets = np.concatenate([row.trajectory.input_ids[row.positions] for row in chosen])
    return Pack(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        rows=tuple(index for index, _ in places),
        # Token t is predicted at t - 1.
        sources=np.concatenate([path[rows[index].positions - 1] for index, path in places]),
        targets=targets.astype(np.int64),
        num_tokens=num_tokens,
        distributions=Distributions.join([row.distributions for row in chosen]),
        routed_experts=_experts(rows, places, size=input_ids.size),
    )


def _fill_row(tries: Sequence[Trie], *, max_tokens: int) -> list[list[Trie]]:
    """Return passes of tries in their order, cut before one that does not fit.

    Nothing is padded, so no other order would be better.
    """
    passes: list[list[Trie]] = []
    size = 0
    for trie in tries:
        if not passes or size + trie.num_nodes > max_tokens:
            passes.append([])
            size = 0
        passes[-1].append(trie)
        size += trie.num_nodes
    return passes


def _needed(row: TrainingRow) -> int:
    """Return the number of tokens to compute: those that predict a trained token, and those that they attend to."""
    # Token t is predicted at t - 1, so the last trained token itself is not computed.
    return int(row.positions[-1])


def _input_ids(row: TrainingRow) -> Ints:
    return row.trajectory.input_ids[: _needed(row)]


def _experts(rows: Sequence[TrainingRow], places: Sequence[tuple[int, Indices]], *, size: int) -> Ints | None:
    """Return the recorded experts of ``size`` positions, given the positions of each row's tokens."""
    recorded = [rows[index].trajectory.routed_experts for index, _ in places]
    known = [experts for experts in recorded if experts is not None]
    if not known or len(known) < len(recorded):
        return None
    result = np.full((size, *known[0].shape[1:]), -1, dtype=np.int32)
    # Backwards, so that the first row with a token decides; entries that it does not know are left to the others.
    for experts, (_, nodes) in zip(reversed(known), reversed(places), strict=True):
        part = experts[: len(nodes)].astype(np.int32)
        part[part == np.iinfo(experts.dtype).max] = -1
        result[nodes] = np.where(part < 0, result[nodes], part)
    return result
