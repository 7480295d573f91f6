"""A reward rule of your own, attacked by Hypothesis on trees of every shape: ``pytest examples/property_test.py``."""

import pytest

from areal_actors import RewardTree
from areal_actors.testing.laws import REWARD_LAWS


def best_continuation(tree: RewardTree, discount: float) -> list[float]:
    """An answer earns its own reward, and more where one of its continuations passes more on."""
    returns = list(tree.rewards)
    for child in tree.leaves_first():
        if (parent := tree.parents[child]) is not None:
            returns[parent] = max(returns[parent], tree.rewards[parent] + discount * returns[child])
    return returns


@pytest.mark.parametrize("law", ["leaves keep their own", "free of order", "roots are independent"])
def test_it_keeps_the_laws(law: str) -> None:
    """It is not linear, and pays no attention to the order in which answers came."""
    REWARD_LAWS[law].check(best_continuation)
