"""The laws of reward propagation, as checks for any rule, such as a new one.

::

    from areal_actors.testing.laws import REWARD_LAWS

    @pytest.mark.parametrize("law", REWARD_LAWS.values(), ids=REWARD_LAWS)
    def test_my_rule(law):
        law.check(my_rule)

Not every law suits every rule: ``max`` is not linear, and a rule that uses the order of arrival depends on it.
Choose the laws that yours keeps, and Hypothesis searches for a counterexample. The rule is called through
``backpropagate``, as in training; a name in ``RULES`` is accepted, too.

A function with ``@_law`` is a law: its words are the name, its docstring is the statement, and it raises
``AssertionError`` for a rule that breaks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache.rewards import RewardTree, Rule, backpropagate
from areal_actors.domain import InteractionId
from areal_actors.testing.strategies import reward_trees

Returns = Mapping[InteractionId, float]


@frozen
class Examples:
    """Examples for a law, chosen and shrunk by Hypothesis."""

    data: st.DataObject

    def number(self, low: float, high: float) -> float:
        """Return a number within the bounds."""
        return self.data.draw(st.floats(low, high))

    def index(self, size: int) -> int:
        """Return one of ``size`` positions."""
        return self.data.draw(st.integers(0, size - 1))

    def order(self, size: int) -> list[int]:
        """Return a permutation of ``size`` positions."""
        return self.data.draw(st.permutations(range(size)))

    def tree(self) -> RewardTree:
        """Return a small forest of any shape."""
        return self.data.draw(reward_trees(max_size=8))


Holds = Callable[[str | Rule, RewardTree, Examples], None]


@frozen(kw_only=True)
class RewardLaw:
    """One law. ``statement`` describes it in a sentence."""

    name: str
    statement: str
    trees: st.SearchStrategy[RewardTree]
    holds: Holds

    def check(self, rule: str | Rule) -> None:
        """Search for a tree on which ``rule`` breaks the law.

        The number of trees is set by the Hypothesis profile. Raises ``AssertionError`` with the smallest tree that was
        found.
        """

        @given(self.trees, st.data())
        def attack(tree: RewardTree, data: st.DataObject) -> None:
            self.holds(rule, tree, Examples(data))

        attack()


REWARD_LAWS: dict[str, RewardLaw] = {}
"""Every law, by name."""


def _law(*, needs_chain: bool = False) -> Callable[[Holds], None]:
    """Add a function to the laws."""

    def add(holds: Holds) -> None:
        name = holds.__name__.strip("_").replace("_", " ")
        trees = _chains if needs_chain else reward_trees()
        REWARD_LAWS[name] = RewardLaw(name=name, statement=holds.__doc__ or "", trees=trees, holds=holds)

    return add


def is_close(left: Returns, right: Returns) -> bool:
    """Return whether two maps of returns agree up to rounding."""
    return left.keys() == right.keys() and all(
        math.isclose(left[name], right[name], rel_tol=1e-9, abs_tol=1e-6) for name in left
    )


def chain(*rewards: float) -> RewardTree:
    """Return a conversation without branches, with turns named by their numbers."""
    return RewardTree(
        ids=tuple(InteractionId(str(number)) for number in range(len(rewards))),
        parents=tuple(number - 1 if number else None for number in range(len(rewards))),
        rewards=rewards,
    )


def _own(tree: RewardTree) -> Returns:
    return dict(zip(tree.ids, tree.rewards, strict=True))


_chains = st.lists(st.floats(-10, 10), min_size=1, max_size=20).map(lambda rewards: chain(*rewards))


@_law()
def _leaves_keep_their_own(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """An answer without continuations returns its own reward."""
    returns = backpropagate(tree, draw.number(0, 1), rule)
    leaves = [name for position, name in enumerate(tree.ids) if position not in tree.parents]
    own = _own(tree)
    assert {name: own[name] for name in leaves} == {name: returns[name] for name in leaves}


@_law(needs_chain=True)
def _chains_have_a_closed_form(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """On a chain, a return is the sum of later rewards, each discounted once per step."""
    discount = draw.number(0, 1)
    expected = {
        InteractionId(str(k)): math.fsum(reward * discount**i for i, reward in enumerate(tree.rewards[k:]))
        for k in range(len(tree.rewards))
    }
    assert is_close(expected, backpropagate(tree, discount, rule))


@_law()
def _discount_0_is_the_identity(rule: str | Rule, tree: RewardTree, _: Examples) -> None:
    """With discount 0, every answer returns its own reward."""
    assert _own(tree) == backpropagate(tree, 0.0, rule)


@_law()
def _linear(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """The returns of a sum of rewards are the sum of their returns, and scaling goes through."""
    size, scale, discount = len(tree.ids), draw.number(-3, 3), draw.number(0, 1)
    others = tuple(draw.number(-1e3, 1e3) for _ in range(size))
    mixed = tuple(scale * a + b for a, b in zip(tree.rewards, others, strict=True))
    left = backpropagate(tree, discount, rule)
    right = backpropagate(evolve(tree, rewards=others), discount, rule)
    sums = {name: scale * left[name] + right[name] for name in left}
    assert is_close(sums, backpropagate(evolve(tree, rewards=mixed), discount, rule))


@_law()
def _returns_scale_with_rewards(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """Rewards in a larger or smaller unit give returns in that unit, however small they are."""
    # A power of two: floating-point results of a rule that scales are then the same digits.
    scale, discount = 2.0 ** (draw.index(2 * _MAX_EXPONENT + 1) - _MAX_EXPONENT), draw.number(0, 1)
    scaled = evolve(tree, rewards=tuple(scale * reward for reward in tree.rewards))
    before, after = backpropagate(tree, discount, rule), backpropagate(scaled, discount, rule)
    # Not ``is_close``, to which returns below a fixed size are all equal.
    rounding = 1e-9 * max(map(abs, scaled.rewards), default=0.0) + 1e-300
    assert all(math.isclose(scale * before[name], after[name], rel_tol=1e-9, abs_tol=rounding) for name in before)


_MAX_EXPONENT = 40
"""Rewards are made up to 2**40 times as large or small."""


@_law()
def _free_of_order(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """Permuting siblings, roots and arrival changes nothing."""
    discount, order = draw.number(0, 1), draw.order(len(tree.ids))
    places = {old: new for new, old in enumerate(order)}
    parents = (tree.parents[old] for old in order)
    permuted = RewardTree(
        ids=tuple(tree.ids[old] for old in order),
        parents=tuple(None if parent is None else places[parent] for parent in parents),
        rewards=tuple(tree.rewards[old] for old in order),
    )
    assert is_close(backpropagate(tree, discount, rule), backpropagate(permuted, discount, rule))


@_law()
def _bounded(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """No return exceeds the largest reward times the sum of discounts along the longest path."""
    discount = draw.number(0, 0.95)
    largest = max(map(abs, tree.rewards), default=0.0)
    longest = max((len(_line(tree, position)) for position in range(len(tree.ids))), default=0)
    bound = largest * math.fsum(discount**k for k in range(longest))
    assert all(abs(value) <= bound * (1 + 1e-9) for value in backpropagate(tree, discount, rule).values())


@_law()
def _roots_are_independent(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """Rewards of one conversation change nothing in another one of the session."""
    discount, size = draw.number(0, 1), len(tree.ids)
    other = draw.tree()
    both = RewardTree(
        ids=tree.ids + tuple(InteractionId(f"other-{name}") for name in other.ids),
        parents=tree.parents + tuple(None if parent is None else parent + size for parent in other.parents),
        rewards=tree.rewards + other.rewards,
    )
    returns = backpropagate(both, discount, rule)
    assert is_close(backpropagate(tree, discount, rule), {name: returns[name] for name in tree.ids})


@_law()
def _siblings_are_strangers(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """A reward reaches the answer that earned it and its ancestors, and no other answer."""
    if not tree.ids:
        return
    changed = draw.index(len(tree.ids))
    discount = draw.number(0, 1)
    rewards = list(tree.rewards)
    rewards[changed] += draw.number(-1e3, 1e3)
    before = backpropagate(tree, discount, rule)
    after = backpropagate(evolve(tree, rewards=tuple(rewards)), discount, rule)
    concerned = {tree.ids[position] for position in _line(tree, changed)}
    assert all(before[name] == after[name] for name in tree.ids if name not in concerned)


def _line(tree: RewardTree, position: int | None) -> list[int]:
    """Return a turn and its ancestors."""
    line: list[int] = []
    while position is not None:
        line.append(position)
        position = tree.parents[position]
    return line


@_law()
def _pure(rule: str | Rule, tree: RewardTree, draw: Examples) -> None:
    """Asking twice gives the same, also when another discount was asked for in between."""
    first, second = draw.number(0, 1), draw.number(0, 1)
    expected = backpropagate(tree, first, rule)
    backpropagate(tree, second, rule)
    assert expected == backpropagate(tree, first, rule)
