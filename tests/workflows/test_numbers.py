"""Numbers that agents log: what is taken, what is refused by name, and their means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import MAX_NUMBERS, average_numbers, merge_numbers
from areal_actors.errors import InvalidRequest
from areal_actors.workflows import EpisodeContext, workflow_context

names = st.text("abc_.-9", min_size=1, max_size=5)
numbers = st.dictionaries(names, st.floats(-1e6, 1e6), max_size=6)


@given(numbers, numbers)
def test_last_value_of_a_name_counts(kept, new):
    """As in a dictionary; what is given is not changed."""
    before = dict(kept)

    assert {**kept, **new} == merge_numbers(kept, new)
    assert before == kept


@given(st.lists(numbers, max_size=8))
def test_means_are_over_the_episodes_that_logged(episodes):
    """Against a slow reading; the count says how many did."""
    found = average_numbers(episodes, scope="rollout")
    for name in {name for episode in episodes for name in episode}:
        values = [episode[name] for episode in episodes if name in episode]
        assert found[f"rollout/{name}"] == pytest.approx(np.mean(values), abs=1e-6)
        assert found[f"rollout/{name}/count"] == len(values)


def test_logged_scalars_are_numbers():
    """Of Python, numpy, and whatever has an ``item``."""
    found = merge_numbers({}, {"a": True, "b": 2, "c": np.float32(0.5), "d": np.array(3)})

    assert {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0} == found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, [1.0], 10**400, np.zeros(2), 1j])
def test_logged_value_must_be_finite(value):
    """The message has the name and the value."""
    with pytest.raises(InvalidRequest, match=r"judge was logged as .*; log a finite number") as info:
        merge_numbers({}, {"ok": 1.0, "judge": value})
    assert info.value.param == "judge"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, 3])
def test_logged_names_are_plain(name):
    """They become parts of keys."""
    with pytest.raises(InvalidRequest, match="cannot name a number"):
        merge_numbers({}, {name: 1.0})


def test_logged_names_are_bounded():
    """One too many is refused, a known one is not."""
    full = merge_numbers({}, {f"n{i}": 0.0 for i in range(MAX_NUMBERS)})

    assert merge_numbers(full, {"n0": 1.0})["n0"] == 1.0
    with pytest.raises(InvalidRequest, match="at most 64 names, and this would make 65"):
        merge_numbers(full, {"more": 1.0})


def test_logged_numbers_are_separate_by_episode():
    """Within each other, one after another, and none outside."""
    with workflow_context.enter(EpisodeContext(member=1)):
        workflow_context.log(a=1.0)
        with workflow_context.enter(EpisodeContext(member=2)):
            workflow_context.log(b=2.0)
            assert {"b": 2.0} == workflow_context.logged()
        workflow_context.log(a=3.0)
        assert {"a": 3.0} == workflow_context.logged()

    assert {} == workflow_context.logged()
    with pytest.raises(InvalidRequest, match="outside of an episode"):
        workflow_context.log(a=1.0)
