"""The trainer end to end on tiny models: layouts, accumulation, exactness and refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from attrs import evolve

from areal_actors.domain import unfold
from areal_actors.errors import CaptureViolation, ConfigError, TrainingDiverged
from areal_actors.training.config import (
    Aggregation,
    ComputeDtype,
    KlConfig,
    KlPlace,
    Layout,
    ObjectiveConfig,
    OptimizerConfig,
    Surrogate,
    TrainerConfig,
)
from areal_actors.training.trainer import PolicyTrainer

PLAIN = TrainerConfig(dtype=ComputeDtype.FLOAT32, optimizer=OptimizerConfig(max_grad_norm=None, learning_rate=1e-3))


def gradients_of(model, config, groups, **kwargs):
    """The gradient that one update would apply, by name, and the step's statistics."""
    trainer = PolicyTrainer(copy.deepcopy(model), config, **kwargs)
    captured = {}
    original = trainer._optimizer.step

    def step():
        captured.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return original()

    trainer._optimizer.step = step
    return captured, trainer.train_step(groups)


def relative_error(first, second):
    """The norm of the difference over the norm."""
    difference = sum(float((first[name] - second[name]).square().sum()) for name in first)
    return (difference / sum(float(value.square().sum()) for value in first.values())) ** 0.5


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("surrogate", [Surrogate.PPO, Surrogate.GSPO])
def test_layouts_agree(make_model, make_agent_group, kind, surrogate):
    """Tree and flat give the same loss and gradient, and the tree computes fewer tokens."""
    groups = [make_agent_group(seed) for seed in range(3)]
    config = evolve(PLAIN, objective=ObjectiveConfig(surrogate=surrogate, entropy_coefficient=0.01))
    model = make_model(kind)

    flat, flat_statistics = gradients_of(model, evolve(config, layout=Layout.FLAT), groups)
    tree, tree_statistics = gradients_of(model, evolve(config, layout=Layout.TREE), groups)

    assert relative_error(flat, tree) <= 1e-5
    assert flat_statistics.loss == pytest.approx(tree_statistics.loss, rel=1e-5)
    assert flat_statistics.entropy == pytest.approx(tree_statistics.entropy, rel=1e-5)
    assert tree_statistics.num_packed_tokens < 0.6 * flat_statistics.num_packed_tokens


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_trees_are_trained_as_their_branches(make_model, make_group, make_tree_row, layout, aggregation):
    """A tree row gives the loss and the gradient of its branches as rows, and its log-probabilities are theirs."""
    config = evolve(PLAIN, layout=layout, objective=ObjectiveConfig(aggregation=aggregation))
    trees = [make_tree_row(seed, reward=float(seed)) for seed in range(3)]
    rows = [[branch.row for branch in unfold(tree)] for tree in trees]
    model = make_model()
    whole, parts = make_group(trees), make_group(trees)
    parts = evolve(
        parts,
        episodes=tuple(evolve(e, trajectories=tuple(r)) for e, r in zip(parts.episodes, rows, strict=True)),
    )

    expected, expected_statistics = gradients_of(model, config, [parts])
    found, statistics = gradients_of(model, config, [whole])
    scores = PolicyTrainer(copy.deepcopy(model), config).logprobs(trees)

    assert relative_error(expected, found) <= 1e-6
    assert expected_statistics.loss == pytest.approx(statistics.loss, rel=1e-6)
    for tree, own in zip(trees, scores, strict=True):
        np.testing.assert_allclose(slow_tree_logprobs(model, tree), own, atol=1e-4)


