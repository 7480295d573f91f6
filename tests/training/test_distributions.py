"""Each token is scored under the distribution it was sampled from: against a slow reference, in all layouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors.domain import InteractionId, Sampling, SamplingDistribution, SessionId, Trajectory, TurnInfo
from areal_actors.errors import ExportError
from areal_actors.generation.torch.sampler import RowSampling, sample
from areal_actors.testing.strategies import sampling_distributions
from areal_actors.training import forward
from areal_actors.training.batch import TrainingRow
from areal_actors.training.config import ComputeDtype, Layout, ObjectiveConfig, OptimizerConfig, TrainerConfig
from areal_actors.training.distributions import Distributions
from areal_actors.training.forward import score_tokens
from areal_actors.training.trainer import PolicyTrainer

PLAIN = TrainerConfig(dtype=ComputeDtype.FLOAT32, optimizer=OptimizerConfig(max_grad_norm=None, learning_rate=1e-3))
SETTINGS = st.tuples(
    st.sampled_from([0.3, 0.7, 1.0, 1.3]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0, 1, 3, 5, 99]),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)


def kept_ids(logits, top_p, top_k, min_p):
    """What one token's truncation keeps, one candidate after the other, in float64."""
    total = sum(math.exp(x) for x in logits)
    ranked = sorted(range(len(logits)), key=lambda index: -logits[index])
    if top_k:
        ranked = ranked[:top_k]
    probabilities = {index: math.exp(logits[index]) / total for index in ranked}
    mass, kept, seen = (sum(probabilities.values()) if top_k else 1.0), [], 0.0
    for index in ranked:
        if top_p < 1 and seen >= top_p * mass and kept:
            break
        kept.append(index)
        seen += probabilities[index]
    return [index for index in kept if probabilities[index] >= min_p * probabilities[ranked[0]]]


def reference(logits, targets, table):
    """Log-probabilities, entropies and who is outside, token by token; differentiable, in float64."""
    logprobs, entropies, outside = [], [], []
    for row, target, (temperature, top_p, top_k, min_p) in zip(logits, targets.tolist(), table, strict=True):
        divided = row / temperature
        kept = kept_ids(divided.detach().tolist(), top_p, int(top_k), min_p)
        outside.append(target not in kept)
        whole = divided if outside[-1] else divided[sorted(kept)]
        scores = whole.log_softmax(-1)
        logprobs.append((divided[target] - whole.logsumexp(-1))[None])
        entropies.append(-(scores.exp() * scores).sum()[None])
    return torch.cat(logprobs), torch.cat(entropies), outside


@given(
    seed=st.integers(0, 1000),
    table=st.lists(SETTINGS, min_size=1, max_size=40),
    has_bias=st.booleans(),
    uses_entropy=st.booleans(),
)
@settings(deadline=None)
def test_scores_and_gradients_equal_the_slow_reference(seed, table, has_bias, uses_entropy):
    """Any mixture of temperature, top-p, top-k and min-p in one pass of several chunks."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(table), 6, generator=generator, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator, requires_grad=True) if has_bias else None
    targets = torch.randint(0, 11, (len(table),), generator=generator)
    factors = torch.randn(2, len(table), generator=generator)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]

    found = score_tokens(hidden, weight, bias, targets, distributions=Distributions(settings=np.array(table)))
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logprobs, entropies, outside = reference(logits, targets, table)

    def gradients(first, second):
        loss = (first * factors[0]).sum() + uses_entropy * (second * factors[1]).sum()
        return torch.autograd.grad(loss, inputs)

    assert outside == found.is_outside.tolist()
    assert torch.allclose(found.logprobs.double(), logprobs, atol=1e-4)
    assert torch.allclose(found.entropies.double(), entropies, atol=1e-4)
    plain = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    assert torch.allclose(found.raw_logprobs.double(), plain, atol=1e-4)
    for ours, theirs in zip(gradients(found.logprobs, found.entropies), gradients(logprobs, entropies), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-3)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks, however few tokens there are."""
    monkeypatch.setattr(forward, "_CHUNK_BYTES", 4 * 61 * 16)


