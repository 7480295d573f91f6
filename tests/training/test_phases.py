"""Supervised and distillation phases: their gradients against a slow reference, and their order on one axis."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from attrs import evolve

from areal_actors.domain import as_floats, unfold_group
from areal_actors.errors import ConfigError, ExportError
from areal_actors.training.config import (
    AdvantageConfig,
    Aggregation,
    CaptureConfig,
    ComputeDtype,
    KlConfig,
    Layout,
    Normalisation,
    ObjectiveConfig,
    OptimizerConfig,
    Surrogate,
    TrainerConfig,
)
from areal_actors.training.phases import Phase, PhaseName, distillation_phase, sft_phase
from areal_actors.training.statistics import RowRecorder
from areal_actors.training.trainer import PolicyTrainer

PLAIN = TrainerConfig(dtype=ComputeDtype.FLOAT32, optimizer=OptimizerConfig(max_grad_norm=None, learning_rate=1e-3))
# The plain policy gradient: no clip, no baseline, so that the reference stays short.
REINFORCE = evolve(
    PLAIN,
    objective=ObjectiveConfig(surrogate=Surrogate.REINFORCE, is_decoupled=False, aggregation=Aggregation.TOKEN_MEAN),
    advantages=AdvantageConfig(normalisation=Normalisation.NONE),
)


def gradients_of(trainer, groups):
    """The gradient of one step, by name, and its statistics."""
    captured = {}
    original = trainer._optimizer.step

    def step():
        captured.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
        return original()

    trainer._optimizer.step = step
    return captured, trainer.train_step(groups)


def slow_logprobs(model, row):
    """Log-probabilities of the trained tokens of one row, in a pass without packing, with gradient."""
    ids = torch.tensor(row.input_ids, dtype=torch.long)
    logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    where = torch.tensor(np.flatnonzero(row.loss_mask))
    return logits[where - 1, ids[where]]


def rows_of(groups):
    """The linear rows of groups."""
    return [row for group in groups for row in unfold_group(group).rows]


def relative_error(first, second):
    """The norm of the difference over the norm."""
    difference = sum(float((first[name] - second[name]).square().sum()) for name in second)
    return (difference / sum(float(value.square().sum()) for value in second.values())) ** 0.5


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
def test_supervised_steps_descend_the_mean_likelihood(make_model, make_agent_group, make_group, make_tree_row, layout):
    """Loss and gradient are those of the cross entropy over all trained tokens, whatever the rewards."""
    groups = [make_agent_group(1), make_agent_group(2), make_group([make_tree_row(3)])]
    model = make_model()
    reference = copy.deepcopy(model)
    logprobs = torch.cat([slow_logprobs(reference, row) for row in rows_of(groups)])
    loss = -logprobs.mean()
    loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    policy_settings = ObjectiveConfig(entropy_coefficient=0.5, masks_truncated=True)
    config = evolve(PLAIN, layout=layout, objective=policy_settings, num_epochs=2, num_minibatches=2, temperature=0.5)

    gradient, statistics = gradients_of(PolicyTrainer(model, phases=[sft_phase(config)]), groups)

    assert relative_error(gradient, expected) < 1e-5
    assert statistics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert statistics.num_updates == 1
    assert np.isnan(statistics.teacher_kl)


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
def test_distillation_follows_the_gradient_of_the_reverse_kl(make_model, make_agent_group, layout):
    """Each token's advantage is its reward's, plus the teacher's log-ratio, both weighted."""
    groups = [make_agent_group(seed) for seed in range(2)]
    model, teacher = make_model(), make_model(seed=5)
    reference = copy.deepcopy(model)
    rows = rows_of(groups)
    logprobs = torch.cat([slow_logprobs(reference, row) for row in rows])
    taught = torch.cat([slow_logprobs(teacher, row) for row in rows]).detach()
    rewards = torch.tensor(np.concatenate([row.returns[row.loss_mask == 1] for row in rows]))
    gaps = taught - logprobs.detach()
    (-(0.5 * rewards + 2.0 * gaps) * logprobs).mean().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    phase = distillation_phase(evolve(REINFORCE, layout=layout), coefficient=2.0, reward_coefficient=0.5)

    gradient, statistics = gradients_of(PolicyTrainer(model, phases=[phase], teacher=teacher), groups)

    assert relative_error(gradient, expected) < 1e-5
    assert statistics.teacher_kl == pytest.approx(-float(gaps.mean()), rel=1e-4)


def scored(groups, teacher):
    """Groups whose rows carry the scores of ``teacher``."""

    def with_scores(row):
        values = np.zeros(row.num_tokens)
        values[row.loss_mask == 1] = slow_logprobs(teacher, row).detach().numpy()
        return evolve(row, teacher_logprobs=values)

    return [
        evolve(
            group,
            episodes=tuple(evolve(e, trajectories=tuple(map(with_scores, e.trajectories))) for e in group.episodes),
        )
        for group in groups
    ]


