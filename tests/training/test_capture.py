"""The gate before an update: what cannot be true is refused by name, before the weights move, and honest rows pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve

from areal_actors.domain import CaptureFault
from areal_actors.errors import CaptureViolation
from areal_actors.training.config import (
    CaptureConfig,
    ComputeDtype,
    ObjectiveConfig,
    OptimizerConfig,
    Surrogate,
    TrainerConfig,
)
from areal_actors.training.trainer import PolicyTrainer

PLAIN = TrainerConfig(dtype=ComputeDtype.FLOAT32, optimizer=OptimizerConfig(max_grad_norm=None, learning_rate=1e-3))


def sampled(trainer, group, make_group, *, num_wrong=0, version=0):
    """The group with the trainer's own plain log-probabilities, but for those of ``num_wrong`` rows."""
    rows = [episode.trajectories[0] for episode in group.episodes]
    found = trainer.logprobs(rows, is_raw=True)
    raws = [values - (index < num_wrong) * (values < 0) for index, values in enumerate(found)]
    versions = [np.where(row.loss_mask == 1, version, -1) for row in rows]
    return make_group(
        [evolve(row, raw_logprobs=raw, versions=own) for row, raw, own in zip(rows, raws, versions, strict=True)]
    )


def refusal(trainer, groups, **options):
    """What the step is refused with; the weights and the version are as they were."""
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    version = trainer.version
    with pytest.raises(CaptureViolation) as refused:
        trainer.train_step(groups, **options)

    assert trainer.version == version
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    return refused.value


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"input_ids": [1, 9999, 3, 4]}, CaptureFault.UNKNOWN_IDS),
        ({"input_ids": [1, 2, 3]}, CaptureFault.MISSING_TOKENS),
        ({"logprobs": [0, 0, -1, np.nan]}, CaptureFault.IMPOSSIBLE_LOGPROBS),
        ({"raw_logprobs": [0, 0, -1, 0.5]}, CaptureFault.IMPOSSIBLE_LOGPROBS),
        ({"versions": [-1, -1, 0, -1]}, CaptureFault.WRONG_VERSION),
        ({"versions": [-1, -1, 0, 1]}, CaptureFault.WRONG_VERSION),
    ],
)
def test_impossible_rows_are_refused_by_name(make_model, make_group, make_row, change, kind):
    """A single token is enough; session and numbers are named, and the row is kept."""
    honest = make_row([1, 2, 3, 4], [0, 0, 1, 1], reward=1.0)
    violation = refusal(PolicyTrainer(make_model(), PLAIN), [make_group([honest, evolve(honest, **change)])])

    assert violation.kind == kind
    assert "session s" in str(violation)
    assert [record["kind"] for record in violation.evidence] == [kind]


def test_answers_without_tokens_are_refused(make_model, make_agent_group):
    """An engine gives one at least, if only to end the answer."""
    group = make_agent_group(0)
    first, *rest = group.episodes
    empty = evolve(group, episodes=(evolve(first, num_turns=2, num_empty_turns=1), *rest))

    assert refusal(PolicyTrainer(make_model(), PLAIN), [empty]).kind == CaptureFault.EMPTY_CAPTURE


