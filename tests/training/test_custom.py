"""Custom advantages, policy losses and metrics: what they may return, and how each mistake is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_actors.errors import CustomFunctionError
from areal_actors.lib.references import CustomFunction
from areal_actors.training.config import AdvantageConfig, Normalisation, ObjectiveConfig
from areal_actors.training.custom import (
    CustomSurrogate,
    StepInputs,
    estimate_advantages,
    example_groups,
    measure,
    try_estimator,
    try_metric,
    try_surrogate,
)
from areal_actors.training.objective import create_objective
from areal_actors.training.surrogates import ClippedRatio, PolicyLoss, Reinforce


def named(function):
    return CustomFunction(name="mine.py:f", function=function)


def surrogate(function):
    return CustomSurrogate(function=named(function))


def dr_grpo(groups):
    """Dr. GRPO as a user would write it."""
    result = []
    for group in groups:
        rewards = [episode.reward for episode in group.episodes if episode.failure is None]
        result.append([row.returns - np.mean(rewards) for row in group.rows])
    return result


# ------------------------------------------------------------------------------------------------- advantages


def test_custom_advantages_are_those_of_the_built_in_formula():
    """A copy of Dr. GRPO gives its numbers, masked."""
    groups = example_groups()
    config = AdvantageConfig(normalisation=Normalisation.DR_GRPO)
    expected = estimate_advantages(groups, config, None)
    found = estimate_advantages(groups, config, named(dr_grpo))

    assert [group.has_zero_variance for group in expected] == [group.has_zero_variance for group in found]
    for left, right in zip(expected, found, strict=True):
        for a, b in zip(left.rows, right.rows, strict=True):
            assert b.dtype == np.float32
            assert a == pytest.approx(b)


def test_examples_have_every_kind_of_group():
    """A failed episode, several rows, several turns, equal rewards, an episode alone."""
    groups = example_groups()

    assert any(e.failure for g in groups for e in g.episodes)
    assert any(len(e.trajectories) > 1 for g in groups for e in g.episodes)
    assert any(row.turns.max() > 0 for g in groups for row in g.rows)
    assert any(len({e.reward for e in g.episodes}) == 1 < len(g.episodes) for g in groups)
    assert any(len(g.episodes) == 1 for g in groups)


def _changed(groups):
    groups[0].rows[0].returns[:] = 0
    return dr_grpo(groups)


@pytest.mark.parametrize(
    ("estimator", "complaint"),
    [
        (lambda _: None, "returned None of type NoneType; give a list with an entry for each of the 4 groups"),
        (lambda groups: dr_grpo(groups)[1:], "returned 3 entries for the 4 groups of the step"),
        (lambda groups: [rows[1:] for rows in dr_grpo(groups)], "returned 3 entries for the 4 rows of group example-0"),
        (lambda groups: [[[0.0]] * 9 for _ in groups], "returned 9 entries for the 4 rows of group example-0"),
        (lambda groups: [[row[1:] for row in rows] for rows in dr_grpo(groups)], r"shape \(3,\).*example-single-0"),
        (lambda groups: [[None] * len(g.rows) for g in groups], "returned nan for token 2 of a row of session"),
        (lambda groups: [["a"] * len(g.rows) for g in groups], "returned 'a' for a row of session example-single-0"),
        (lambda groups: [[r * np.nan for r in rows] for rows in dr_grpo(groups)], "returned nan for token 2"),
        (lambda groups: [[r + 1e39 for r in rows] for rows in dr_grpo(groups)], "returned 1e.39 for token 2"),
        (_changed, "read-only.*must not change what it is given"),
        (lambda groups: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_wrong_advantages_are_named(estimator, complaint):
    """The function, what it returned, and for which row."""
    with pytest.raises(CustomFunctionError, match=f"mine.py:f .*{complaint}"):
        try_estimator(named(estimator))


# ------------------------------------------------------------------------------------------------ policy loss


@pytest.mark.parametrize("loss", [ClippedRatio(), Reinforce(), lambda logprobs, inputs: -inputs.advantages * logprobs])
def test_policy_loss_may_return_the_losses_alone(loss):
    """Tensors and ``PolicyLoss`` are taken; the built-in losses pass as custom ones."""
    try_surrogate(surrogate(loss))


def _in_place(logprobs, inputs):
    inputs.advantages.mul_(2)
    return -inputs.advantages * logprobs


def _wrong_clip(logprobs, inputs):
    return PolicyLoss(losses=-inputs.advantages * logprobs, is_clipped=torch.zeros(1))


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (lambda *_: None, "returned None of type NoneType; give a tensor of losses"),
        (
            lambda logprobs, inputs: (-inputs.advantages * logprobs).sum(),
            r"returned losses of shape \(\); .* the 5 tokens",
        ),
        (lambda logprobs, inputs: (-inputs.advantages * logprobs)[1:], r"losses of shape \(4,\)"),
        (_wrong_clip, r"is_clipped of shape \(1,\)"),
        (lambda logprobs, inputs: -inputs.advantages * logprobs.detach(), "without a gradient"),
        (lambda logprobs, inputs: logprobs / inputs.advantages, "returned -?inf for a token with the log-probability"),
        (lambda logprobs, inputs: (logprobs - inputs.proximal).sqrt(), "with the gradient"),
        (_in_place, "changed a tensor that it was given"),
        (lambda logprobs: logprobs, "raised TypeError"),
    ],
)
def test_wrong_policy_loss_is_named(loss, complaint):
    """The function, and what was wrong with its losses."""
    with pytest.raises(CustomFunctionError, match=f"mine.py:f .*{complaint}"):
        try_surrogate(surrogate(loss))


def test_rows_without_advantage_are_computed_for_a_custom_loss(tmp_path):
    """It may have a gradient there, which a built-in one has not."""
    path = tmp_path / "mine.py"
    path.write_text("def f(logprobs, inputs):\n    return -logprobs\n")

    assert create_objective(ObjectiveConfig(surrogate=f"{path}:f")).needs_every_row
    assert not create_objective(ObjectiveConfig()).needs_every_row


# ---------------------------------------------------------------------------------------------------- metrics


def test_metrics_see_groups_and_rows():
    """Numbers of every kind are taken, under their names."""

    def spread(step):
        rewards = [episode.reward for group in step.groups for episode in group.episodes]
        return {"reward/max": np.float32(max(rewards)), "rows": len(step.rows), "is_first": step.version == 0}

    step = StepInputs(version=0, groups=example_groups(), rows=())

    try_metric(named(spread))
    assert {"reward/max": 2.0, "rows": 0.0, "is_first": 1.0} == measure([named(spread)], step)


@pytest.mark.parametrize(
    ("metric", "complaint"),
    [
        (lambda _: 1.0, "returned 1.0 of type float in step 1; give a mapping"),
        (lambda _: None, "returned None of type NoneType"),
        (lambda _: {"a": float("nan")}, "returned nan for 'a' in step 1; give a finite number"),
        (lambda _: {"a": None}, "returned None for 'a'"),
        (lambda _: {"a b": 1.0}, "returned a number named 'a b'"),
        (lambda _: {3: 1.0}, "returned a number named 3"),
        (lambda _: {f"n{i}": 0.0 for i in range(65)}, "returned 65 numbers; give at most 64"),
    ],
)
def test_wrong_metric_is_named(metric, complaint):
    """The function and what it returned."""
    with pytest.raises(CustomFunctionError, match=f"mine.py:f .*{complaint}"):
        try_metric(named(metric))
