"""Advantages: the formulas against slow references, and the laws of group statistics."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import Episode, InteractionId, SessionId, TurnInfo
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


@given(batch=st.lists(st.tuples(rewards, st.sampled_from(["a", "b"])), min_size=1, max_size=5))
@pytest.mark.parametrize("normalisation", list(Normalisation))
def test_sources_have_their_own_statistics(one_turn_group, batch, normalisation):
    """In a step of several sources, the groups of each have the advantages of a step of that source alone."""
    groups = [one_turn_group(values, name=f"g{i}") for i, (values, _) in enumerate(batch)]
    groups = [
        evolve(group, problem=evolve(group.problem, source=source))
        for group, (_, source) in zip(groups, batch, strict=True)
    ]
    config = AdvantageConfig(normalisation=normalisation)

    together = dict(zip([group.id for group in groups], compute_advantages(groups, config), strict=True))

    for source in ("a", "b"):
        own = [group for group in groups if group.problem.source == source]
        for group, alone in zip(own, compute_advantages(own, config), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(alone.rows, together[group.id].rows, strict=True))


@given(values=rewards)
def test_grpo(one_turn_group, values):
    """Reward minus mean, over the population's standard deviation."""
    deviation = np.std(values)
    expected = (np.array(values) - np.mean(values)) / deviation if deviation else np.zeros(len(values))

    assert advantages_of(one_turn_group(values), normalisation=Normalisation.GRPO) == pytest.approx(expected, abs=1e-5)


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


@given(values=rewards, order=st.randoms())
@pytest.mark.parametrize("normalisation", GROUPWISE)
@pytest.mark.parametrize("unit", list(StatisticsUnit))
def test_order_of_members_does_not_matter(one_turn_group, values, order, normalisation, unit):
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
def test_failed_member_is_in_no_statistic(one_turn_group, values):
    """Adding a failed episode changes nothing for the others."""
    group = one_turn_group(values)
    failed = Episode(session=SessionId("f"), member=99, reward=50.0, failure="ToolTimeout")

    with_failure = evolve(group, episodes=(*group.episodes, failed))

    assert advantages_of(group) == advantages_of(with_failure)


def test_withheld_member_stays_in_the_baseline(one_turn_group):
    """An episode without rows, because they were too old, still counts with its reward."""
    group = one_turn_group([1.0, 0.0])
    withheld = Episode(session=SessionId("w"), member=2, reward=0.5)
    config = AdvantageConfig(normalisation=Normalisation.DR_GRPO)

    (found,) = compute_advantages([evolve(group, episodes=(*group.episodes, withheld))], config)

    assert [float(row[-1]) for row in found.rows] == [0.5, -0.5]


@given(rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6))
@pytest.mark.parametrize("normalisation", [Normalisation.REINFORCE_PLUS_PLUS, Normalisation.NONE])
def test_groups_of_one_have_signal_where_groups_are_compared(one_turn_group, rewards, normalisation):
    """A group counts as one without signal if all its advantages are 0, and none is replaced before the step."""
    groups = [one_turn_group([reward]) for reward in rewards]
    config = AdvantageConfig(normalisation=normalisation)
    found = compute_advantages(groups, config)

    assert [not any(row.any() for row in one.rows) for one in found] == [one.has_zero_variance for one in found]
    assert not any(has_zero_variance(group, config) for group in groups)


@given(value=st.floats(-5, 5), count=st.integers(1, 6))
@pytest.mark.parametrize("unit", list(StatisticsUnit))
def test_equal_rewards_carry_no_signal(one_turn_group, value, count, unit):
    """A group whose members did equally well has advantage 0, never noise that was divided by nothing."""
    group = one_turn_group([value] * count)

    assert has_zero_variance(group, AdvantageConfig(unit=unit))
    assert [0.0] * count == advantages_of(group, unit=unit)


def test_long_episode_weighs_no_more(make_group, make_row):
    """Statistics count an episode once, however many rows it has; per row they count rows."""
    group = make_group([make_row([1, 2], [0, 1], reward=value) for value in (1.0, 0.0)])
    long = evolve(group.episodes[0], trajectories=group.episodes[0].trajectories * 3)
    group = evolve(group, episodes=(long, group.episodes[1]))

    by_episode = advantages_of(group, normalisation=Normalisation.DR_GRPO, unit=StatisticsUnit.EPISODE)
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

    config = AdvantageConfig(normalisation=Normalisation.DR_GRPO, unit=StatisticsUnit.EPISODE)

    (found,) = compute_advantages([make_group([good, bad])], config)

    assert [row.tolist() for row in found.rows] == [[0, 0, 0.5], [0, -0.5, -0.5]]


