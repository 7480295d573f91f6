"""A custom reward rule, tested by Hypothesis on trees of every shape: ``pytest examples/property_test.py``."""

import pytest

from areal_actors import RewardTree
from areal_actors.testing.laws import REWARD_LAWS


def best_continuation(tree: RewardTree, discount: float) -> list[float]:
    """Add to each reward the best discounted return of the continuations, where that is positive."""
    returns = list(tree.rewards)
    for child in tree.leaves_first():
        if (parent := tree.parents[child]) is not None:
            returns[parent] = max(returns[parent], tree.rewards[parent] + discount * returns[child])
    return returns


@pytest.mark.parametrize("law", ["leaves keep their own", "free of order", "roots are independent"])
def test_it_keeps_the_laws(law: str) -> None:
    """The rule obeys these laws. It is not linear, and does not depend on the order of the answers."""
    REWARD_LAWS[law].check(best_continuation)
