"""The trainer end to end on tiny models: layouts, accumulation, exactness and refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from attrs import evolve

from areal_actors.domain import as_floats, unfold
from areal_actors.errors import CaptureViolation, ConfigError, TrainingDiverged
from areal_actors.training.config import (
    ROUNDING_NATS,
    Aggregation,
    CaptureConfig,
    ComputeDtype,
    KlConfig,
    KlPlace,
    Layout,
    ObjectiveConfig,
    OptimizerConfig,
    OverlongConfig,
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
@pytest.mark.parametrize("surrogate", list(Surrogate))
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


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
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


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
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


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
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


def test_minibatches_compare_with_the_weights_before_the_step(make_model, make_agent_group):
    """With several updates a step moves away from the proximal policy, which was scored once, before the first."""
    groups = [make_agent_group(seed) for seed in range(4)]
    objective = ObjectiveConfig(surrogate=Surrogate.PPO)
    config = evolve(
        PLAIN, num_epochs=2, num_minibatches=2, optimizer=OptimizerConfig(learning_rate=0.02), objective=objective
    )
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


def test_loss_that_is_no_number_changes_nothing(make_model, make_agent_group):
    """Weights that overflow raise TrainingDiverged; weights, moments and version stay."""
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    trainer = PolicyTrainer.__new__(PolicyTrainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal_actors.training.model_checks.require_plain_head", lambda *_: None)
        trainer.__init__(model, PLAIN)
    before = {name: p.clone() for name, p in model.named_parameters()}

    with pytest.raises(TrainingDiverged, match=r"weights were not changed\. Lower the learning rate"):
        trainer.train_step([make_agent_group(0)])

    assert trainer.version == 0
    assert all(torch.equal(before[n].nan_to_num(7), p.nan_to_num(7)) for n, p in model.named_parameters())


def test_rewards_that_overflow_are_named(make_model, make_agent_group):
    """The learning rate is not the cause, so their range is printed in place of advice about it."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    group = make_agent_group(0)
    episodes = [
        evolve(
            episode,
            reward=(-1) ** member * 1e30,
            trajectories=tuple(
                evolve(row, reward=(-1) ** member * 1e30, returns=row.loss_mask * (-1) ** member * 1e30)
                for row in episode.trajectories
            ),
        )
        for member, episode in enumerate(group.episodes)
    ]
    with pytest.raises(TrainingDiverged, match=r"rewards are from -1e\+30 to 1e\+30, .* scale rewards to about 1"):
        trainer.train_step([evolve(group, episodes=tuple(episodes))])


def test_foreign_ids_are_refused(make_model, make_group, make_row):
    """An id beyond the vocabulary names the mismatch instead of crashing in an embedding."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    rows = [make_row([1, 9999, 3], [0, 0, 1], reward=r) for r in (0.0, 1.0)]

    with pytest.raises(CaptureViolation, match="9999"):
        trainer.train_step([make_group(rows)])


def test_kl_penalty_without_a_reference_is_refused(make_model):
    """When the trainer is created, not at the first step."""
    config = evolve(PLAIN, objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1)))

    with pytest.raises(ConfigError, match="reference"):
        PolicyTrainer(make_model(), config)


def test_bfloat16_autocast_keeps_float32_weights(make_model, make_agent_group):
    """Computing in bfloat16 gives nearly the gradient of float32, in float32."""
    groups = [make_agent_group(0)]
    model = make_model()

    exact, _ = gradients_of(model, PLAIN, groups)
    rough, _ = gradients_of(model, evolve(PLAIN, dtype=ComputeDtype.BFLOAT16), groups)

    assert all(value.dtype is torch.float32 for value in rough.values())
    assert relative_error(exact, rough) < 0.1


# --------------------------------------------------------------------------------------- what settings do by default


def weights_after(trainer):
    """Copies of all weights."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def stale_group(trainer, make_group, make_row, seed=0):
    """Rows that the weights of ``trainer`` sampled as they are now."""
    rng = np.random.default_rng(seed)
    rows = []
    for member in range(4):
        ids = rng.integers(0, 61, 12)
        mask = np.repeat([0, 1], [4, 8])
        row = make_row(ids, mask, reward=float(member % 2), session=f"stale{seed}-{member}", version=trainer.version)
        rows.append(row)
    values = trainer.logprobs(rows)
    return make_group([evolve(row, logprobs=own, raw_logprobs=own) for row, own in zip(rows, values, strict=True)])


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
def test_default_clip_acts_on_stale_rows(make_model, make_group, make_row, layout):
    """Rows of older weights give other weights under another clip; with one update per step and nothing else set."""
    found = {}
    for clip in (None, 1e-4):
        objective = ObjectiveConfig(clip_low=clip, clip_high=clip)
        optimizer = OptimizerConfig(max_grad_norm=None, learning_rate=0.03, num_warmup_steps=0)
        trainer = PolicyTrainer(make_model(), evolve(PLAIN, layout=layout, objective=objective, optimizer=optimizer))
        group = stale_group(trainer, make_group, make_row)
        first = trainer.train_step([group])
        statistics = [trainer.train_step([group]) for _ in range(3)]
        found[clip] = weights_after(trainer), statistics
        assert first.clip_fraction == 0

    assert any(not torch.equal(value, found[1e-4][0][name]) for name, value in found[None][0].items())
    assert all(tight.clip_fraction > 0.9 for tight in found[1e-4][1][:1])
    assert found[None][1][-1].clip_fraction > 0


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(),
        ObjectiveConfig(surrogate=Surrogate.PPO),
        ObjectiveConfig(surrogate=Surrogate.PPO, is_decoupled=False),
    ],
)
def test_one_absurd_token_does_not_outweigh_the_others(make_model, make_group, make_row, objective):
    """A token of log-probability -12 at sampling, in a bad row, leaves the gradient as large as it was."""
    norms = {}
    for absurd in (None, -12.0):
        trainer = PolicyTrainer(make_model(), evolve(PLAIN, objective=objective))
        group = stale_group(trainer, make_group, make_row)
        rows = [episode.trajectories[0] for episode in group.episodes]
        if absurd is not None:
            values = rows[0].logprobs.copy()
            values[6] = absurd
            rows[0] = evolve(rows[0], logprobs=values, raw_logprobs=None)
        norms[absurd] = trainer.train_step([make_group(rows)]).grad_norm

    assert norms[-12.0] < 3 * norms[None]


