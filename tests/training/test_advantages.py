"""Advantages: the formulas against slow references, and the laws of group statistics."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import Episode, SessionId
from areal_actors.training.advantages import (
    compute_advantages,
    has_zero_variance,
)
from areal_actors.training.config import AdvantageConfig, Normalisation, StatisticsUnit

rewards = st.lists(st.integers(-8, 8).map(lambda value: value / 4), min_size=1, max_size=8)
GROUPWISE = (Normalisation.GRPO, Normalisation.DR_GRPO, Normalisation.RLOO)


def advantages_of(group, **settings):
    """One number per episode of one-turn rows: the advantage of its sampled tokens."""
    (found,) = compute_advantages([group], AdvantageConfig(**settings))
    return [float(row[-1]) for row in found.rows]


@pytest.fixture(scope="session")
def one_turn_group(make_group, make_row):
    """Groups of rows of one turn with the given rewards."""
    return lambda values, name="g": make_group(
        [make_row([1, 2, 3], [0, 1, 1], reward=value, session=f"{name}{i}") for i, value in enumerate(values)],
        name=name,
    )


@given(values=rewards)
def test_grpo(one_turn_group, values):
    """Reward minus mean, over the population's standard deviation."""
    deviation = np.std(values)
    expected = (np.array(values) - np.mean(values)) / deviation if deviation else np.zeros(len(values))

    assert advantages_of(one_turn_group(values)) == pytest.approx(expected, abs=1e-5)


@given(values=rewards)
def test_dr_grpo(one_turn_group, values):
    """Reward minus mean and nothing more."""
    expected = np.array(values) - np.mean(values)

    assert advantages_of(one_turn_group(values), normalisation=Normalisation.DR_GRPO) == pytest.approx(
        expected, abs=1e-5
    )


@given(values=rewards)
def test_rloo(one_turn_group, values):
    """Reward minus the mean of the others; a member alone has nothing to compare with."""
    expected = [
        value - np.mean(values[:i] + values[i + 1 :]) if len(values) > 1 else 0 for i, value in enumerate(values)
    ]

    assert advantages_of(one_turn_group(values), normalisation=Normalisation.RLOO) == pytest.approx(expected, abs=1e-5)


@given(batch=st.lists(rewards, min_size=1, max_size=4))
def test_reinforce_plus_plus(one_turn_group, batch):
    """Rewards are normalised over the whole batch, whatever the groups."""
    groups = [one_turn_group(values, name=f"g{i}") for i, values in enumerate(batch)]
    flat = np.array([value for values in batch for value in values])
    expected = (flat - flat.mean()) / flat.std() if flat.std() else flat * 0

    found = compute_advantages(groups, AdvantageConfig(normalisation=Normalisation.REINFORCE_PLUS_PLUS))

    assert [float(row[-1]) for group in found for row in group.rows] == pytest.approx(expected, abs=1e-5)


@given(batch=st.lists(rewards, min_size=1, max_size=4))
def test_group_mean_batch_std(one_turn_group, batch):
    """The baseline is the group's, the scale the batch's."""
    groups = [one_turn_group(values, name=f"g{i}") for i, values in enumerate(batch)]
    flat = np.concatenate([np.array(values) - np.mean(values) for values in batch])
    expected = flat / flat.std() if flat.std() > 1e-9 else flat * 0

    found = compute_advantages(groups, AdvantageConfig(normalisation=Normalisation.GROUP_MEAN_BATCH_STD))

    assert [float(row[-1]) for group in found for row in group.rows] == pytest.approx(expected, abs=1e-5)


def test_none_is_the_return(one_turn_group):
    """Without normalisation the advantage is the return."""
    assert advantages_of(one_turn_group([1.5, -1.0]), normalisation=Normalisation.NONE) == [1.5, -1.0]


@given(values=rewards, order=st.randoms())
@pytest.mark.parametrize("normalisation", GROUPWISE)
@pytest.mark.parametrize("unit", list(StatisticsUnit))
def test_the_order_of_members_does_not_matter(one_turn_group, values, order, normalisation, unit):
    """Permuting episodes permutes advantages, in every unit of statistics."""
    permutation = list(range(len(values)))
    order.shuffle(permutation)
    straight = advantages_of(one_turn_group(values), normalisation=normalisation, unit=unit)
    shuffled = advantages_of(one_turn_group([values[i] for i in permutation]), normalisation=normalisation, unit=unit)

    assert shuffled == pytest.approx([straight[i] for i in permutation], abs=1e-5)