@torch.no_grad()
def slow_tree_logprobs(model, tree):
    """Token by token: the whole past through the model, for each trained token anew."""
    result = np.zeros(tree.num_tokens, np.float32)
    for place in np.flatnonzero(tree.loss_mask):
        past = [int(place)]
        while tree.predecessors[past[0]] >= 0:
            past.insert(0, int(tree.predecessors[past[0]]))
        ids = torch.tensor(tree.input_ids[past][None].copy(), dtype=torch.long)
        result[place] = model(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]]
    return result


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_micro_batches_change_nothing(make_model, make_agent_group, layout, aggregation):
    """Small passes accumulate to the gradient of one large pass, whatever the aggregation."""
    groups = [make_agent_group(seed) for seed in range(3)]
    config = evolve(PLAIN, layout=layout, objective=ObjectiveConfig(aggregation=aggregation))
    model = make_model()

    whole, _ = gradients_of(model, evolve(config, max_packed_tokens=10_000), groups)
    parts, _ = gradients_of(model, evolve(config, max_packed_tokens=30), groups)

    assert relative_error(whole, parts) <= 1e-5


def test_inert_rows_change_nothing(make_model, make_agent_group, make_group, make_row):
    """Leaving out rows without advantage gives the same gradient and statistics of the batch."""
    equal = make_group([make_row([1, 2, 3], [0, 1, 1], reward=1.0) for _ in range(3)], name="equal")
    groups = [make_agent_group(0), equal]
    model = make_model()

    kept, kept_statistics = gradients_of(model, evolve(PLAIN, skips_inert_rows=False), groups)
    skipped, statistics = gradients_of(model, evolve(PLAIN, skips_inert_rows=True), groups)

    assert relative_error(kept, skipped) <= 1e-6
    assert statistics.loss == pytest.approx(kept_statistics.loss, rel=1e-5)
    assert statistics.num_skipped_rows == 3
    assert statistics.data == kept_statistics.data
    assert statistics.data.num_zero_variance_groups == 1


def test_a_batch_without_any_advantage_is_a_step(make_model, make_group, make_row):
    """A batch that says nothing has gradient 0; it counts as a step and reports no token statistics."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}

    statistics = trainer.train_step([make_group([make_row([1, 2], [0, 1], reward=1.0)])])

    assert statistics.version == trainer.version == 1
    assert statistics.grad_norm == 0
    assert np.isnan(statistics.entropy)
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def test_on_policy_rows_have_ratio_one(make_model, make_agent_group, make_group):
    """Rows whose log-probabilities are the trainer's own have importance 1, no clip, no KL and no gap."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    group = make_agent_group(1)
    rows = [episode.trajectories[0] for episode in group.episodes]
    recomputed = trainer.logprobs(rows)
    on_policy = make_group([evolve(row, logprobs=own) for row, own in zip(rows, recomputed, strict=True)])

    statistics = trainer.train_step([on_policy])

    assert statistics.importance_mean == pytest.approx(1, abs=1e-5)
    assert statistics.clip_fraction == 0
    assert statistics.behaviour_gap_max == pytest.approx(0, abs=1e-5)
    assert statistics.approximate_kl == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("layout", list(Layout))
def test_logprobs_equal_the_models_own(make_model, make_agent_group, layout):
    """Recomputed log-probabilities are those of the plain model, read at the position before each token."""
    model = make_model()
    trainer = PolicyTrainer(model, evolve(PLAIN, layout=layout, temperature=0.7))
    rows = [episode.trajectories[0] for episode in make_agent_group(2).episodes]

    recomputed = trainer.logprobs(rows)

    for row, values in zip(rows, recomputed, strict=True):
        ids = torch.tensor(np.array(row.input_ids), dtype=torch.long)
        with torch.no_grad():
            plain = (model(input_ids=ids[None]).logits[0].double() / 0.7).log_softmax(-1)
        expected = np.zeros(row.num_tokens)
        for t in np.flatnonzero(row.loss_mask):
            expected[t] = plain[t - 1, ids[t]]

        assert values == pytest.approx(expected, abs=1e-4)