def test_rows_older_than_allowed_are_refused(make_model, make_agent_group):
    """Staleness was bounded before; what came through all the same does not reach the weights."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    trainer.version = 3

    assert refusal(trainer, [make_agent_group(0)], max_staleness=2).kind == CaptureFault.TOO_STALE
    assert trainer.train_step([make_agent_group(0)], max_staleness=3).version == 4


@pytest.mark.parametrize("settings", [{}, {"num_minibatches": 2, "num_epochs": 2}, {"temperature": 0.7}])
def test_rows_must_recompute_under_the_weights_that_sampled_them(make_model, make_agent_group, make_group, settings):
    """A fraction of them may not; of older weights none needs to."""
    trainer = PolicyTrainer(make_model(), evolve(PLAIN, capture=CaptureConfig(max_bad_fraction=0.5), **settings))
    groups = [make_agent_group(seed) for seed in range(3)]

    def spoilt(num_wrong):
        return [sampled(trainer, group, make_group, num_wrong=num_wrong) for group in groups]

    violation = refusal(trainer, spoilt(3))
    assert violation.kind == CaptureFault.UNEXPLAINED_LOGPROBS
    assert "9 of 12 rows" in str(violation)
    assert len(violation.evidence) == 9
    assert trainer.train_step(spoilt(2)).version == 1
    assert trainer.train_step(spoilt(4)).version == 2


def test_copies_of_one_answer_are_one_bad_answer(make_model, make_row, make_group):
    """A rounding error of one answer stops no step because eight members of a group gave that answer."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    mask = [0, 0, 1, 1]
    others = [make_row([1, 2, 3, 4 + number], mask, reward=1.0) for number in range(10)]
    group = make_group([*(make_row([5, 6, 7, 8], mask, reward=0.0) for _ in range(8)), *others])

    assert trainer.train_step([sampled(trainer, group, make_group, num_wrong=8)]).version == 1
    assert "9 of 18 rows" in str(refusal(trainer, [sampled(trainer, group, make_group, num_wrong=9, version=1)]))


def test_clip_is_around_what_the_trainer_computes(make_model, make_agent_group, make_group):
    """Tokens that a grammar forced were sampled with probability 1: with the weights unchanged, none is clipped."""
    config = evolve(PLAIN, objective=ObjectiveConfig(surrogate=Surrogate.PPO))
    trainer = PolicyTrainer(make_model(), config)
    group = sampled(trainer, make_agent_group(0), make_group)
    rows = [
        evolve(episode.trajectories[0], logprobs=episode.trajectories[0].logprobs * 0) for episode in group.episodes
    ]

    assert trainer.train_step([make_group(rows)]).clip_fraction == 0


def test_rows_of_restored_sessions_are_not_computed_again(make_model, make_agent_group, make_group):
    """Other weights of the same number may have sampled them; what cannot be true of any weights is refused still."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    group = sampled(trainer, make_agent_group(0), make_group, num_wrong=4)
    restored = evolve(group, episodes=tuple(evolve(episode, is_restored=True) for episode in group.episodes))
    newer = evolve(
        restored.episodes[0],
        trajectories=tuple(evolve(row, versions=row.versions + 5) for row in restored.episodes[0].trajectories),
    )

    assert refusal(trainer, [group]).kind == CaptureFault.UNEXPLAINED_LOGPROBS
    assert refusal(trainer, [evolve(restored, episodes=(newer,))]).kind == CaptureFault.WRONG_VERSION
    assert trainer.train_step([restored]).version == 1


@pytest.mark.parametrize("settings", [{}, {"objective": ObjectiveConfig(is_decoupled=False)}])
def test_unknown_plain_logprobs_are_not_held_against_a_row(make_model, make_agent_group, make_group, settings):
    """An engine that does not know one says NaN; the others of the row are compared all the same."""
    trainer = PolicyTrainer(make_model(), evolve(PLAIN, **settings))
    group = sampled(trainer, make_agent_group(0), make_group)
    rows = [episode.trajectories[0] for episode in group.episodes]
    first = [np.flatnonzero(row.loss_mask)[:1] for row in rows]
    unknown = [
        np.where(np.arange(len(row.input_ids)) == at, np.nan, row.raw_logprobs)
        for row, at in zip(rows, first, strict=True)
    ]
    partly = [evolve(row, raw_logprobs=raw) for row, raw in zip(rows, unknown, strict=True)]
    wrong = [evolve(row, raw_logprobs=raw - (raw < 0)) for row, raw in zip(rows, unknown, strict=True)]
    wholly = [evolve(row, raw_logprobs=np.where(row.loss_mask == 1, np.nan, 0)) for row in rows]

    assert refusal(trainer, [make_group(wrong)]).kind == CaptureFault.UNEXPLAINED_LOGPROBS
    assert np.isfinite(trainer.train_step([make_group(partly)]).loss)
    assert np.isfinite(trainer.train_step([make_group([evolve(row, versions=row.versions) for row in wholly])]).loss)
