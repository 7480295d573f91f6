"""The laws of reward propagation, as checks of any rule: which ones hold is the first thing to know of a new one.

::

    from areal_actors.testing.laws import REWARD_LAWS

    @pytest.mark.parametrize("law", REWARD_LAWS.values(), ids=REWARD_LAWS)
    def test_my_rule(law):
        law.check(my_rule)

Not every law suits every rule: ``max`` is not linear, and a rule that looks at the order of arrival is not free of it.
Say which ones yours keeps, and Hypothesis looks for a tree that proves you wrong. The rule is asked through
``backpropagate``, as training asks it; a name in ``RULES`` will do, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache.rewards import RewardTree, Rule, backpropagate
from areal_actors.domain import InteractionId
from areal_actors.testing.strategies import reward_trees

__all__ = ["REWARD_LAWS", "RewardLaw", "chain", "is_close"]

Returns: TypeAlias = Mapping[InteractionId, float]
_Check: TypeAlias = Callable[[str | Rule, RewardTree, st.DataObject], None]

_discounts = st.floats(0, 1)


@frozen(kw_only=True)
class RewardLaw:
    """One law. ``statement`` says it in a sentence."""

    name: str
    statement: str
    trees: st.SearchStrategy[RewardTree]
    holds: _Check

    def check(self, rule: str | Rule) -> None:
        """Look for a tree on which ``rule`` breaks the law.

        As many trees are tried as the profile of Hypothesis says. Raises ``AssertionError`` with the smallest tree
        that was found.
        """

        @given(self.trees, st.data())
        def attack(tree: RewardTree, data: st.DataObject) -> None:
            self.holds(rule, tree, data)

        attack()


def is_close(left: Returns, right: Returns) -> bool:
    """Whether two maps of returns agree but for rounding."""
    return left.keys() == right.keys() and all(
        math.isclose(left[name], right[name], rel_tol=1e-9, abs_tol=1e-6) for name in left
    )


def chain(*rewards: float) -> RewardTree:
    """A conversation without branches, its turns named by their numbers."""
    return RewardTree(
        ids=tuple(InteractionId(str(number)) for number in range(len(rewards))),
        parents=tuple(number - 1 if number else None for number in range(len(rewards))),
        rewards=rewards,
    )


def _own(tree: RewardTree) -> Returns:
    return dict(zip(tree.ids, tree.rewards, strict=True))


def _leaves_keep_their_own(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    returns = backpropagate(tree, data.draw(_discounts), rule)
    leaves = [name for position, name in enumerate(tree.ids) if position not in tree.parents]
    own = _own(tree)
    assert {name: own[name] for name in leaves} == {name: returns[name] for name in leaves}


def _closed_form(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    discount = data.draw(_discounts)
    expected = {
        InteractionId(str(k)): math.fsum(reward * discount**i for i, reward in enumerate(tree.rewards[k:]))
        for k in range(len(tree.rewards))
    }
    assert is_close(expected, backpropagate(tree, discount, rule))


def _no_future_is_identity(rule: str | Rule, tree: RewardTree, _: st.DataObject) -> None:
    assert _own(tree) == backpropagate(tree, 0.0, rule)


def _linear(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    size, scale, discount = len(tree.ids), data.draw(st.floats(-3, 3)), data.draw(_discounts)
    others = tuple(data.draw(st.lists(st.floats(-1e3, 1e3), min_size=size, max_size=size)))
    mixed = tuple(scale * a + b for a, b in zip(tree.rewards, others, strict=True))
    left = backpropagate(tree, discount, rule)
    right = backpropagate(evolve(tree, rewards=others), discount, rule)
    sums = {name: scale * left[name] + right[name] for name in left}
    assert is_close(sums, backpropagate(evolve(tree, rewards=mixed), discount, rule))


def _free_of_order(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    discount, order = data.draw(_discounts), data.draw(st.permutations(range(len(tree.ids))))
    assert is_close(backpropagate(tree, discount, rule), backpropagate(_permuted(tree, order), discount, rule))


def _permuted(tree: RewardTree, order: list[int]) -> RewardTree:
    """The same tree with its interactions written down in another order."""
    places = {old: new for new, old in enumerate(order)}
    parents = (tree.parents[old] for old in order)
    return RewardTree(
        ids=tuple(tree.ids[old] for old in order),
        parents=tuple(None if parent is None else places[parent] for parent in parents),
        rewards=tuple(tree.rewards[old] for old in order),
    )


def _bounded(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    discount = data.draw(st.floats(0, 0.95))
    largest = max(map(abs, tree.rewards), default=0.0)
    longest = max((len(_line(tree, position)) for position in range(len(tree.ids))), default=0)
    bound = largest * math.fsum(discount**k for k in range(longest))
    assert all(abs(value) <= bound * (1 + 1e-9) for value in backpropagate(tree, discount, rule).values())


def _roots_are_independent(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    discount, size = data.draw(_discounts), len(tree.ids)
    other = data.draw(reward_trees(max_size=8))
    both = RewardTree(
        ids=tree.ids + tuple(InteractionId(f"other-{name}") for name in other.ids),
        parents=tree.parents + tuple(None if parent is None else parent + size for parent in other.parents),
        rewards=tree.rewards + other.rewards,
    )
    returns = backpropagate(both, discount, rule)
    assert is_close(backpropagate(tree, discount, rule), {name: returns[name] for name in tree.ids})


def _siblings_are_strangers(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    if not tree.ids:
        return
    changed = data.draw(st.integers(0, len(tree.ids) - 1))
    discount = data.draw(_discounts)
    rewards = list(tree.rewards)
    rewards[changed] += data.draw(st.floats(-1e3, 1e3))
    before = backpropagate(tree, discount, rule)
    after = backpropagate(evolve(tree, rewards=tuple(rewards)), discount, rule)
    concerned = {tree.ids[position] for position in _line(tree, changed)}
    assert all(before[name] == after[name] for name in tree.ids if name not in concerned)


def _line(tree: RewardTree, position: int | None) -> list[int]:
    """A turn and its ancestors."""
    line: list[int] = []
    while position is not None:
        line.append(position)
        position = tree.parents[position]
    return line


def _pure(rule: str | Rule, tree: RewardTree, data: st.DataObject) -> None:
    first, second = data.draw(_discounts), data.draw(_discounts)
    expected = backpropagate(tree, first, rule)
    backpropagate(tree, second, rule)
    assert expected == backpropagate(tree, first, rule)


_trees = reward_trees()
_chains = st.lists(st.floats(-10, 10), min_size=1, max_size=20).map(lambda rewards: chain(*rewards))

REWARD_LAWS: Mapping[str, RewardLaw] = {
    law.name: law
    for law in (
        RewardLaw(
            name="leaves keep their own",
            statement="Who has no children has nothing to inherit.",
            trees=_trees,
            holds=_leaves_keep_their_own,
        ),
        RewardLaw(
            name="chains have a closed form",
            statement="On a chain, a return is the sum of later rewards, each discounted once per step.",
            trees=_chains,
            holds=_closed_form,
        ),
        RewardLaw(
            name="discount 0 is the identity",
            statement="Without a future, everybody keeps what they were given.",
            trees=_trees,
            holds=_no_future_is_identity,
        ),
        RewardLaw(
            name="linear",
            statement="The returns of a sum of rewards are the sum of their returns, and scaling goes through.",
            trees=_trees,
            holds=_linear,
        ),
        RewardLaw(
            name="free of order",
            statement="Permuting siblings, roots and arrival changes nothing.",
            trees=_trees,
            holds=_free_of_order,
        ),
        RewardLaw(
            name="bounded",
            statement="No return exceeds the largest reward times the sum of discounts along the longest path.",
            trees=_trees,
            holds=_bounded,
        ),
        RewardLaw(
            name="roots are independent",
            statement="Two conversations in one session know nothing of each other.",
            trees=_trees,
            holds=_roots_are_independent,
        ),
        RewardLaw(
            name="siblings are strangers",
            statement="A reward reaches the turn that earned it and its ancestors, and nobody else.",
            trees=_trees,
            holds=_siblings_are_strangers,
        ),
        RewardLaw(
            name="pure",
            statement="Asking changes nothing, and another discount may be asked for.",
            trees=_trees,
            holds=_pure,
        ),
    )
}
"""Every law, by name."""
