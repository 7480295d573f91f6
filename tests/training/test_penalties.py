"""Penalties in the reward: which tokens pay, how much, and that no group is changed in place."""

from __future__ import annotations

import numpy as np
import pytest

from areal_actors.training.config import OverlongConfig
from areal_actors.training.surrogates import kl_costs, overlong_penalty, penalise_overlong

CONFIG = OverlongConfig(max_tokens=100, buffer_tokens=20, scale=0.5)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (80, 0), (90, -0.25), (100, -0.5), (5000, -0.5)])
def test_overlong_penalty_is_soft(length, expected):
    """Free up to the buffer, linear within it, constant beyond."""
    assert overlong_penalty(length, CONFIG) == pytest.approx(expected)


def test_long_episode_pays_on_every_trained_token(make_group, make_row):
    """Reward, row reward and returns fall by the penalty; short episodes and the given group stay as they were."""
    long = make_row([0] + [1] * 100, [0] + [1] * 100, reward=1.0)
    short = make_row([0, 1], [0, 1], reward=1.0)
    group = make_group([long, short])

    (penalised,) = penalise_overlong([group], CONFIG)

    assert [episode.reward for episode in penalised.episodes] == [0.5, 1.0]
    row = penalised.episodes[0].trajectories[0]
    assert row.reward == pytest.approx(0.5)
    assert row.returns.tolist() == [0] + [0.5] * 100
    assert penalised.episodes[1] == group.episodes[1]
    assert group.episodes[0].reward == 1.0


def test_distance_is_paid_from_the_token_on(make_row):
    """A token pays for itself and for what follows in its row; tokens that are not trained pay nothing."""
    row = make_row([9, 1, 8, 2], [0, 1, 0, 1], reward=1.0)
    estimates = np.array([7, 0.5, 7, 0.25], dtype=np.float32)

    assert kl_costs(row, estimates, coefficient=0.4) == pytest.approx([0, 0.3, 0, 0.1])
