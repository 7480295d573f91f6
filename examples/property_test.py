"""A reward rule of your own, attacked by Hypothesis on trees of every shape: ``pytest examples/property_test.py``."""

from hypothesis import given

from areal_actors import RewardTree, backpropagate
from areal_actors.testing.strategies import reward_trees


def best_continuation(tree: RewardTree, discount: float) -> list[float]:
    """An answer earns its own reward, and more where one of its continuations passes more on."""
    returns = list(tree.rewards)
    for child in tree.leaves_first():
        if (parent := tree.parents[child]) is not None:
            returns[parent] = max(returns[parent], tree.rewards[parent] + discount * returns[child])
    return returns


@given(reward_trees())
def test_no_answer_pays_for_what_follows_it(tree: RewardTree) -> None:
    """Whatever is said next, an answer returns at least its own reward."""
    returns = backpropagate(tree, 0.9, best_continuation)

    assert all(returns[name] >= reward for name, reward in zip(tree.ids, tree.rewards, strict=True))
