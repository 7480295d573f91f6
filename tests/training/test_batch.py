"""Batches: alignment of tokens with what predicts them, weights, and rows that cannot be true."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors.domain import FinishReason
from areal_actors.domain.rows import TurnInfo
from areal_actors.errors import ExportError
from areal_actors.training.advantages import compute_advantages
from areal_actors.training.batch import Batch, TrainingRow, create_rows, split_updates, token_weights
from areal_actors.training.config import AdvantageConfig, Aggregation, ObjectiveConfig, TrainerConfig

owners = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=30)
MEANS = [choice for choice in Aggregation if choice not in (Aggregation.FIXED_LENGTH, Aggregation.EPISODE_SUM)]


def slow_weights(aggregation, rows, episodes, groups, fixed_length):
    """Each token's share, counted one by one."""
    owner = {
        Aggregation.TOKEN_MEAN: [0] * len(rows),
        Aggregation.SEQUENCE_MEAN: rows,
        Aggregation.EPISODE_MEAN: episodes,
        Aggregation.GROUP_MEAN: groups,
    }.get(aggregation)
    if owner is None:
        counted = episodes if aggregation is Aggregation.EPISODE_SUM else rows
        return [1 / (len(set(counted)) * fixed_length) for _ in rows]
    return [1 / (len(set(owner)) * owner.count(name)) for name in owner]


@given(found=owners)
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_weights_equal_the_slow_count(found, aggregation):
    """Rows belong to episodes and episodes to groups; weights are those of counting."""
    rows = [3 * row + group for row, group in found]
    episodes = [row // 2 * 10 + group for row, group in found]
    groups = [group for _, group in found]

    weights = token_weights(
        aggregation, rows=np.array(rows), episodes=np.array(episodes), groups=np.array(groups), fixed_length=7
    )

    assert weights == pytest.approx(slow_weights(aggregation, rows, episodes, groups, 7), rel=1e-5)


@given(found=owners)
@pytest.mark.parametrize("aggregation", MEANS)
def test_weights_of_a_mean_sum_to_one(found, aggregation):
    """Equal losses average to themselves."""
    array = np.array([row for row, _ in found])

    weights = token_weights(aggregation, rows=array, episodes=array // 2, groups=array // 3, fixed_length=1)

    assert weights.sum() == pytest.approx(1, rel=1e-5)


@given(seed=st.integers(0, 500), num_rows=st.integers(1, 5))
def test_tokens_line_up(make_row, seed, num_rows):
    """Advantages and log-probabilities are those of the trained tokens, row by row."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        length = int(rng.integers(2, 9))
        mask = np.concatenate([[0], rng.integers(0, 2, length - 1)])
        row = make_row(rng.integers(0, 9, length), mask, logprobs=-rng.random(length) * mask)
        rows.append(TrainingRow(trajectory=row, advantages=rng.random(length)))
    batch = Batch.create(rows, aggregation=Aggregation.TOKEN_MEAN)

    expected = [(row, t) for row in rows for t in range(row.trajectory.num_tokens) if row.trajectory.loss_mask[t]]

    assert batch.advantages.tolist() == [float(row.advantages[t]) for row, t in expected]
    assert batch.behaviour.tolist() == [float(row.trajectory.logprobs[t]) for row, t in expected]
    assert [len(expected)] == [len(batch.tokens_of(range(len(batch.rows))))]


def test_rows_without_trained_tokens_are_left_out(make_row):
    """They neither count in a mean nor cost a forward pass."""
    silent, spoken = make_row([1, 2], [0, 0]), make_row([1, 2], [0, 1])
    rows = [TrainingRow(trajectory=row, advantages=[1, 1]) for row in (silent, spoken)]

    batch = Batch.create(rows, aggregation=Aggregation.SEQUENCE_MEAN)

    assert batch.rows == (rows[1],)
    assert batch.weights.tolist() == [1.0]


members = st.sampled_from(["trained", "cut", "failed"])


@settings(max_examples=40)
@given(
    outcomes=st.lists(
        st.lists(members, min_size=2, max_size=4).filter({"trained", "cut"}.intersection),
        min_size=1,
        max_size=3,
    ),
    equal=st.sets(st.integers(0, 2)),
    num_minibatches=st.integers(1, 2),
)
@pytest.mark.parametrize("aggregation", [Aggregation.EPISODE_SUM, Aggregation.FIXED_LENGTH])
def test_weight_of_a_token_does_not_depend_on_what_became_of_other_answers(
    make_row, make_group, *, outcomes, equal, num_minibatches, aggregation
):
    """Cut, failed and dropped answers stay in the constant denominators: episodes, or those that have rows."""
    groups = []
    for number, found in enumerate(outcomes):
        rows = [
            evolve(
                make_row(
                    [1, 2, 3], [0, 1, 1], reward=0.0 if number in equal else float(member), session=f"{number}-{member}"
                ),
                turn_infos=(TurnInfo(finish=FinishReason.LENGTH if outcome == "cut" else FinishReason.STOP),),
            )
            for member, outcome in enumerate(found)
        ]
        group = make_group(rows, name=f"g{number}")
        episodes = tuple(
            evolve(episode, trajectories=(), failure="it crashed") if outcome == "failed" else episode
            for episode, outcome in zip(group.episodes, found, strict=True)
        )
        groups.append(evolve(group, episodes=episodes))
    config = TrainerConfig(
        objective=ObjectiveConfig(masks_truncated=True, aggregation=aggregation, fixed_length=10),
        advantages=AdvantageConfig(drop_zero_variance=True),
        num_minibatches=num_minibatches,
    )
    rows = create_rows(groups, compute_advantages(groups, config.advantages), config)

    for update in split_updates(rows, config, version=0):
        batch = Batch.create(update, aggregation=aggregation, fixed_length=10)
        counted = [name for row in {row.group: row for row in update}.values() for name in outcomes[row.group]]
        if aggregation is Aggregation.FIXED_LENGTH:
            counted = [name for name in counted if name != "failed"]
        assert batch.weights == pytest.approx(1 / (10 * len(counted)))


def test_rows_that_cannot_be_true_are_refused(make_row):
    """No engine reports these: each is named before anything is computed."""
    good = make_row([1, 2], [0, 1])

    with pytest.raises(ExportError, match="first token"):
        TrainingRow(trajectory=make_row([1, 2], [1, 1]), advantages=[0, 0])
    with pytest.raises(ExportError, match="differ in length"):
        TrainingRow(trajectory=good, advantages=[0, 0, 0])