@pytest.mark.parametrize("skips", [True, False])
def test_batch_without_signal_moves_nothing(make_model, make_group, make_row, make_agent_group, skips):
    """Moments and weight decay would: the weights stay bit for bit, the version advances, no update is counted."""
    optimizer = OptimizerConfig(max_grad_norm=None, learning_rate=0.01, weight_decay=0.1)
    trainer = PolicyTrainer(make_model(), evolve(PLAIN, optimizer=optimizer, skips_inert_rows=skips))
    trainer.train_step([make_agent_group(0)])
    before = weights_after(trainer)

    statistics = trainer.train_step([make_group([make_row([1, 2], [0, 1], reward=1.0) for _ in range(2)])])

    assert statistics.version == trainer.version == 2
    assert statistics.num_updates == 0
    assert all(torch.equal(value, before[name]) for name, value in weights_after(trainer).items())


def test_rewards_are_those_of_the_agents(make_model, make_group, make_row):
    """Penalties are reported by themselves: 0.75 stays 0.75, overlong or far from the reference."""
    rows = [make_row([0] + [1] * 10, [0] + [1] * 10, reward=reward) for reward in (1.0, 1.0, 1.0, 0.0)]
    overlong = ObjectiveConfig(overlong=OverlongConfig(max_tokens=5, buffer_tokens=2))
    distant = ObjectiveConfig(kl=KlConfig(coefficient=0.1, place=KlPlace.REWARD))

    long = PolicyTrainer(make_model(), evolve(PLAIN, objective=overlong)).train_step([make_group(rows)])
    far = PolicyTrainer(make_model(), evolve(PLAIN, objective=distant), reference=make_model(seed=1))
    far_data = far.train_step([make_group(rows)]).data

    assert long.data.reward_mean == far_data.reward_mean == 0.75
    assert long.data.penalty_mean == pytest.approx(1)
    assert far_data.penalty_mean != 0


def test_distance_in_the_reward_is_as_large_as_its_coefficient(make_model, make_group, make_row):
    """In a group of equal rewards, the gradient is that of the distance alone: it is not blown up to unit variance."""
    norms = []
    for coefficient in (1e-1, 1e-3):
        kl = KlConfig(coefficient=coefficient, place=KlPlace.REWARD)
        trainer = PolicyTrainer(
            make_model(), evolve(PLAIN, objective=ObjectiveConfig(kl=kl)), reference=make_model(seed=1)
        )
        group = stale_group(trainer, make_group, make_row)
        equal = evolve(group, episodes=tuple(set_reward(episode, 1.0) for episode in group.episodes))
        statistics = trainer.train_step([equal])
        assert statistics.data.num_zero_variance_groups == 1
        norms.append(statistics.grad_norm)

    assert norms[0] == pytest.approx(100 * norms[1], rel=1e-3)


def set_reward(episode, reward):
    """The episode with another reward."""
    rows = tuple(evolve(row, reward=reward, returns=as_floats(row.loss_mask * reward)) for row in episode.trajectories)
    return evolve(episode, reward=reward, trajectories=rows)


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("dtype", [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16])
@pytest.mark.parametrize("surrogate", list(Surrogate))
def test_rows_of_the_current_weights_are_not_clipped(make_model, make_agent_group, surrogate, dtype, num_minibatches):
    """Whatever rounding did to the log-probabilities that the engine reports."""
    config = evolve(
        PLAIN,
        dtype=dtype,
        num_minibatches=num_minibatches,
        capture=CaptureConfig(enabled=False),
        optimizer=OptimizerConfig(learning_rate=1e-12),
        objective=ObjectiveConfig(surrogate=surrogate),
    )
    trainer = PolicyTrainer(make_model(), config)
    rng, rounding = np.random.default_rng(0), 0.6 * ROUNDING_NATS[str(dtype)]
    groups = []
    for group in (make_agent_group(seed) for seed in range(2)):
        own = trainer.logprobs([episode.trajectories[0] for episode in group.episodes])
        episodes = []
        for episode, logprobs in zip(group.episodes, own, strict=True):
            row = episode.trajectories[0]
            noisy = np.minimum(logprobs + rng.uniform(-rounding, rounding, len(logprobs)), 0) * row.loss_mask
            row = evolve(row, logprobs=as_floats(noisy), raw_logprobs=as_floats(noisy))
            episodes.append(evolve(episode, trajectories=(row,)))
        groups.append(evolve(group, episodes=tuple(episodes)))

    assert trainer.train_step(groups).clip_fraction == 0
