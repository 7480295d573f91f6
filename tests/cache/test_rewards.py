"""The laws of reward propagation, against a recursive oracle that shares no code with the implementation."""

from __future__ import annotations

import math
from fractions import Fraction
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import RULES, RewardTree, backpropagate, parse_reward, total_reward
from areal_actors.domain import Interaction, InteractionId, InteractionStatus, SessionId, SessionRecord
from areal_actors.errors import ExportError, RewardError
from areal_actors.testing.strategies import reward_trees, session_records

discounts = st.floats(0, 1)
tree_rules = st.sampled_from(["mean", "sum", "max"])


def close(left: Any, right: Any) -> bool:
    """Whether two maps of returns agree but for rounding."""
    return left.keys() == right.keys() and all(
        math.isclose(left[k], right[k], rel_tol=1e-9, abs_tol=1e-6) for k in left
    )


def chain(*rewards: float) -> RewardTree:
    """A conversation without branches."""
    size = len(rewards)
    return RewardTree(
        ids=tuple(InteractionId(str(i)) for i in range(size)),
        parents=tuple(i - 1 if i else None for i in range(size)),
        rewards=rewards,
    )


def permuted(tree: RewardTree, order: list[int]) -> RewardTree:
    """The same tree with its interactions written down in another order."""
    new = {old: position for position, old in enumerate(order)}
    return RewardTree(
        ids=tuple(tree.ids[old] for old in order),
        parents=tuple(None if (p := tree.parents[old]) is None else new[p] for old in order),
        rewards=tuple(tree.rewards[old] for old in order),
    )


def oracle(tree: RewardTree, discount: float, rule: str) -> dict[InteractionId, float]:
    """The definition, word by word."""
    combine = {"mean": fmean, "sum": sum, "max": max}[rule]

    def value(n: int) -> float:
        children = [value(c) for c, parent in enumerate(tree.parents) if parent == n]
        return tree.rewards[n] + (discount * combine(children) if children else 0.0)

    return {tree.ids[n]: value(n) for n in range(len(tree.ids))}


@given(reward_trees(max_size=12), discounts, tree_rules)
def test_returns_are_those_of_the_definition(tree: RewardTree, discount: float, rule: str) -> None:
    """Against an independent recursive reading of the definition."""
    assert close(oracle(tree, discount, rule), backpropagate(tree, discount, rule))


@given(reward_trees(), discounts, st.sampled_from(sorted(RULES)))
def test_discount_0_is_the_identity(tree: RewardTree, discount: float, rule: str) -> None:
    """Without a future, everybody keeps what they were given."""
    assert dict(zip(tree.ids, tree.rewards, strict=True)) == backpropagate(tree, 0.0, rule)


@given(reward_trees(), discounts, tree_rules)
def test_leaves_keep_their_own(tree: RewardTree, discount: float, rule: str) -> None:
    """Who has no children has nothing to inherit."""
    returns = backpropagate(tree, discount, rule)

    for position, reward in enumerate(tree.rewards):
        if position not in tree.parents:
            assert reward == returns[tree.ids[position]]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), discounts, st.sampled_from(sorted(RULES)))
def test_a_chain_has_a_closed_form_under_every_rule(rewards: list[float], discount: float, rule: str) -> None:
    """On a chain, return k is the sum of later rewards, each discounted once per step."""
    returns = list(backpropagate(chain(*rewards), discount, rule).values())

    for k in range(len(rewards)):
        expected = sum(reward * discount**i for i, reward in enumerate(rewards[k:]))
        assert expected == pytest.approx(returns[k], abs=1e-9)


def test_the_documented_numbers() -> None:
    """Reward 1 at the end of three turns is 0.81, 0.9, 1.0 at discount 0.9."""
    assert pytest.approx([0.81, 0.9, 1.0]) == list(backpropagate(chain(0, 0, 1), 0.9).values())


def test_nothing_leaks_between_siblings() -> None:
    """A reward on C reaches its parent A, and never its sibling B; creation order, which ignores the tree, leaks."""
    tree = RewardTree(ids=("a", "b", "c"), parents=(None, 0, 0), rewards=(0.0, 0.0, 1.0))

    assert backpropagate(tree, 0.9) == {"a": 0.45, "b": 0.0, "c": 1.0}
    assert backpropagate(tree, 0.9, "max") == {"a": 0.9, "b": 0.0, "c": 1.0}
    assert pytest.approx([0.81, 0.9, 1.0]) == list(backpropagate(tree, 0.9, "creation-order").values())


@given(reward_trees(), st.data(), discounts, st.sampled_from(["mean", "sum"]), st.floats(-3, 3))
def test_returns_are_linear(tree: RewardTree, data: st.DataObject, discount: float, rule: str, scale: float) -> None:
    """The returns of a sum of rewards are the sum of the returns, and scaling goes through."""
    size = len(tree.ids)
    others = tuple(data.draw(st.lists(st.floats(-1e3, 1e3), min_size=size, max_size=size)))
    mixed = evolve(tree, rewards=tuple(scale * a + b for a, b in zip(tree.rewards, others, strict=True)))
    left, right = backpropagate(tree, discount, rule), backpropagate(evolve(tree, rewards=others), discount, rule)

    assert close({k: scale * left[k] + right[k] for k in left}, backpropagate(mixed, discount, rule))