def test_rows_may_bring_the_scores_of_their_teacher(make_model, make_agent_group):
    """A teacher elsewhere gives the update of the same teacher inside the trainer; without scores a step is refused."""
    groups, teacher = [make_agent_group(1)], make_model(seed=5)
    phase = distillation_phase(PLAIN)
    inside = PolicyTrainer(make_model(), phases=[phase], teacher=teacher)
    outside = PolicyTrainer(make_model(), phases=[phase])
    unscored = PolicyTrainer(make_model(), phases=[phase])
    before = copy.deepcopy(unscored.state_dict())

    inside.train_step(groups)
    outside.train_step(scored(groups, teacher))
    with pytest.raises(ExportError, match="No teacher has scored a row of session s1-0"):
        unscored.train_step(groups)

    for name, weight in inside.state_dict().items():
        torch.testing.assert_close(outside.state_dict()[name], weight, rtol=0, atol=2e-4)
    assert all(torch.equal(unscored.state_dict()[name], weight) for name, weight in before.items())


def test_excluded_token_is_bounded(make_model, make_agent_group):
    """A teacher that reports -9999 for a token does not make the whole gradient, and the step stays finite."""
    group = make_agent_group(1)
    taught = scored([group], make_model(seed=5))[0]
    excluded = [
        evolve(row, teacher_logprobs=as_floats(np.where(row.loss_mask == 1, -9999.0, 0.0))) for row in taught.rows
    ]
    episodes = tuple(evolve(e, trajectories=(row,)) for e, row in zip(taught.episodes, excluded, strict=True))
    trainer = PolicyTrainer(make_model(), phases=[distillation_phase(PLAIN)])

    statistics = trainer.train_step([evolve(taught, episodes=episodes)])

    assert statistics.teacher_kl == pytest.approx(10.0)


# ------------------------------------------------------------------------------------------------------ phases


def test_run_resumes_exactly_within_and_between_phases(make_model, make_agent_group, tmp_path):
    """Stopped after any step, the weights continue bit-equal: each phase has its own optimiser and settings."""
    phases = [
        sft_phase(PLAIN, num_steps=2, learning_rate=5e-3),
        distillation_phase(PLAIN, num_steps=2, learning_rate=2e-3, reward_coefficient=1.0),
        Phase(name=PhaseName.RL, config=PLAIN),
    ]

    def create():
        return PolicyTrainer(make_model(), phases=phases, teacher=make_model(seed=5))

    whole = create()
    seen = []
    for step in range(6):
        statistics = whole.train_step([make_agent_group(step)])
        seen.append((whole.phase.name, statistics.learning_rate))
        whole.save(tmp_path / str(step + 1))
    for stopped in range(1, 6):
        resumed = create()
        resumed.restore(tmp_path / str(stopped))
        for step in range(stopped, 6):
            resumed.train_step([make_agent_group(step)])
        for name, weight in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], weight), (stopped, name)

    # The warm-up of three updates begins anew with each phase.
    rates = [5e-3 / 3, 5e-3 * 2 / 3, 2e-3 / 3, 2e-3 * 2 / 3, 1e-3 / 3, 1e-3 * 2 / 3]
    assert [name for name, _ in seen] == ["sft", "sft", "distillation", "distillation", "rl", "rl"]
    assert [rate for _, rate in seen] == pytest.approx(rates)


def test_penalty_of_a_later_phase_needs_its_reference_at_the_start(make_model):
    """Otherwise the run would fail after its warm start."""
    config = TrainerConfig(objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1)))
    with pytest.raises(ConfigError, match="needs a reference model"):
        PolicyTrainer(make_model(), phases=(sft_phase(config, num_steps=1), Phase(config=config)))


def test_each_phase_has_its_own_custom_functions_and_checks(make_model, make_agent_group, tmp_path):
    """Those of the first one would otherwise be used to the end."""
    code = "def halves(groups):\n    return [[0.5] * len(group.rows) for group in groups]\n"
    code += "def count(step):\n    return {'rows': len(step.rows)}\n"
    (tmp_path / "own.py").write_text(code)
    later = evolve(
        PLAIN,
        layout=Layout.FLAT,
        metrics=(f"{tmp_path}/own.py:count",),
        advantages=AdvantageConfig(normalisation=f"{tmp_path}/own.py:halves"),
        capture=CaptureConfig(tolerance=100.0, max_bad_fraction=1.0),
    )
    trainer = PolicyTrainer(make_model(), phases=[Phase(num_steps=1, config=PLAIN), Phase(config=later)])
    group = make_agent_group(0)
    recorder = RowRecorder()

    assert trainer.train_step([group]).custom == {}
    assert trainer.gate.tolerance is None
    assert trainer.train_step([group], recorder=recorder).custom == {"rows": 4.0}
    assert trainer.gate.tolerance == 100.0
    assert all(set(row.advantages) == {0.0, 0.5} for row in recorder.rows())
