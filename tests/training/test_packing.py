"""Packing: tries against sets of prefixes, and every trained token found exactly where it is predicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.masks import visible

from areal_actors.training.batch import TrainingRow
from areal_actors.training.packing import (
    build_trie,
    node_depths,
    pack_flat,
    pack_padded,
    pack_tree,
    subtree_ends,
)

sequences = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=7)


@st.composite
def batches(draw, make_row):
    """Training rows over a tiny alphabet, hence with many shared prefixes, in up to three groups."""
    rows = []
    for ids in draw(sequences):
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        mask[draw(st.integers(1, len(ids) - 1))] = 1
        row = make_row(ids, mask)
        rows.append(TrainingRow(trajectory=row, advantages=np.ones(len(ids)), group=draw(st.integers(0, 2))))
    return rows


@given(found=sequences)
def test_trie_has_one_node_for_each_prefix(found):
    """Nodes are the distinct prefixes, each row's path spells it, and depth is position."""
    trie = build_trie([np.array(ids, dtype=np.int32) for ids in found], list(range(len(found))))

    assert trie.num_nodes == len({tuple(ids[: n + 1]) for ids in found for n in range(len(ids))})
    for row, path in zip(trie.rows, trie.paths, strict=True):
        assert trie.ids[path].tolist() == found[row]
        assert trie.depths[path].tolist() == list(range(len(path)))


@given(data=st.data(), max_tokens=st.integers(1, 60))
@pytest.mark.parametrize("pack", [pack_flat, pack_padded, pack_tree])
def test_every_trained_token_is_predicted_from_its_own_past(make_row, data, pack, max_tokens):
    """What a source attends to, by position, is the row up to that token; targets are the tokens; none is missing."""
    rows = data.draw(batches(make_row))

    packs = pack(rows, range(len(rows)), max_tokens=max_tokens)

    assert sorted(index for found in packs for index in found.rows) == list(range(len(rows)))
    for found in packs:
        tokens = iter(zip(found.sources, found.targets, strict=True))
        for index in found.rows:
            ids = rows[index].trajectory.input_ids
            for t in rows[index].positions:
                source, target = next(tokens)
                assert target == ids[t]
                assert past_of(found, source) == ids[:t].tolist()
        assert next(tokens, None) is None


def past_of(pack, source):
    """The ids that the position attends to, by their positions."""
    slot, query = divmod(int(source), pack.input_ids.shape[1])
    length = pack.input_ids.shape[1]
    seen = np.tri(length, dtype=bool) if pack.segments is None else visible(pack.segments)
    keys = np.flatnonzero(seen[query])
    ordered = keys[np.argsort(pack.position_ids[slot, keys])]
    assert pack.position_ids[slot, ordered].tolist() == list(range(len(keys)))
    return pack.input_ids[slot, ordered].tolist()


@given(data=st.data(), max_tokens=st.integers(1, 60))
@pytest.mark.parametrize("pack", [pack_flat, pack_padded, pack_tree])
def test_passes_stay_within_the_bound(make_row, data, pack, max_tokens):
    """Only a pass of a single row may be larger than the bound."""
    rows = data.draw(batches(make_row))

    for found in pack(rows, range(len(rows)), max_tokens=max_tokens):
        assert found.input_ids.size <= max_tokens or len(found.rows) == 1
        assert found.num_tokens <= found.input_ids.size


@given(data=st.data())
def test_tree_never_computes_more(make_row, data):
    """Without a bound the tree has at most the tokens of the flat layout, and merges only within groups."""
    rows = data.draw(batches(make_row))

    flat = sum(found.num_tokens for found in pack_flat(rows, range(len(rows)), max_tokens=10_000))
    tree = sum(found.num_tokens for found in pack_tree(rows, range(len(rows)), max_tokens=10_000))
    distinct = {
        (row.group, tuple(row.trajectory.input_ids[: n + 1])) for row in rows for n in range(int(row.positions[-1]))
    }

    assert tree == len(distinct) <= flat


@given(data=st.data())
def test_two_numbers_for_each_node_define_the_mask(make_row, data):
    """A node attends to those that start before it and end after it; its depth is the number of its ancestors."""
    rows = data.draw(batches(make_row))

    for pack in (pack_flat, pack_tree):
        for found in pack(rows, range(len(rows)), max_tokens=40):
            ends, places = subtree_ends(found.segments), np.arange(found.num_tokens)
            seen = (places <= places[:, None]) & (places[:, None] < ends)
            np.testing.assert_array_equal(seen, visible(found.segments))
            np.testing.assert_array_equal(node_depths(found.segments), seen.sum(1) - 1)
            np.testing.assert_array_equal(node_depths(found.segments), found.position_ids[0])


def test_flat_rows_are_not_padded(make_row):
    """Rows of any lengths share passes, whose bound counts their tokens only."""
    lengths = [9, 2, 7, 3, 3]
    rows = [
        TrainingRow(trajectory=make_row(np.arange(n + 1), [0] * n + [1]), advantages=np.ones(n + 1)) for n in lengths
    ]

    packs = pack_flat(rows, range(5), max_tokens=12)

    assert [found.rows for found in packs] == [(0, 1), (2, 3), (4,)]
    assert all(found.input_ids.size == found.num_tokens for found in packs)
