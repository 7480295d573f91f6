"""The laws of reward propagation, as checks for any rule, such as a new one.

::

    from areal_actors.testing.laws import REWARD_LAWS

    @pytest.mark.parametrize("law", REWARD_LAWS.values(), ids=REWARD_LAWS)
    def test_my_rule(law):
        law.check(my_rule)

Not every law suits every rule: ``max`` is not linear, and a rule that uses the order of arrival depends on it.
Choose the laws that yours keeps, and Hypothesis searches for a counterexample. The rule is called through
``backpropagate``, as in training; a name in ``RULES`` is accepted, too. The laws themselves are in ``cache.laws``.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache.laws import LAWS, Law, chain
from areal_actors.cache.rewards import RewardTree, Rule
from areal_actors.testing.strategies import reward_trees


@frozen
class _HypothesisDraw:
    """Examples chosen and shrunk by Hypothesis."""

    data: st.DataObject

    def number(self, low: float, high: float) -> float:
        return self.data.draw(st.floats(low, high))

    def index(self, size: int) -> int:
        return self.data.draw(st.integers(0, size - 1))

    def order(self, size: int) -> list[int]:
        return self.data.draw(st.permutations(range(size)))

    def tree(self) -> RewardTree:
        return self.data.draw(reward_trees(max_size=8))


@frozen(kw_only=True)
class RewardLaw:
    """One law. ``statement`` describes it in a sentence."""

    name: str
    statement: str
    trees: st.SearchStrategy[RewardTree]
    law: Law

    def check(self, rule: str | Rule) -> None:
        """Search for a tree on which ``rule`` breaks the law.

        The number of trees is set by the Hypothesis profile. Raises ``AssertionError`` with the smallest tree that was
        found.
        """

        @given(self.trees, st.data())
        def attack(tree: RewardTree, data: st.DataObject) -> None:
            self.law.holds(rule, tree, _HypothesisDraw(data))

        attack()


_trees = reward_trees()
_chains = st.lists(st.floats(-10, 10), min_size=1, max_size=20).map(lambda rewards: chain(*rewards))

REWARD_LAWS: Mapping[str, RewardLaw] = {
    law.name: RewardLaw(name=law.name, statement=law.statement, trees=_chains if law.needs_chain else _trees, law=law)
    for law in LAWS.values()
}
"""Every law, by name."""
