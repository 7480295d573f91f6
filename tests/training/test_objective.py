"""Objectives against per-token references in float64, and the laws that every policy objective obeys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.training.config import (
    BehaviourConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    Level,
    ObjectiveConfig,
    OutOfRange,
    Surrogate,
)
from areal_actors.training.forward import TokenScores
from areal_actors.training.objective import PolicyObjective, TokenSums, create_objective
from areal_actors.training.surrogates import BehaviourCorrection, ClippedRatio, ClippedSequenceRatio, Reinforce
from areal_actors.training.terms import Terms

lengths = st.lists(st.integers(1, 5), min_size=1, max_size=5)
seeds = st.integers(0, 10_000)
corrections = st.none() | st.builds(
    BehaviourConfig,
    level=st.sampled_from(Level),
    out_of_range=st.sampled_from(OutOfRange),
    cap=st.sampled_from([1.1, 2.0, 5.0]),
    floor=st.sampled_from([0.0, 0.8]),
)
surrogates = st.sampled_from(
    [ClippedRatio(clip_low=0.2, clip_high=0.28), ClippedSequenceRatio(clip_low=0.1, clip_high=0.15), Reinforce()]
)


def random_terms(seed, row_lengths, *, spread=0.5, reference=True):
    """Log-probabilities of three policies near each other, advantages of both signs, and shares that sum to 1."""
    rng = np.random.default_rng(seed)
    count = sum(row_lengths)
    logprobs = -rng.uniform(0.1, 4, count)

    def near():
        return torch.tensor(logprobs + rng.normal(0, spread, count), dtype=torch.float64)

    weights = rng.random(count)
    terms = Terms(
        advantages=torch.tensor(rng.normal(size=count)),
        weights=torch.tensor(weights / weights.sum()),
        behaviour=near(),
        proximal=near(),
        reference=near() if reference else None,
        rows=torch.tensor(np.repeat(np.arange(len(row_lengths)), row_lengths)),
        num_rows=len(row_lengths),
    )
    scores = TokenScores(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropies=torch.tensor(rng.random(count), requires_grad=True),
        raw_logprobs=torch.tensor(logprobs),
    )
    return scores, terms


def members(terms, t):
    """The tokens of the row that token t belongs to."""
    return [s for s in range(len(terms.rows)) if terms.rows[s] == terms.rows[t]]


def slow_policy_loss(surrogate, logprobs, terms, t):
    """The loss of token t from the published formula."""
    advantage = float(terms.advantages[t])
    if isinstance(surrogate, Reinforce):
        return -advantage * logprobs[t]
    if isinstance(surrogate, ClippedSequenceRatio):
        row = members(terms, t)
        ratio = math.exp(sum(logprobs[s] - float(terms.proximal[s]) for s in row) / len(row))
    else:
        ratio = math.exp(logprobs[t] - float(terms.proximal[t]))
    clipped = min(max(ratio, 1 - surrogate.clip_low), 1 + surrogate.clip_high)
    return -min(ratio * advantage, clipped * advantage)


def slow_importance(bounds, terms, t):
    """The bounded weight of token t."""
    row = members(terms, t) if bounds.level is Level.SEQUENCE else [t]
    weight = math.exp(sum(float(terms.proximal[s] - terms.behaviour[s]) for s in row))
    if bounds.out_of_range is OutOfRange.CLAMP:
        return min(max(weight, bounds.floor), bounds.cap)
    return weight if bounds.floor <= weight <= bounds.cap else 0.0


def slow_kl(estimator, difference):
    """The estimate from the log-ratio."""
    match estimator:
        case KlEstimator.K1:
            return difference
        case KlEstimator.K2:
            return difference**2 / 2
        case KlEstimator.K3:
            return math.exp(-difference) - 1 + difference


@given(
    seed=seeds,
    row_lengths=lengths,
    surrogate=surrogates,
    bounds=corrections,
    penalties=st.tuples(st.sampled_from([0.0, 0.3]), st.sampled_from(KlEstimator), st.sampled_from([0.0, 0.1])),
)
def test_the_loss_equals_the_slow_reference(seed, row_lengths, surrogate, bounds, penalties):
    """Every combination of surrogate, correction, reference penalty and entropy, token by token."""
    kl, estimator, entropy = penalties
    scores, terms = random_terms(seed, row_lengths)
    objective = PolicyObjective(
        surrogate=surrogate,
        correction=None if bounds is None else BehaviourCorrection(bounds=bounds),
        kl_coefficient=kl,
        kl_estimator=estimator,
        entropy_coefficient=entropy,
    )
    logprobs, entropies = scores.logprobs.tolist(), scores.entropies.tolist()
    expected = 0.0
    for t in range(len(logprobs)):
        importance = 1.0 if bounds is None else slow_importance(bounds, terms, t)
        loss = slow_policy_loss(surrogate, logprobs, terms, t) * importance
        loss += kl * slow_kl(estimator, logprobs[t] - float(terms.reference[t])) - entropy * entropies[t]
        expected += float(terms.weights[t]) * loss

    assert objective(scores, terms).loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(seed=seeds, row_lengths=lengths, surrogate=surrogates, bounds=corrections)
def test_no_advantage_no_policy_gradient(seed, row_lengths, surrogate, bounds):
    """Where nothing was better or worse than expected, nothing is learned."""
    scores, terms = random_terms(seed, row_lengths)
    terms = evolve(terms, advantages=torch.zeros_like(terms.advantages))
    objective = PolicyObjective(surrogate=surrogate, correction=bounds and BehaviourCorrection(bounds=bounds))

    (gradient,) = torch.autograd.grad(objective(scores, terms).loss, scores.logprobs)

    assert not gradient.any()


@given(seed=seeds, row_lengths=lengths)
@pytest.mark.parametrize("surrogate", [ClippedRatio(), Reinforce()])
def test_the_first_on_policy_gradient_is_reinforce(seed, row_lengths, surrogate):
    """Where all policies are one, the ratio is 1, nothing is clipped and the gradient is -weight · advantage."""
    scores, terms = random_terms(seed, row_lengths)
    now = scores.logprobs.detach()
    terms = evolve(terms, proximal=now, behaviour=now)

    result = PolicyObjective(surrogate=surrogate)(scores, terms)
    (gradient,) = torch.autograd.grad(result.loss, scores.logprobs)

    assert torch.allclose(gradient, -terms.weights * terms.advantages)
    assert result.sums.num_clipped == 0
    assert result.sums.importance == pytest.approx(len(now))
    assert result.sums.approximate_kl == pytest.approx(0)


@given(seed=seeds, row_lengths=lengths)
def test_the_gradient_of_gspo_on_policy_is_the_row_mean(seed, row_lengths):
    """One ratio per row: every token of a row gets the mean of what its tokens would get under PPO."""
    scores, terms = random_terms(seed, row_lengths)
    terms = evolve(terms, proximal=scores.logprobs.detach(), behaviour=scores.logprobs.detach())

    loss = PolicyObjective(surrogate=ClippedSequenceRatio())(scores, terms).loss
    (gradient,) = torch.autograd.grad(loss, scores.logprobs)

    pull = -terms.weights * terms.advantages
    expected = [float(pull[members(terms, t)].mean()) for t in range(len(pull))]
    assert gradient.tolist() == pytest.approx(expected)


@given(seed=seeds, row_lengths=lengths, surrogate=surrogates, bounds=corrections)
def test_rows_may_come_in_any_order_and_in_parts(seed, row_lengths, surrogate, bounds):
    """The loss of all rows is the sum of the losses of each row alone; sums add up likewise."""
    scores, terms = random_terms(seed, row_lengths)
    objective = PolicyObjective(surrogate=surrogate, correction=bounds and BehaviourCorrection(bounds=bounds))
    whole = objective(scores, terms)

    parts = [objective(*only_row(scores, terms, row)) for row in reversed(range(len(row_lengths)))]

    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    total = TokenSums()
    for part in parts:
        total = total + part.sums
    assert total.num_tokens == whole.sums.num_tokens
    assert total.num_clipped == whole.sums.num_clipped
    assert total.entropy == pytest.approx(whole.sums.entropy)
    assert total.importance_max == pytest.approx(whole.sums.importance_max)
    assert total.behaviour_gap_max == pytest.approx(whole.sums.behaviour_gap_max)


def only_row(scores, terms, row):
    """The tokens of one row as a pass of their own."""
    chosen = terms.rows == row
    kept = {
        name: getattr(terms, name)[chosen] for name in ("advantages", "weights", "behaviour", "proximal", "reference")
    }
    rows = torch.zeros(int(chosen.sum()), dtype=torch.int64)
    return (
        TokenScores(
            logprobs=scores.logprobs[chosen],
            entropies=scores.entropies[chosen],
            raw_logprobs=scores.raw_logprobs[chosen],
        ),
        Terms(**kept, rows=rows, num_rows=1),
    )


@given(seed=seeds, row_lengths=lengths, bounds=corrections.filter(lambda bounds: bounds is not None))
def test_importance_weights_stay_in_their_bounds(seed, row_lengths, bounds):
    """Clamped weights are within [floor, cap]; masked ones are within it or 0."""
    _, terms = random_terms(seed, row_lengths, spread=2.0)

    weights = BehaviourCorrection(bounds=bounds)(terms)

    is_inside = (weights >= bounds.floor) & (weights <= bounds.cap)
    assert bool((is_inside | (weights == 0)).all())
    assert bounds.out_of_range is OutOfRange.MASK or bool(is_inside.all())


def test_absurd_rows_stay_finite():
    """Log-probabilities that are hundreds apart give a finite loss and gradient."""
    scores, terms = random_terms(0, [2, 2])
    terms = evolve(
        terms, behaviour=terms.behaviour - 500, proximal=terms.proximal + 500, reference=terms.reference + 500
    )
    objective = PolicyObjective(kl_coefficient=0.1)

    result = objective(scores, terms)
    (gradient,) = torch.autograd.grad(result.loss, scores.logprobs)

    assert bool(torch.isfinite(result.loss))
    assert bool(torch.isfinite(gradient).all())


@given(seed=seeds, row_lengths=lengths)
def test_k3_is_never_negative(seed, row_lengths):
    """The estimator of GRPO is a distance for every sample."""
    scores, terms = random_terms(seed, row_lengths, spread=3.0)

    assert PolicyObjective()(scores, terms).sums.reference_kl >= 0


@pytest.mark.parametrize(
    ("surrogate", "kind"),
    [(Surrogate.PPO, ClippedRatio), (Surrogate.GSPO, ClippedSequenceRatio), (Surrogate.REINFORCE, Reinforce)],
)
def test_a_configuration_names_its_parts(surrogate, kind):
    """Each name makes the class of that name, with its settings."""
    objective = create_objective(ObjectiveConfig(surrogate=surrogate, entropy_coefficient=0.5))

    assert isinstance(objective.surrogate, kind)
    assert objective.needs_every_row


def test_a_penalty_in_the_reward_is_not_in_the_loss():
    """It would be paid twice."""
    kl = KlConfig(coefficient=0.1, place=KlPlace.REWARD)

    objective = create_objective(ObjectiveConfig(kl=kl, is_decoupled=False))

    assert objective.kl_coefficient == 0
    assert objective.correction is None
    assert not objective.needs_every_row
