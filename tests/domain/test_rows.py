"""Digests of tokens with their contexts: equal where a model would compute the same, and nowhere else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import context_digests


@st.composite
def trees(draw):
    """Ids and predecessors of a row in which each token continues an earlier one."""
    ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=24))
    predecessors = [draw(st.integers(-1, index - 1)) for index in range(len(ids))]
    return np.array(ids, np.int32), np.array(predecessors, np.int32)


def path_of(index, ids, predecessors):
    """The ids from the root to the token."""
    return (*path_of(predecessors[index], ids, predecessors), int(ids[index])) if index >= 0 else ()


@given(rows=st.lists(trees(), min_size=1, max_size=3))
def test_context_digests_are_equal_where_paths_are_equal(rows):
    """Within a row and across rows, whatever the order of the branches."""
    digests = np.concatenate([context_digests(*row) for row in rows]).tolist()
    paths = [path_of(index, *row) for row in rows for index in range(len(row[0]))]

    assert len(set(digests)) == len(set(paths)) == len(set(zip(digests, paths, strict=True)))


def test_context_digests_of_a_plain_row_are_those_of_a_chain():
    """A row without predecessors is one branch."""
    ids = np.array([7, 7, 7, 0], np.int32)

    assert context_digests(ids).tolist() == context_digests(ids, np.arange(-1, 3, dtype=np.int32)).tolist()
    assert len(set(context_digests(ids).tolist())) == 4