@given(batch=st.lists(rewards, min_size=1, max_size=4))
@pytest.mark.parametrize("normalisation", GROUPWISE)
def test_groups_of_any_size_do_not_mix(one_turn_group, batch, normalisation):
    """A group's advantages are the same alone and beside others of other sizes."""
    groups = [one_turn_group(values, name=f"g{i}") for i, values in enumerate(batch)]
    config = AdvantageConfig(normalisation=normalisation)

    together = compute_advantages(groups, config)

    for group, found in zip(groups, together, strict=True):
        (alone,) = compute_advantages([group], config)
        assert all(np.array_equal(a, b) for a, b in zip(alone.rows, found.rows, strict=True))


@given(values=rewards)
def test_a_failed_member_is_in_no_statistic(one_turn_group, values):
    """Adding a failed episode changes nothing for the others."""
    group = one_turn_group(values)
    failed = Episode(session=SessionId("f"), member=99, reward=50.0, failure="ToolTimeout")

    with_failure = evolve(group, episodes=(*group.episodes, failed))

    assert advantages_of(group) == advantages_of(with_failure)


def test_a_withheld_member_stays_in_the_baseline(one_turn_group):
    """An episode without rows, because they were too old, still counts with its reward."""
    group = one_turn_group([1.0, 0.0])
    withheld = Episode(session=SessionId("w"), member=2, reward=0.5)
    config = AdvantageConfig(normalisation=Normalisation.DR_GRPO)

    (found,) = compute_advantages([evolve(group, episodes=(*group.episodes, withheld))], config)

    assert [float(row[-1]) for row in found.rows] == [0.5, -0.5]


@given(value=st.floats(-5, 5), count=st.integers(1, 6))
@pytest.mark.parametrize("unit", list(StatisticsUnit))
def test_equal_rewards_carry_no_signal(one_turn_group, value, count, unit):
    """A group whose members did equally well has advantage 0, never noise that was divided by nothing."""
    group = one_turn_group([value] * count)

    assert has_zero_variance(group)
    assert [0.0] * count == advantages_of(group, unit=unit)


def test_a_long_episode_weighs_no_more(make_group, make_row):
    """Statistics count an episode once, however many rows it has; per row they count rows."""
    group = make_group([make_row([1, 2], [0, 1], reward=value) for value in (1.0, 0.0)])
    long = evolve(group.episodes[0], trajectories=group.episodes[0].trajectories * 3)
    group = evolve(group, episodes=(long, group.episodes[1]))

    by_episode = advantages_of(group, normalisation=Normalisation.DR_GRPO)
    by_row = advantages_of(group, normalisation=Normalisation.DR_GRPO, unit=StatisticsUnit.ROW)

    assert by_episode == [0.5, 0.5, 0.5, -0.5]
    assert by_row == [0.25, 0.25, 0.25, -0.75]


def test_turns_are_compared_at_their_depth(make_group, make_row):
    """With ``turn_depth`` each turn's return is compared with those of the same depth."""
    rows = [
        make_row([1, 2, 3], [0, 1, 1], reward=value, returns=[0, first, value], turns=[-1, 0, 1], session=f"s{value}")
        for first, value in ((4.0, 1.0), (2.0, 0.0))
    ]
    config = AdvantageConfig(normalisation=Normalisation.DR_GRPO, unit=StatisticsUnit.TURN_DEPTH)

    (found,) = compute_advantages([make_group(rows)], config)

    assert [row.tolist() for row in found.rows] == [[0, 1, 0.5], [0, -1, -0.5]]


def test_turn_returns_keep_their_discount(make_group, make_row):
    """The numerator is the turn's own return: a discounted first turn is credited less than the last."""
    good = make_row([1, 2, 3], [0, 1, 1], reward=1.0, returns=[0, 0.5, 1.0], turns=[-1, 0, 1])
    bad = make_row([1, 2, 3], [0, 1, 1], reward=0.0, turns=[-1, 0, 1])

    (found,) = compute_advantages([make_group([good, bad])], AdvantageConfig(normalisation=Normalisation.DR_GRPO))

    assert [row.tolist() for row in found.rows] == [[0, 0, 0.5], [0, -0.5, -0.5]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_are_finite(one_turn_group, value):
    """A reward that is no number names its session."""
    group = one_turn_group([0.0, 1.0])
    broken = evolve(group.episodes[1], reward=value)

    with pytest.raises(ValueError, match="g1"):
        compute_advantages([evolve(group, episodes=(group.episodes[0], broken))], AdvantageConfig())