@given(seed=st.integers(0, 1000), settings_of=sampling_distributions(), vocab=st.sampled_from([30, 3000]))
@settings(deadline=None)
def test_trainer_computes_what_the_engine_reports(seed, settings_of, vocab):
    """Any setting, a vocabulary beyond the candidates that truncation looks at first, and the engine's own sampler."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab, generator=generator) * 3
    asked = evolve(settings_of, is_adjusted=False, logprobs_follow_truncation=True)
    rows = [_row_sampling(asked, uniform) for uniform in torch.rand(4, generator=generator).tolist()]
    drawn = sample(logits, rows)
    row = _row([0, 1, 1, 1, 1], [asked])

    found = score_tokens(
        logits,
        torch.eye(vocab),
        None,
        torch.tensor(drawn.token_ids),
        distributions=Distributions.create(row, range(1, 5), temperature=1.0),
    )

    assert not found.is_outside.any()
    assert torch.allclose(found.logprobs, torch.tensor(drawn.logprobs), atol=1e-4)
    assert torch.allclose(found.raw_logprobs, torch.tensor(drawn.raw_logprobs), atol=1e-4)


def _row_sampling(asked, uniform):
    sampling = Sampling(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, min_p=asked.min_p)
    return RowSampling(sampling=sampling, uniform=uniform, prompt=np.zeros(0), output=np.zeros(0))


def _row(mask, samplings, turns=None):
    trained = np.array(mask)
    return Trajectory(
        session=SessionId("s"),
        interactions=tuple(InteractionId(f"{index}") for index in range(len(samplings))),
        input_ids=np.arange(len(mask)),
        loss_mask=trained,
        logprobs=-1.0 * trained,
        versions=trained - 1,
        returns=trained,
        turns=trained - 1 if turns is None else turns,
        reward=1.0,
        turn_infos=tuple(TurnInfo(sampling=sampling) for sampling in samplings),
    )


def mixed(group, samplings):
    """The group with two turns of different settings in each row, two more for each further row."""
    asked = iter(samplings)
    episodes = []
    for episode in group.episodes:
        (row,) = episode.trajectories
        infos = tuple(TurnInfo(sampling=next(asked)) for _ in row.interactions)
        episodes.append(evolve(episode, trajectories=(evolve(row, turn_infos=infos),)))
    return evolve(group, episodes=tuple(episodes))


@given(
    samplings=st.lists(st.none() | sampling_distributions(), min_size=8, max_size=8),
    layout=st.sampled_from([Layout.FLAT, Layout.TREE]),
)
@settings(max_examples=25, deadline=None)
def test_each_token_of_a_packed_tree_has_its_own_settings(make_model, make_agent_group, samplings, layout):
    """Rows with shared prefixes and different settings; turns that do not say have the trainer's temperature."""
    trainer = PolicyTrainer(make_model(), evolve(PLAIN, layout=layout, temperature=0.7, max_packed_tokens=40))
    rows = [episode.trajectories[0] for episode in mixed(make_agent_group(3), samplings).episodes]

    found = trainer.logprobs(rows)

    for row, values in zip(rows, found, strict=True):
        ids = torch.tensor(np.array(row.input_ids), dtype=torch.long)
        with torch.no_grad():
            logits = trainer.model(input_ids=ids[None]).logits[0].double()
        places = np.flatnonzero(row.loss_mask)
        table = [_expected(row.turn_infos[row.turns[t]].sampling) for t in places]
        logprobs, _, _ = reference(logits[places - 1], ids[places], table)
        np.testing.assert_allclose(values[places], logprobs.numpy(), atol=1e-4)


def _expected(sampling):
    """What the documentation promises."""
    if sampling is None:
        return (0.7, 1.0, 0, 0.0)
    if sampling.temperature == 0:
        return (1.0, 1.0, 0, 0.0)
    if sampling.is_adjusted or not sampling.logprobs_follow_truncation:
        return (sampling.temperature, 1.0, 0, 0.0)
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def test_greedy_tokens_are_context_and_are_counted(make_model, make_agent_group):
    """Nothing was drawn there: the other turns train as if the greedy ones were part of the prompt."""
    greedy, free = SamplingDistribution(temperature=0.0), SamplingDistribution()
    group = mixed(make_agent_group(0), [greedy, free] * 4)
    masked = evolve(
        group,
        episodes=tuple(
            evolve(episode, trajectories=tuple(evolve(row, loss_mask=row.turns == 1) for row in episode.trajectories))
            for episode in mixed(make_agent_group(0), [free] * 8).episodes
        ),
    )
    trainers = [PolicyTrainer(make_model(), PLAIN) for _ in range(2)]
    found, expected = (trainer.train_step([each]) for trainer, each in zip(trainers, (group, masked), strict=True))

    num_greedy = sum(int((row.turns == 0).sum()) for e in group.episodes for row in e.trajectories)
    assert num_greedy == found.data.num_greedy_tokens
    assert expected.loss == pytest.approx(found.loss, abs=1e-7)
    assert expected.data.num_trained_tokens == found.data.num_trained_tokens
    for ours, theirs in zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_step_of_greedy_tokens_alone_changes_nothing(make_model, make_agent_group):
    """There is nothing to train, and the metrics say why."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    before = [p.clone() for p in trainer.model.parameters()]
    found = trainer.train_step([mixed(make_agent_group(0), [SamplingDistribution(temperature=0.0)] * 8)])

    assert 0 == found.data.num_trained_tokens < found.data.num_greedy_tokens
    assert all(map(torch.equal, before, trainer.model.parameters()))


@pytest.mark.parametrize("sampling", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}])
def test_settings_that_nothing_samples_with_are_refused_by_name(sampling):
    """Before anything is computed."""
    row = _row([0, 1], [SamplingDistribution(**sampling)])
    with pytest.raises(ExportError, match="session s was sampled with temperature"):
        TrainingRow(trajectory=row, advantages=np.ones(2))
    with pytest.raises(ExportError, match="not turn 1"):
        TrainingRow(trajectory=evolve(row, turns=[-1, 1]), advantages=np.ones(2))


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_ratios_of_fresh_rows_are_one_at_any_sampling_settings(make_model, make_agent_group, layout, is_decoupled):
    """Rows that these weights sampled at mixed settings: importance 1, no gap, nothing clipped."""
    config = evolve(PLAIN, layout=layout, objective=ObjectiveConfig(is_decoupled=is_decoupled))
    trainer = PolicyTrainer(make_model(), config)
    asked = [SamplingDistribution(temperature=t, top_k=k) for t in (0.3, 0.7, 1.0, 1.3) for k in (0, 60)]
    group = mixed(make_agent_group(1), asked)
    rows = [episode.trajectories[0] for episode in group.episodes]
    values = trainer.logprobs(rows)
    group = evolve(
        group,
        episodes=tuple(
            evolve(episode, trajectories=(evolve(row, logprobs=own),))
            for episode, row, own in zip(group.episodes, rows, values, strict=True)
        ),
    )

    found = trainer.train_step([group])

    assert found.importance_mean == pytest.approx(1.0, abs=1e-5)
    assert found.behaviour_gap_max < 1e-4
    assert 0 == found.clip_fraction