def test_training_raises_the_reward(make_model, make_group, make_row):
    """Repeated steps make the rewarded token likelier than the unrewarded one."""
    trainer = PolicyTrainer(make_model(), evolve(PLAIN, optimizer=OptimizerConfig(learning_rate=3e-3)))
    good, bad = make_row([1, 2, 3], [0, 0, 1], reward=1.0), make_row([1, 2, 4], [0, 0, 1], reward=0.0)
    start = [values[2] for values in trainer.logprobs([good, bad])]

    for _ in range(5):
        logprobs = trainer.logprobs([good, bad])
        rows = [evolve(row, logprobs=own) for row, own in zip([good, bad], logprobs, strict=True)]
        trainer.train_step([make_group(rows)])
    end = [values[2] for values in trainer.logprobs([good, bad])]

    assert end[0] > start[0]
    assert end[1] < start[1]


def test_minibatches_compare_with_the_weights_before_the_step(make_model, make_agent_group):
    """With several updates a step moves away from the proximal policy, which was scored once, before the first."""
    groups = [make_agent_group(seed) for seed in range(4)]
    config = evolve(PLAIN, num_epochs=2, num_minibatches=2, optimizer=OptimizerConfig(learning_rate=0.02))
    trainer = PolicyTrainer(make_model(), config)

    statistics = trainer.train_step(groups)

    assert statistics.num_updates == 4
    assert statistics.clip_fraction > 0


def test_reference_penalty_in_loss_and_reward(make_model, make_agent_group):
    """At the reference itself both penalties vanish; away from it they change the gradient."""
    groups = [make_agent_group(0)]
    model, other = make_model(), make_model(seed=1)
    plain, _ = gradients_of(model, PLAIN, groups)
    for place in KlPlace:
        config = evolve(PLAIN, objective=ObjectiveConfig(kl=KlConfig(coefficient=0.5, place=place)))

        same, statistics = gradients_of(model, config, groups, reference=copy.deepcopy(model))
        moved, moved_statistics = gradients_of(model, config, groups, reference=other)

        assert relative_error(plain, same) <= 1e-4
        assert statistics.reference_kl == pytest.approx(0, abs=1e-6)
        assert relative_error(plain, moved) > 1e-3
        assert moved_statistics.reference_kl > 0


def test_a_loss_that_is_no_number_changes_nothing(make_model, make_agent_group):
    """Weights that overflow raise TrainingDiverged; weights, moments and version stay."""
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    trainer = PolicyTrainer.__new__(PolicyTrainer)
    with pytest.MonkeyPatch.context() as patch:
        for check in ("require_plain_head", "require_tree_support"):
            patch.setattr(f"areal_actors.training.trainer.{check}", lambda _: None)
        trainer.__init__(model, PLAIN)
    before = {name: p.clone() for name, p in model.named_parameters()}

    with pytest.raises(TrainingDiverged, match="weights were not changed"):
        trainer.train_step([make_agent_group(0)])

    assert trainer.version == 0
    assert all(torch.equal(before[n].nan_to_num(7), p.nan_to_num(7)) for n, p in model.named_parameters())


def test_foreign_ids_are_refused(make_model, make_group, make_row):
    """An id beyond the vocabulary names the mismatch instead of crashing in an embedding."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    rows = [make_row([1, 9999, 3], [0, 0, 1], reward=r) for r in (0.0, 1.0)]

    with pytest.raises(CaptureViolation, match="9999"):
        trainer.train_step([make_group(rows)])


def test_configurations_that_cannot_be_meant_are_refused(make_model):
    """A KL penalty without a reference, and a tree for attention that takes no mask, are refused at creation."""
    config = evolve(PLAIN, objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1)))

    with pytest.raises(ConfigError, match="reference"):
        PolicyTrainer(make_model(), config)

    model = make_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ConfigError, match="layout=flat"):
        PolicyTrainer(model, PLAIN)


def test_bfloat16_autocast_keeps_float32_weights(make_model, make_agent_group):
    """Computing in bfloat16 gives nearly the gradient of float32, in float32."""
    groups = [make_agent_group(0)]
    model = make_model()

    exact, _ = gradients_of(model, PLAIN, groups)
    rough, _ = gradients_of(model, evolve(PLAIN, dtype=ComputeDtype.BFLOAT16), groups)

    assert all(value.dtype is torch.float32 for value in rough.values())
    assert relative_error(exact, rough) < 0.1
