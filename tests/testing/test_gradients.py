"""The exact bias of an estimator: against sampling-free references that are counted by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from attrs import evolve

from areal_actors.training.config import AdvantageConfig, Aggregation, Normalisation, StatisticsUnit
from areal_actors_testing.gradients import SHAPES, Estimator, Play, Shape, enumerate_episodes, measure


def one_turn(play: Play) -> float:
    """A turn with three answers that earn 0, 1 and 3."""
    return (0.0, 1.0, 3.0)[play.turn("answer", (0.2, 0.5, 0.3)).option]


ONE_TURN = Shape(name="one turn", statement="", problems=(one_turn,))
PROBABILITIES = np.array([0.2, 0.5, 0.3])
REWARDS = np.array([0.0, 1.0, 3.0])


def estimator(normalisation: Normalisation, unit: StatisticsUnit = StatisticsUnit.EPISODE) -> Estimator:
    return Estimator(advantages=AdvantageConfig(normalisation=normalisation, unit=unit))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_episodes_are_counted(shape):
    """Their probabilities add up to 1, and none of them comes twice."""
    for script, played in zip(shape.problems, shape.episodes, strict=True):
        assert math.fsum(episode.probability for episode in played) == pytest.approx(1)
        assert len(played) == len(enumerate_episodes(script))
        taken = [tuple(choice and choice.option for choice in episode.choices) for episode in played]
        assert len(set(taken)) == len(taken) or any(episode.failure for episode in played)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_gradient_is_that_of_the_expected_reward(shape):
    """By finite differences: the probability of each choice as a softmax of logits that are moved a little."""
    step = 1e-6
    for index in range(shape.num_parameters):
        high, low = (expected_reward(shape, index, sign * step) for sign in (1, -1))
        assert shape.gradient[index] == pytest.approx((high - low) / (2 * step), abs=1e-6)


def expected_reward(shape: Shape, index: int, step: float) -> float:
    """The mean reward when one logit is moved by ``step``."""
    total = 0.0
    for episode in itertools.chain(*shape.episodes):
        ratio = 1.0
        for choice in filter(None, episode.choices):
            place = shape.places[choice.state]
            if place.start <= index < place.stop:
                moved = np.array(choice.probabilities)
                moved[index - place.start] *= math.exp(step)
                ratio *= moved[choice.option] / moved.sum() / choice.probabilities[choice.option]
        total += episode.probability * ratio * episode.reward / len(shape.problems)
    return total


@pytest.mark.parametrize("normalisation", [Normalisation.GRPO, Normalisation.DR_GRPO, Normalisation.RLOO])
def test_groups_are_counted_as_ordered_ones(normalisation):
    """Over all 27 ordered groups of three, with the published formula written out, the same update comes out."""
    update = np.zeros(3)
    for group in itertools.product(range(3), repeat=3):
        values = REWARDS[list(group)]
        if np.ptp(values) == 0:
            continue
        baseline = (values.sum() - values) / 2 if normalisation is Normalisation.RLOO else values.mean()
        advantages = (values - baseline) / (values.std() if normalisation is Normalisation.GRPO else 1.0)
        for option, advantage in zip(group, advantages, strict=True):
            update += np.prod(PROBABILITIES[list(group)]) * advantage * (np.eye(3)[option] - PROBABILITIES) / 3
    truth = PROBABILITIES * (REWARDS - PROBABILITIES @ REWARDS)
    found = measure(ONE_TURN, estimator(normalisation), group_size=3)

    assert found.scale == pytest.approx(update @ truth / (truth @ truth), rel=1e-5)
    assert found.cosine == pytest.approx(update @ truth / np.linalg.norm(update) / np.linalg.norm(truth), rel=1e-5)


@pytest.mark.parametrize("group_size", [2, 3, 5, 8])
def test_known_scales(group_size):
    """Leaving oneself out is unbiased, the mean with oneself is short by 1/n, and no baseline is right as well."""
    assert measure(ONE_TURN, estimator(Normalisation.RLOO), group_size=group_size).scale == pytest.approx(1, abs=1e-5)
    short = measure(ONE_TURN, estimator(Normalisation.DR_GRPO), group_size=group_size)
    assert short.scale == pytest.approx(1 - 1 / group_size, abs=1e-5)
    assert measure(ONE_TURN, estimator(Normalisation.NONE), group_size=group_size).scale == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_the_scale_of_equal_lengths_does_not_know_the_aggregation(aggregation):
    """Nor the number of groups in a batch, where all answers have one length."""
    for num_groups in (None, 1, 3):
        asked = Estimator(advantages=AdvantageConfig(normalisation=Normalisation.RLOO), aggregation=aggregation)
        assert measure(ONE_TURN, asked, group_size=4, num_groups=num_groups).scale == pytest.approx(1, abs=1e-5)


def test_small_batches_of_unequal_lengths_are_biased_and_large_ones_are_not():
    """The mean over tokens divides by a number that depends on the answers."""
    shape = SHAPES["cut answers"]
    asked = evolve(estimator(Normalisation.RLOO), aggregation=Aggregation.TOKEN_MEAN)
    angles = [measure(shape, asked, group_size=4, num_groups=number).angle for number in (1, 4, 16)]
    assert sorted(angles, reverse=True) == angles
    assert angles[0] > 2
    assert measure(shape, asked, group_size=4).is_right


def test_a_rule_of_ones_own_is_measured():
    """Advantages that know nothing of the episode make no expected update, and the reward itself the true one."""

    def constant(group):
        return [np.ones(row.num_tokens) for episode in group.episodes for row in episode.trajectories]

    def reward(group):
        return [np.full(row.num_tokens, episode.reward) for episode in group.episodes for row in episode.trajectories]

    nothing = measure(ONE_TURN, Estimator(rule=constant), group_size=2)
    assert (0.0, math.inf) == (nothing.cosine, nothing.noise)
    assert measure(ONE_TURN, Estimator(rule=reward), group_size=2).is_right


def test_a_reward_that_no_choice_changes_has_no_direction():
    """There is nothing to divide by: the scale is NaN, and nothing warns."""

    def constant(play: Play) -> float:
        play.turn("answer", (0.5, 0.5))
        return 1.0

    bias = measure(Shape(name="constant", statement="", problems=(constant,)), Estimator(), group_size=2)

    assert math.isnan(bias.scale)
    assert bias.cosine == 0
    assert not bias.is_right
