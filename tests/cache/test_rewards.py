"""The laws of reward propagation, against a recursive oracle that shares no code with the implementation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import RULES, RewardTree, Rule, backpropagate, parse_reward, total_reward
from areal_actors.cache.rewards import try_rule
from areal_actors.domain import Interaction, InteractionId, InteractionStatus, SessionId, SessionRecord
from areal_actors.errors import CustomFunctionError, ExportError, RewardError
from areal_actors.testing.laws import REWARD_LAWS, RewardLaw, chain, is_close
from areal_actors.testing.strategies import reward_trees

discounts = st.floats(0, 1)
tree_rules = st.sampled_from(["mean", "sum", "max"])


def oracle(tree: RewardTree, discount: float, rule: str) -> dict[InteractionId, float]:
    """The definition, word by word."""
    combine = {"mean": fmean, "sum": sum, "max": max}[rule]

    def value(n: int) -> float:
        children = [value(c) for c, parent in enumerate(tree.parents) if parent == n]
        return tree.rewards[n] + (discount * combine(children) if children else 0.0)

    return {tree.ids[n]: value(n) for n in range(len(tree.ids))}


_BROKEN = {
    "mean": set(),
    "sum": {"bounded"},
    "max": {"linear"},
    "creation-order": {
        "leaves keep their own",
        "free of order",
        "bounded",
        "roots are independent",
        "siblings are strangers",
    },
}


@pytest.mark.parametrize("law", REWARD_LAWS.values(), ids=list(REWARD_LAWS))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_rules_obey_their_laws(rule: str, law: RewardLaw) -> None:
    """Each rule has a list."""
    if law.name not in _BROKEN[rule]:
        law.check(rule)


def _add_one(tree: RewardTree, _: float) -> list[float]:
    return [reward + 1 for reward in tree.rewards]


def _share_all(tree: RewardTree, _: float) -> list[float]:
    return [math.fsum(tree.rewards)] * len(tree.ids)


def _number(tree: RewardTree, _: float) -> list[float]:
    return [float(position) for position in range(len(tree.ids))]


def _forget(tree: RewardTree, _: float, calls: Iterator[int] = count()) -> list[float]:  # noqa: B008 - it remembers
    return [float(next(calls))] * len(tree.ids)


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (_add_one, "leaves keep their own"),
        (_add_one, "chains have a closed form"),
        (_add_one, "discount 0 is the identity"),
        (_add_one, "linear"),
        (_add_one, "bounded"),
        (_number, "free of order"),
        (_share_all, "roots are independent"),
        (_share_all, "siblings are strangers"),
        (_forget, "pure"),
    ],
)
def test_broken_laws_are_detected(rule: Rule, law: str) -> None:
    """Each law can fail."""
    with pytest.raises(AssertionError):
        REWARD_LAWS[law].check(rule)


@given(reward_trees(max_size=12), discounts, tree_rules)
def test_returns_equal_the_recursive_definition(tree: RewardTree, discount: float, rule: str) -> None:
    """The definition is implemented again."""
    assert is_close(oracle(tree, discount, rule), backpropagate(tree, discount, rule))


def test_rewards_do_not_leak_between_siblings() -> None:
    """Creation order, which ignores the tree, leaks."""
    tree = RewardTree(ids=("a", "b", "c"), parents=(None, 0, 0), rewards=(0.0, 0.0, 1.0))

    assert backpropagate(tree, 0.9) == {"a": 0.45, "b": 0.0, "c": 1.0}
    assert backpropagate(tree, 0.9, "max") == {"a": 0.9, "b": 0.0, "c": 1.0}
    assert pytest.approx([0.81, 0.9, 1.0]) == list(backpropagate(tree, 0.9, "creation-order").values())


def interaction(name: str, order: int, **fields: Any) -> Interaction:
    """A completed interaction with one token."""
    defaults = {"prompt_suffix": [1], "num_prompt_tokens": 1, "status": InteractionStatus.COMPLETED}
    return Interaction(id=InteractionId(name), order=order, **(defaults | fields))


@pytest.mark.parametrize("status", [s for s in InteractionStatus if s is not InteractionStatus.COMPLETED])
def test_unfinished_children_are_not_counted(status: InteractionStatus) -> None:
    """The mean is taken over completed ones."""
    record = SessionRecord(
        id=SessionId("s"),
        interactions=(
            interaction("a", 0),
            interaction("b", 1, parent="a", status=status),
            interaction("c", 2, parent="a", reward=1.0),
        ),
    )

    assert backpropagate(record, 0.5) == {"a": 0.5, "c": 1.0}
    assert total_reward(record) == 1.0


def test_ten_thousand_turns_need_no_recursion() -> None:
    returns = backpropagate(chain(*[0.0] * 9_999, 1.0), 0.999)

    assert pytest.approx(0.999**9_999) == returns[InteractionId("0")]


def test_returns_beyond_float_are_refused() -> None:
    with pytest.raises(RewardError, match="scale its rewards down"):
        backpropagate(chain(1e308, 1e308), 1.0)
    tree = RewardTree(ids=("a", "b", "c"), parents=(None, 0, 0), rewards=(0.0, 1.7e308, 1.7e308))
    with pytest.raises(RewardError, match="scale its rewards down"):
        backpropagate(tree, 1.0, "sum")


@pytest.mark.parametrize("reward", [3e38, 1.7e308])
def test_sums_beyond_float32_are_refused(reward: float) -> None:
    """Two rewards that fit may exceed it together."""
    with pytest.raises(RewardError, match="scale its rewards down"):
        backpropagate(chain(reward, reward), 1.0)
    record = SessionRecord(
        id=SessionId("s"), interactions=(interaction("a", 0, reward=reward), interaction("b", 1, reward=reward))
    )
    with pytest.raises(RewardError, match="float32"):
        total_reward(record)


def test_unknown_rules_and_discounts_are_refused() -> None:
    with pytest.raises(ExportError, match=r"no rule 'median' .* creation-order, max, mean, sum"):
        backpropagate(chain(1.0), 0.9, "median")
    with pytest.raises(RewardError, match="nan"):
        backpropagate(chain(1.0), math.nan)


def test_damaged_parents_are_refused() -> None:
    with pytest.raises(ExportError, match="each other's parents"):
        backpropagate(RewardTree(ids=("a", "b"), parents=(1, 0), rewards=(0.0, 1.0)), 0.9)
    with pytest.raises(ExportError, match="b continues a"):
        backpropagate(SessionRecord(id="s", interactions=(interaction("b", 0, parent="a"),)), 0.9)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (Fraction(1, 2), 0.5),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (np.finfo(np.float32).min, float(np.finfo(np.float32).min)),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([1]), 1.0),
        (torch.tensor(1.5, requires_grad=True), 1.5),
    ],
)
def test_scalars_of_all_kinds_are_rewards(value: Any, expected: float) -> None:
    """They are of Python, numpy or torch."""
    assert expected == parse_reward(value)
    assert type(parse_reward(value)) is float


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        b"1",
        None,
        1j,
        [1.0],
        {},
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        1e39,
        -np.float64(1.7e308),
        np.float64("nan"),
        np.str_("1"),
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor(float("inf")),
        "x" * 1000,
    ],
)
def test_rewards_that_are_no_finite_float32_are_refused(value: Any) -> None:
    """Messages stay short."""
    with pytest.raises(RewardError) as caught:
        parse_reward(value)

    assert len(str(caught.value)) < 200


def test_depth_counts_conversational_ancestors() -> None:
    """The order of requests does not matter."""
    tree = RewardTree(ids=("a", "b", "side", "c", "d"), parents=(None, 0, None, 0, 3), rewards=(0.0,) * 5)

    assert tree.depths() == [0, 1, 0, 1, 2]


def test_rule_that_fails_on_a_forest_is_found() -> None:
    """Rules are tried on an answer, a chain, a branch and a forest."""

    def only_one_root(tree: RewardTree, _: float) -> Any:
        return tree.rewards if tree.parents.count(None) == 1 else tree.rewards[:1]

    with pytest.raises(CustomFunctionError, match=r"only_one_root returned 1 numbers, \[0.0\]; .* each of the 3"):
        try_rule(only_one_root)
