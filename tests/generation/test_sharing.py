"""Segments of shared prefixes: laws of the plan, and of the attention by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import as_ints
from areal_actors.generation.torch.attention import (
    DecodeLayout,
    KeyValues,
    StepAttention,
    common_prefix,
    plan_sharing,
)

# Few distinct ids and short minimum segments: shared prefixes of every shape are common.
rows_strategy = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12).map(as_ints), max_size=9)


def read_through(plan, rows, place):
    """The tokens that the row at ``place`` reads through its segments, each from the segment's first row."""
    parts = sorted((s for s in plan.segments if s.first <= place < s.last), key=lambda s: s.start)
    return [int(i) for s in parts for i in rows[plan.order[s.first]][s.start : s.stop]]


@given(rows_strategy, st.integers(1, 4))
def test_sharing_plan_covers_each_row_exactly_once(rows, min_shared):
    """Through segments that other rows' slots hold, a row reads exactly its own tokens, once each."""
    plan = plan_sharing(rows, min_shared=min_shared)

    assert sorted(plan.order) == list(range(len(rows)))
    for place, row in enumerate(plan.order):
        assert rows[row].tolist() == read_through(plan, rows, place)


def test_sharing_plan_reads_the_prompt_of_a_group_once():
    """Two groups of four with a common beginning: the beginning once, each prompt's rest once."""
    head = np.arange(40)
    groups = [as_ints(np.concatenate([head, np.full(35, 50 + g)])) for g in (0, 1) for _ in range(4)]

    segments = plan_sharing(groups).segments

    assert {(0, 40, 0, 8), (40, 75, 0, 4), (40, 75, 4, 8)} == {(s.start, s.stop, s.first, s.last) for s in segments}


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix_is_the_longest(first, second):
    """It agrees with counting equal tokens one by one."""
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1

    assert expected == common_prefix(as_ints(first), as_ints(second))


@given(rows_strategy.filter(bool), st.integers(1, 2), st.sampled_from([2, 4, 100]), st.integers(0, 2**16))
def test_shared_attention_equals_softmax_over_each_row(rows, group, min_together, seed):
    """A row's result is that of a softmax over the keys of its segments and of what it sampled."""
    plan, random = plan_sharing(rows, min_shared=1), torch.Generator().manual_seed(seed)
    num_rows, num_heads, size = len(rows), 2, 4
    slots = [int(slot) + 1 for slot in torch.randperm(num_rows, generator=random)]
    columns = torch.randint(0, 3, (num_rows,), generator=random)
    q, k, v = (torch.randn(num_heads * n, num_rows, size, generator=random, dtype=torch.float64) for n in (group, 1, 1))
    kv = KeyValues()
    kv.reserve(slots=num_rows + 2, columns=max(map(len, rows)))
    kv.reserve_tail(rows=num_rows, columns=3)
    layer = kv.layer(0, k, v)
    for held in (layer.keys, layer.values, layer.tail_keys, layer.tail_values):
        held.copy_(torch.randn(held.shape, generator=random, dtype=held.dtype))
    layout = DecodeLayout(
        plan=plan,
        slots=slots,
        tails=torch.randperm(num_rows, generator=random),
        num_tails=num_rows,
        bases=torch.tensor([len(rows[i]) for i in plan.order]),
        num_rows=num_rows,
        is_alone=False,
        columns=columns,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal_actors.generation.torch.attention.MIN_BATCHED_ROWS", min_together)
        found = StepAttention(kv, layout, []).attend(0, q, k, v, 0.5)

    for place in range(num_rows):
        own = [s for s in plan.segments if s.first <= place < s.last]
        tail, end = int(layout.tails[place]), int(columns[place]) + 1
        keys, values = (
            torch.cat([*(main[slots[s.first], :, s.start : s.stop] for s in own), tails[tail, :, :end]], dim=1)
            for main, tails in ((layer.keys, layer.tail_keys), (layer.values, layer.tail_values))
        )
        for head in range(num_heads * group):
            weights = torch.softmax(keys[head // group] @ q[head, place] * 0.5, dim=0)
            torch.testing.assert_close(found[head, place], weights @ values[head // group], atol=1e-5, rtol=1e-5)