def individual(make_row, returns, *, session, infos=None):
    """An episode of the default export style: a row for each turn, with what is known of it."""
    return [
        evolve(
            make_row([1, 2], [0, 1], reward=value, session=session),
            interactions=(InteractionId(f"{session}-{turn}"),),
            turn_infos=(infos[turn] if infos else TurnInfo(depth=turn),),
        )
        for turn, value in enumerate(returns)
    ]


@pytest.fixture(scope="session")
def group_of_turns(make_group, make_row):
    """A group of episodes with these returns of their turns, in the default export style."""

    def create(*members, infos=None):
        rows = [
            individual(make_row, returns, session=f"m{index}", infos=infos) for index, returns in enumerate(members)
        ]
        group = make_group([found[0] for found in rows])
        episodes = [
            evolve(episode, trajectories=tuple(found), reward=float(found[-1].reward))
            for episode, found in zip(group.episodes, rows, strict=True)
        ]
        return evolve(group, episodes=tuple(episodes))

    return create


def test_depth_is_that_of_the_conversation_in_every_style(group_of_turns):
    """Rows of one turn each are compared with turns at their depth; returns are 10 times the depth and a bit."""
    group = group_of_turns([0.0, 10.0, 20.0], [1.0, 11.0, 21.0])

    for unit in (StatisticsUnit.TURN_DEPTH, StatisticsUnit.TURN_KIND):
        found = advantages_of(group, normalisation=Normalisation.DR_GRPO, unit=unit)
        assert found == [-0.5, -0.5, -0.5, 0.5, 0.5, 0.5]


def test_member_is_not_in_its_own_baseline(group_of_turns):
    """Neither are its other turns of the same kind."""
    infos = [TurnInfo(), TurnInfo()]  # two conversations of one turn each
    group = group_of_turns([0.0, 1.0], [4.0, 2.0], infos=infos)

    assert [-3.0, -2.0, 3.5, 1.5] == advantages_of(group)


def test_kind_that_only_one_member_has_is_compared_with_the_others_as_a_whole(group_of_turns):
    """Such a turn is trained all the same: with 0 it would be, as if it had not mattered."""
    group = group_of_turns([1.0, 0.5, 2.0], [0.0, 3.0], [2.0, 1.0])

    assert advantages_of(group)[2] == 2.0 - 1.5


def test_undiscounted_outcome_counts_for_every_kind(group_of_turns):
    """Members that ended earlier are in the baseline of later turns: with what the episode earned."""
    group = group_of_turns([1.0, 1.0, 1.0], [0.0, 0.0], [0.0])

    assert [1.0, 1.0, 1.0, -0.5, -0.5, -0.5] == advantages_of(group)


def test_ten_rewarded_turns_have_advantages_of_both_signs(group_of_turns):
    """With totals as the baseline, all ten would be negative, whatever was done."""
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, (8, 10))
    group = group_of_turns(*rewards[:, ::-1].cumsum(axis=1)[:, ::-1].tolist())
    totals = [evolve(episode, reward=float(sum(r))) for episode, r in zip(group.episodes, rewards, strict=True)]
    group = evolve(group, episodes=tuple(totals))

    default = np.array(advantages_of(group)).reshape(8, 10)
    published = advantages_of(group, normalisation=Normalisation.GRPO, unit=StatisticsUnit.EPISODE)

    assert ((default < 0).mean(axis=0) < 0.8).all()
    assert (np.array(published).reshape(8, 10)[:, 5:] < 0).mean() > 0.9


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_are_finite(one_turn_group, value):
    """A reward that is not a number names its session."""
    group = one_turn_group([0.0, 1.0])
    broken = evolve(group.episodes[1], reward=value)

    with pytest.raises(ValueError, match="g1"):
        compute_advantages([evolve(group, episodes=(group.episodes[0], broken))], AdvantageConfig())