@given(reward_trees(), st.data(), discounts, tree_rules)
def test_the_order_of_writing_changes_nothing(
    tree: RewardTree, data: st.DataObject, discount: float, rule: str
) -> None:
    """Permuting siblings, roots and arrival gives the same returns, to the last bit."""
    order = data.draw(st.permutations(range(len(tree.ids))))

    assert backpropagate(tree, discount, rule) == backpropagate(permuted(tree, order), discount, rule)


@given(reward_trees(), st.floats(0, 0.95), st.sampled_from(["mean", "max"]))
def test_returns_are_bounded(tree: RewardTree, discount: float, rule: str) -> None:
    """No return exceeds the largest reward times the sum of discounts along the longest path."""
    largest = max(map(abs, tree.rewards), default=0.0)
    bound = largest * sum(discount**k for k in range(len(tree.ids) + 1))

    assert all(abs(value) <= bound * (1 + 1e-9) for value in backpropagate(tree, discount, rule).values())


@given(reward_trees(), reward_trees(), discounts, tree_rules)
def test_roots_are_independent(left: RewardTree, right: RewardTree, discount: float, rule: str) -> None:
    """Two conversations in one session know nothing of each other."""
    size = len(left.ids)
    both = RewardTree(
        ids=left.ids + tuple(InteractionId(f"other-{i}") for i in right.ids),
        parents=left.parents + tuple(None if p is None else p + size for p in right.parents),
        rewards=left.rewards + right.rewards,
    )
    returns = backpropagate(both, discount, rule)

    assert backpropagate(left, discount, rule) == {i: returns[i] for i in left.ids}


@given(session_records(), discounts, st.sampled_from(sorted(RULES)))
def test_asking_twice_gives_the_same(record: SessionRecord, discount: float, rule: str) -> None:
    """Propagation is a view: it changes nothing and can be asked again with another discount."""
    first = backpropagate(record, discount, rule)
    backpropagate(record, discount / 2, rule)

    assert first == backpropagate(record, discount, rule)


def interaction(name: str, order: int, **fields: Any) -> Interaction:
    """A completed interaction with one token."""
    defaults = {"prompt_suffix": [1], "num_prompt_tokens": 1, "status": InteractionStatus.COMPLETED}
    return Interaction(id=InteractionId(name), order=order, **(defaults | fields))


@pytest.mark.parametrize("status", [s for s in InteractionStatus if s is not InteractionStatus.COMPLETED])
def test_unfinished_children_neither_receive_nor_dilute(status: InteractionStatus) -> None:
    """Only completed interactions take part: the mean is taken over those."""
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
    """A conversation may be long."""
    returns = backpropagate(chain(*[0.0] * 9_999, 1.0), 0.999)

    assert pytest.approx(0.999**9_999) == returns[InteractionId("0")]


def test_returns_that_exceed_every_float_are_refused() -> None:
    """Overflow is said, not trained on."""
    with pytest.raises(RewardError, match="scale its rewards down"):
        backpropagate(chain(1e308, 1e308), 1.0)
    tree = RewardTree(ids=("a", "b", "c"), parents=(None, 0, 0), rewards=(0.0, 1.7e308, 1.7e308))
    with pytest.raises(RewardError, match="scale its rewards down"):
        backpropagate(tree, 1.0, "sum")


def test_unknown_rules_and_discounts_are_refused_by_name() -> None:
    """The message lists what there is."""
    with pytest.raises(ExportError, match=r"no rule 'median' .* creation-order, max, mean, sum"):
        backpropagate(chain(1.0), 0.9, "median")
    with pytest.raises(RewardError, match="nan"):
        backpropagate(chain(1.0), math.nan)


def test_a_rule_may_be_a_function() -> None:
    """What is not in the list can be passed."""
    assert backpropagate(chain(1.0, 2.0), 0.5, lambda tree, d: [d * r for r in tree.rewards]) == {"0": 0.5, "1": 1.0}


def test_damaged_parents_are_refused() -> None:
    """A cycle or a missing parent is named, and nothing hangs."""
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
        (torch.tensor(0.5), 0.5),
        (torch.tensor([1]), 1.0),
        (torch.tensor(1.5, requires_grad=True), 1.5),
    ],
)
def test_numbers_of_all_kinds_are_rewards(value: Any, expected: float) -> None:
    """Whatever scalar an agent computes is taken."""
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
        np.float64("nan"),
        np.str_("1"),
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor(float("inf")),
        "x" * 1000,
    ],
)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    """Text is not guessed at, and NaN never reaches a gradient; messages stay short."""
    with pytest.raises(RewardError) as caught:
        parse_reward(value)

    assert len(str(caught.value)) < 200
