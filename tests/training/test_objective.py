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
    ROUNDING_NATS,
    BehaviourConfig,
    Centre,
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
from areal_actors.training.surrogates import (
    BehaviourCorrection,
    ClippedRatio,
    ClippedWeight,
    LossInputs,
    ProbabilityRegion,
    Reinforce,
    estimate_kl,
)

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
    [
        ProbabilityRegion(clip_low=0.05, clip_high=0.1),
        ClippedRatio(clip_low=0.2, clip_high=0.28),
        ClippedRatio(clip_low=0.2, clip_high=0.28, dual_clip=1.5),
        ClippedRatio(clip_low=0.1, clip_high=0.15, level=Level.SEQUENCE),
        ClippedRatio(clip_low=0.1, clip_high=0.15, dual_clip=1.2, level=Level.SEQUENCE),
        ClippedWeight(clip_low=0.3, clip_high=0.2),
        Reinforce(),
    ]
)


def random_terms(seed, row_lengths, *, spread=0.5, reference=True):
    """Log-probabilities of three policies near each other, advantages of both signs, and shares that sum to 1."""
    rng = np.random.default_rng(seed)
    count = sum(row_lengths)
    logprobs = -rng.uniform(0.1, 4, count)

    def near():
        return torch.tensor(logprobs + rng.normal(0, spread, count), dtype=torch.float64)

    weights = rng.random(count)
    inputs = LossInputs(
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
    return scores, inputs


def members(inputs, t):
    """The tokens of the row that token t belongs to."""
    return [s for s in range(len(inputs.rows)) if inputs.rows[s] == inputs.rows[t]]


def slow_policy_loss(surrogate, logprobs, inputs, t):
    """The loss of token t from the published formula."""
    advantage = float(inputs.advantages[t])
    if isinstance(surrogate, Reinforce):
        return -advantage * logprobs[t]
    if isinstance(surrogate, ProbabilityRegion):
        moved = math.exp(logprobs[t]) - math.exp(float(inputs.plain[t]))
        is_beyond = moved > surrogate.clip_high if advantage > 0 else -moved > surrogate.clip_low
        return 0.0 if is_beyond else -math.exp(logprobs[t] - float(inputs.proximal[t])) * advantage
    if isinstance(surrogate, ClippedWeight):
        ratio = math.exp(logprobs[t] - float(inputs.proximal[t]))
        return -min(max(ratio, 1 - surrogate.clip_low), 1 + surrogate.clip_high) * advantage * logprobs[t]
    if isinstance(surrogate, ClippedRatio) and surrogate.level is Level.SEQUENCE:
        row = members(inputs, t)
        ratio = math.exp(sum(logprobs[s] - float(inputs.proximal[s]) for s in row) / len(row))
    else:
        ratio = math.exp(logprobs[t] - float(inputs.proximal[t]))
    clipped = min(max(ratio, 1 - surrogate.clip_low), 1 + surrogate.clip_high)
    gain = min(ratio * advantage, clipped * advantage)
    if surrogate.dual_clip is not None and advantage < 0:
        gain = max(gain, surrogate.dual_clip * advantage)
    return -gain


def slow_importance(bounds, inputs, t):
    """The bounded weight of token t."""
    row = members(inputs, t) if bounds.level is Level.SEQUENCE else [t]
    weight = math.exp(sum(float(inputs.proximal[s] - inputs.behaviour[s]) for s in row))
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
def test_loss_equals_the_slow_reference(seed, row_lengths, surrogate, bounds, penalties):
    """Every combination of surrogate, correction, reference penalty and entropy, token by token."""
    kl, estimator, entropy = penalties
    scores, inputs = random_terms(seed, row_lengths)
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
        importance = 1.0 if bounds is None else slow_importance(bounds, inputs, t)
        loss = slow_policy_loss(surrogate, logprobs, inputs, t) * importance
        ratio = min(math.exp(logprobs[t] - float(inputs.behaviour[t])), 5.0 if bounds is None else bounds.cap)
        distance = slow_kl(estimator, logprobs[t] - float(inputs.reference[t]))
        loss += kl * distance * ratio - entropy * entropies[t]
        expected += float(inputs.weights[t]) * loss

    assert objective(scores, inputs).loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(seed=seeds, row_lengths=lengths, surrogate=surrogates, bounds=corrections)
def test_no_advantage_no_policy_gradient(seed, row_lengths, surrogate, bounds):
    """Where nothing was better or worse than expected, nothing is learned."""
    scores, inputs = random_terms(seed, row_lengths)
    inputs = evolve(inputs, advantages=torch.zeros_like(inputs.advantages))
    objective = PolicyObjective(surrogate=surrogate, correction=bounds and BehaviourCorrection(bounds=bounds))

    (gradient,) = torch.autograd.grad(objective(scores, inputs).loss, scores.logprobs)

    assert not gradient.any()


@given(seed=seeds, row_lengths=lengths)
@pytest.mark.parametrize("surrogate", [ProbabilityRegion(), ClippedRatio(), ClippedWeight(), Reinforce()])
def test_first_on_policy_gradient_is_reinforce(seed, row_lengths, surrogate):
    """Where all policies are one, the ratio is 1, nothing is clipped and the gradient is -weight · advantage."""
    scores, inputs = random_terms(seed, row_lengths)
    now = scores.logprobs.detach()
    inputs = evolve(inputs, proximal=now, behaviour=now, plain=now)

    result = PolicyObjective(surrogate=surrogate)(scores, inputs)
    (gradient,) = torch.autograd.grad(result.loss, scores.logprobs)

    assert torch.allclose(gradient, -inputs.weights * inputs.advantages)
    assert result.sums.num_clipped == 0
    assert result.sums.importance == pytest.approx(len(now))
    assert result.sums.approximate_kl == pytest.approx(0)


@given(seed=seeds, row_lengths=lengths)
def test_gradient_of_gspo_on_policy_is_the_row_mean(seed, row_lengths):
    """One ratio per row: every token of a row gets the mean of what its tokens would get under PPO."""
    scores, inputs = random_terms(seed, row_lengths)
    inputs = evolve(inputs, proximal=scores.logprobs.detach(), behaviour=scores.logprobs.detach())

    loss = PolicyObjective(surrogate=ClippedRatio(clip_low=3e-4, clip_high=4e-4, level=Level.SEQUENCE))(
        scores, inputs
    ).loss
    (gradient,) = torch.autograd.grad(loss, scores.logprobs)

    pull = -inputs.weights * inputs.advantages
    expected = [float(pull[members(inputs, t)].mean()) for t in range(len(pull))]
    assert gradient.tolist() == pytest.approx(expected)


@given(seed=seeds, row_lengths=lengths, surrogate=surrogates, bounds=corrections)
def test_rows_may_come_in_any_order_and_in_parts(seed, row_lengths, surrogate, bounds):
    """The loss of all rows is the sum of the losses of each row alone; sums add up likewise."""
    scores, inputs = random_terms(seed, row_lengths)
    objective = PolicyObjective(surrogate=surrogate, correction=bounds and BehaviourCorrection(bounds=bounds))
    whole = objective(scores, inputs)

    parts = [objective(*only_row(scores, inputs, row)) for row in reversed(range(len(row_lengths)))]

    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    total = TokenSums()
    for part in parts:
        total = total + part.sums
    assert total.num_tokens == whole.sums.num_tokens
    assert total.num_clipped == whole.sums.num_clipped
    assert total.entropy == pytest.approx(whole.sums.entropy)
    assert total.importance_max == pytest.approx(whole.sums.importance_max)
    assert total.behaviour_gap_max == pytest.approx(whole.sums.behaviour_gap_max)


def only_row(scores, inputs, row):
    """The tokens of one row as a pass of their own."""
    chosen = inputs.rows == row
    kept = {
        name: getattr(inputs, name)[chosen] for name in ("advantages", "weights", "behaviour", "proximal", "reference")
    }
    rows = torch.zeros(int(chosen.sum()), dtype=torch.int64)
    return (
        TokenScores(
            logprobs=scores.logprobs[chosen],
            entropies=scores.entropies[chosen],
            raw_logprobs=scores.raw_logprobs[chosen],
        ),
        LossInputs(**kept, rows=rows, num_rows=1),
    )


@given(seed=seeds, row_lengths=lengths, bounds=corrections.filter(lambda bounds: bounds is not None))
def test_importance_weights_stay_in_their_bounds(seed, row_lengths, bounds):
    """Clamped weights are within [floor, cap]; masked ones are within it or 0."""
    _, inputs = random_terms(seed, row_lengths, spread=2.0)

    weights = BehaviourCorrection(bounds=bounds)(inputs)

    is_inside = (weights >= bounds.floor) & (weights <= bounds.cap)
    assert bool((is_inside | (weights == 0)).all())
    assert bounds.out_of_range is OutOfRange.MASK or bool(is_inside.all())


def test_absurd_rows_stay_finite():
    """Log-probabilities that are hundreds apart give a finite loss and gradient."""
    scores, inputs = random_terms(0, [2, 2])
    inputs = evolve(
        inputs, behaviour=inputs.behaviour - 500, proximal=inputs.proximal + 500, reference=inputs.reference + 500
    )
    objective = PolicyObjective(kl_coefficient=0.1)

    result = objective(scores, inputs)
    (gradient,) = torch.autograd.grad(result.loss, scores.logprobs)

    assert bool(torch.isfinite(result.loss))
    assert bool(torch.isfinite(gradient).all())


def test_penalty_in_the_reward_is_not_in_the_loss():
    """It would be paid twice."""
    kl = KlConfig(coefficient=0.1, place=KlPlace.REWARD)

    objective = create_objective(ObjectiveConfig(surrogate=Surrogate.PPO, kl=kl, is_decoupled=False))

    assert objective.kl_coefficient == 0
    assert objective.correction is None
    assert not objective.needs_every_row


# ------------------------------------------------------------------------------------------------ trust region


def one_token(*, policy, behaviour, advantage, plain=None):
    """A pass of one token with these probabilities under the policy and when it was sampled."""
    logprobs = torch.tensor([math.log(policy)], dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([math.log(behaviour)], dtype=torch.float64)
    inputs = LossInputs(
        advantages=torch.tensor([advantage], dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        behaviour=sampled,
        proximal=logprobs.detach(),
        plain=sampled if plain is None else torch.tensor([math.log(plain)], dtype=torch.float64),
        rows=torch.zeros(1, dtype=torch.int64),
        num_rows=1,
    )
    return TokenScores(logprobs=logprobs, entropies=torch.zeros(1), raw_logprobs=logprobs.detach()), inputs


@pytest.mark.parametrize(
    ("policy", "behaviour", "advantage", "flows"),
    [
        (0.95, 0.4, +1.0, False),  # likelier already, and to become likelier still
        (0.95, 0.4, -1.0, True),  # comes back
        (0.25, 0.5, -1.0, False),
        (0.25, 0.5, +1.0, True),
        (0.89, 0.4, +1.0, True),  # within the bound
        (0.31, 0.5, -1.0, True),
        (0.02, 0.001, +1.0, True),  # a ratio of 20, and nothing moved
    ],
)
def test_stale_token_beyond_the_region_has_no_gradient_outwards(policy, behaviour, advantage, flows):
    """The default masks by the sign of the advantage; what flows has the bounded importance weight."""
    scores, inputs = one_token(policy=policy, behaviour=behaviour, advantage=advantage)

    result = create_objective(ObjectiveConfig())(scores, inputs)
    (gradient,) = torch.autograd.grad(result.loss, scores.logprobs)

    expected = -advantage * min(policy / behaviour, 5.0) if flows else 0.0
    assert gradient.item() == pytest.approx(expected)
    assert result.sums.num_clipped == (not flows)


def test_forced_token_is_measured_where_the_trainer_computes():
    """A grammar made it certain; under the plain softmax it has not moved, so it is not masked."""
    scores, inputs = one_token(policy=0.3, behaviour=1.0, advantage=-1.0, plain=0.3)

    assert create_objective(ObjectiveConfig())(scores, inputs).sums.num_clipped == 0


@pytest.mark.parametrize("surrogate", [Surrogate.PPO, Surrogate.GSPO])
def test_dual_clip_bounds_an_absurd_token(surrogate):
    """Behaviour found the token absurd, and it was bad: without the dual clip its ratio is its gradient."""
    gradients = {}
    for dual_clip in (None, 3.0):
        scores, inputs = one_token(policy=0.5, behaviour=math.exp(-12), advantage=-1.0)
        inputs = evolve(inputs, proximal=inputs.behaviour)
        objective = create_objective(ObjectiveConfig(surrogate=surrogate, dual_clip=dual_clip))
        (gradients[dual_clip],) = torch.autograd.grad(objective(scores, inputs).loss, scores.logprobs)

    assert gradients[None].item() > 80_000
    assert gradients[3.0].item() == 0


@pytest.mark.parametrize(
    ("surrogate", "is_decoupled", "num_updates", "centre", "is_weighted"),
    [
        (Surrogate.DPPO, None, 4, Centre.POLICY, True),
        (Surrogate.PPO, None, 1, Centre.BEHAVIOUR, False),
        (Surrogate.PPO, None, 4, Centre.PROXIMAL, True),
        (Surrogate.PPO, True, 1, Centre.PROXIMAL, True),
        (Surrogate.PPO, False, 4, Centre.BEHAVIOUR, False),
        (Surrogate.GSPO, None, 4, Centre.PROXIMAL, True),
        (Surrogate.CISPO, None, 4, Centre.BEHAVIOUR, False),
        (Surrogate.REINFORCE, None, 1, Centre.POLICY, True),
        (Surrogate.REINFORCE, False, 1, Centre.POLICY, False),
    ],
)
def test_clip_is_around_a_policy_that_differs(surrogate, is_decoupled, num_updates, centre, is_weighted):
    """With one update, the weights before it are the policy itself: only behaviour can be the centre."""
    config = ObjectiveConfig(surrogate=surrogate, is_decoupled=is_decoupled)

    assert config.resolve_centre(num_updates) is centre
    assert (create_objective(config, num_updates=num_updates).correction is not None) == is_weighted


@pytest.mark.parametrize(
    ("settings", "dtype", "centre"),
    [
        ({"surrogate": Surrogate.GSPO}, "bfloat16", Centre.PROXIMAL),
        ({"surrogate": Surrogate.GSPO}, "float32", Centre.BEHAVIOUR),
        ({"surrogate": Surrogate.GSPO, "clip_low": 0.1, "clip_high": 0.1}, "bfloat16", Centre.BEHAVIOUR),
        ({"surrogate": Surrogate.GSPO, "is_decoupled": False}, "bfloat16", Centre.BEHAVIOUR),
        ({"surrogate": Surrogate.PPO}, "bfloat16", Centre.BEHAVIOUR),
        ({"surrogate": Surrogate.PPO, "clip_low": 0.02}, "bfloat16", Centre.PROXIMAL),
        ({"surrogate": Surrogate.CISPO}, "bfloat16", Centre.BEHAVIOUR),
        ({"surrogate": Surrogate.CISPO, "clip_high": 0.01}, "bfloat16", Centre.PROXIMAL),
        ({"surrogate": Surrogate.PPO, "clip_low": 1e-6}, "float32", Centre.PROXIMAL),
    ],
)
def test_clip_within_rounding_is_around_the_weights_before_the_update(settings, dtype, centre):
    """Rounding alone would leave a clip around the policy that sampled; what is set explicitly is taken."""
    config = ObjectiveConfig(**settings)

    assert config.resolve_centre(1, rounding=ROUNDING_NATS[dtype]) is centre


# -------------------------------------------------------------------------------- distances by exact enumeration


def softmaxes(seed, *, num_tokens=6, spread=0.7):
    """Logits of a policy (with gradient), and log-probabilities of a reference and of a behaviour policy near it."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=num_tokens), requires_grad=True)
    near = [torch.tensor(logits.detach().numpy() + rng.normal(0, spread, num_tokens)).log_softmax(0) for _ in range(2)]
    return logits, *near


def enumerated(values, probabilities):
    """The expectation over all tokens."""
    return (values * probabilities).sum()


def terms_of(logprobs, *, behaviour, reference, advantages=None, weights=None):
    """Every token of the vocabulary once, as a row of its own, with its probability as its share."""
    size = len(logprobs)
    zeros = torch.zeros(size, dtype=torch.float64)
    return LossInputs(
        advantages=zeros if advantages is None else advantages,
        weights=behaviour.exp() if weights is None else weights,
        behaviour=behaviour,
        proximal=logprobs.detach(),
        reference=reference,
        rows=torch.arange(size),
        num_rows=size,
    )


def scores_of(logprobs):
    """Scores without entropies."""
    return TokenScores(logprobs=logprobs, entropies=torch.zeros_like(logprobs), raw_logprobs=logprobs.detach())


@pytest.mark.parametrize("estimator", list(KlEstimator))
@given(seed=seeds)
def test_distance_in_the_loss_pulls_by_its_own_gradient(estimator, seed):
    """By enumeration under a stale behaviour policy: the expected gradient is that of KL(policy || reference)."""
    logits, reference, behaviour = softmaxes(seed, spread=0.3)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad(enumerated(logprobs - reference, logprobs.exp()), logits, retain_graph=True)
    objective = PolicyObjective(
        kl_coefficient=1.0, kl_estimator=estimator, correction=BehaviourCorrection(bounds=BehaviourConfig(cap=100.0))
    )

    loss = objective(scores_of(logprobs), terms_of(logprobs, behaviour=behaviour, reference=reference)).loss
    (found,) = torch.autograd.grad(loss, logits)

    assert torch.allclose(found, true, atol=1e-9)


@given(seed=seeds)
def test_only_k1_in_the_reward_pulls(seed):
    """By enumeration, on-policy: the pull of k1 is the true gradient; that of k3 is the difference of two distances."""
    logits, reference, _ = softmaxes(seed)
    logprobs = logits.log_softmax(0)
    now = logprobs.detach()
    (true,) = torch.autograd.grad(enumerated(logprobs - reference, logprobs.exp()), logits, retain_graph=True)
    (other,) = torch.autograd.grad(-enumerated(logprobs, reference.exp()), logits, retain_graph=True)
    pulls = {}
    for estimator in KlEstimator:
        costs = estimate_kl(now, reference, estimator)
        inputs = terms_of(logprobs, behaviour=now, reference=None, advantages=-costs)
        loss = PolicyObjective()(scores_of(logprobs), inputs).loss
        (pulls[estimator],) = torch.autograd.grad(loss, logits, retain_graph=True)

    assert torch.allclose(pulls[KlEstimator.K1], true, atol=1e-9)
    assert torch.allclose(pulls[KlEstimator.K3], true - other, atol=1e-9)


@given(seed=seeds)
def test_kl_of_the_metrics_is_the_distance_of_the_sampler(seed):
    """By enumeration: what behaviour sampled gives KL(behaviour || policy), and KL(policy || reference)."""
    logits, reference, behaviour = softmaxes(seed, spread=0.3)
    logprobs = logits.detach().log_softmax(0)
    kl = reference_kl = 0.0
    for token in range(len(logprobs)):
        only = slice(token, token + 1)
        inputs = terms_of(logprobs[only], behaviour=behaviour[only], reference=reference[only])
        objective = PolicyObjective(correction=BehaviourCorrection(bounds=BehaviourConfig(cap=100.0)))
        sums = objective(scores_of(logprobs[only]), inputs).sums
        kl += sums.approximate_kl * float(behaviour[token].exp())
        reference_kl += sums.reference_kl * float(behaviour[token].exp())

    assert kl == pytest.approx(float(enumerated(behaviour - logprobs, behaviour.exp())), abs=1e-6)
    assert reference_kl == pytest.approx(float(enumerated(logprobs - reference, logprobs.exp())), abs=1e-6)


def test_forced_tokens_are_in_no_distance():
    """Their log-probability is of another function; the other tokens are counted as without them."""
    scores, inputs = random_terms(0, [3, 2])
    is_plain = torch.tensor([True, False, True, True, True])
    forced = torch.where(is_plain, inputs.behaviour, torch.zeros(5, dtype=torch.float64))
    kept = evolve(inputs, plain=inputs.behaviour)

    found = PolicyObjective()(scores, evolve(kept, behaviour=forced, is_plain=is_plain)).sums

    difference = scores.logprobs.detach() - inputs.behaviour
    expected = (difference.exp() - 1 - difference)[is_plain]
    assert found.num_plain == 4
    assert found.approximate_kl == pytest.approx(float(expected.sum()))
    assert found.behaviour_gap_max == pytest.approx(float(difference.abs()[is_plain].max()))
