"""What a step records of its rows: advantages, and the log-probabilities that the trainer computes for them."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from areal_actors.domain import unfold_group
from areal_actors.training.config import Layout, OptimizerConfig, TrainerConfig
from areal_actors.training.statistics import RowRecorder
from areal_actors.training.trainer import PolicyTrainer


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_log_probabilities_are_those_before_the_step(make_model, make_agent_group, layout, num_epochs):
    """Of every row that was computed, whatever the layout and the number of updates; the weights do move."""
    base = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), layout=layout, num_epochs=num_epochs)
    config = evolve(base, capture=evolve(base.capture, enabled=False))
    trainer = PolicyTrainer(make_model(), config)
    groups = [make_agent_group(seed) for seed in (0, 1)]
    rows = [row for group in groups for episode in unfold_group(group).episodes for row in episode.trajectories]
    before = trainer.logprobs(rows)
    recorder = RowRecorder()
    trainer.train_step(groups, recorder=recorder)
    found = recorder.rows()

    assert [row.trajectory for row in found] == rows
    for row, expected in zip(found, before, strict=True):
        trained = row.trajectory.loss_mask == 1
        np.testing.assert_allclose(row.trainer_logprobs[trained], expected[trained], atol=1e-5)
        assert np.isnan(row.trainer_logprobs[~trained]).all()
        assert not row.advantages[~trained].any()
        assert row.advantages[trained].any()
        for index, turn in enumerate(row.trajectory.interactions):
            own = row.advantages[row.trajectory.turns == index]
            if own.any():  # else another row trains the turn
                values, counts = zip(*recorder.advantages()[turn], strict=True)
                np.testing.assert_allclose(np.repeat(values, counts), own, rtol=1e-3)
    assert any(not np.allclose(now, then, atol=1e-4) for now, then in zip(trainer.logprobs(rows), before, strict=True))


def test_rows_know_their_problem_and_their_episode(make_model, make_agent_group, make_group, make_row):
    """Also those that the step skips, because nothing in them changes the gradient."""
    config = TrainerConfig()
    config = evolve(config, capture=evolve(config.capture, enabled=False))
    same = make_group([make_row([1, 2, 3], [0, 1, 1], reward=1.0, session=f"same-{member}") for member in range(2)])
    groups = [make_agent_group(0), evolve(same, problem=evolve(same.problem, position=7))]
    recorder = RowRecorder()
    PolicyTrainer(make_model(), config).train_step(groups, recorder=recorder)
    inert = [row for row in recorder.rows() if row.task == 7]

    assert [(row.member, row.episode_reward) for row in inert] == [(0, 1.0), (1, 1.0)]
    assert all(np.isnan(row.trainer_logprobs).all() for row in inert)
    assert all(not row.advantages.any() for row in inert)
