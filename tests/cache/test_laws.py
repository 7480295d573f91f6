"""The laws without Hypothesis: what a run finds of a rule when it starts."""

from __future__ import annotations

import itertools

import pytest

from areal_actors.cache import RULES, LawReport, find_broken
from areal_actors.cache.laws import LAWS
from areal_actors.cache.rewards import backpropagate
from areal_actors.errors import CustomFunctionError

BROKEN = {
    "mean": (),
    "sum": ("bounded",),
    "max": ("linear",),
    "creation-order": (
        "leaves keep their own",
        "free of order",
        "bounded",
        "roots are independent",
        "siblings are strangers",
    ),
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_find_broken_agrees_with_hypothesis(rule):
    """The seeded trees break the same laws."""
    report = find_broken(rule)

    assert BROKEN[rule] == report.broken
    assert set(LAWS) == {*report.kept, *report.broken}


def test_stateful_rule_is_not_pure():
    """The order of calls must not matter."""
    calls = itertools.count()

    assert "pure" in find_broken(lambda tree, _: [float(next(calls))] * len(tree.ids)).broken


@pytest.mark.parametrize("threshold", [1e-9, 1e-3, 1.0, 100.0])
def test_rule_that_cuts_small_returns_does_not_scale(threshold):
    """A reward has no unit."""

    def rule(tree, discount):
        returns = backpropagate(tree, discount)
        return [returns[name] if abs(returns[name]) >= threshold else 0.0 for name in tree.ids]

    assert "returns scale with rewards" in find_broken(rule).broken


def test_slow_rule_is_tried_on_fewer_trees():
    """The clock bounds the time."""
    ticks = itertools.count()
    report = find_broken("mean", clock=lambda: float(next(ticks)))

    assert LawReport(kept=tuple(LAWS), broken=(), num_trees=1) == report


def test_rule_that_fails_on_a_forest_is_found():
    """Rules are tried on an answer, a chain, a branch and a forest."""

    def only_one_root(tree, _):
        return tree.rewards if tree.parents.count(None) == 1 else tree.rewards[:1]

    with pytest.raises(CustomFunctionError, match=r"only_one_root returned 1 numbers, \[0.0\]; .* each of the 3"):
        find_broken(only_one_root)
