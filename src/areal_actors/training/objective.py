"""The objective: policy loss, behaviour correction, distance to the reference and entropy, weighted by token.

``Objective`` is the protocol that the trainer calls; ``PolicyObjective`` is the built-in implementation, composed of
the parts in ``surrogates.py`` and ``penalties.py``. An objective is pure: log-probabilities in, a loss and sums of
statistics out. ``LikelihoodObjective`` and ``DistillationObjective`` imitate: they raise the likelihood of given
answers, and follow the reverse KL divergence to a teacher.
"""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import asdict, evolve, field, frozen
from torch import Tensor

from areal_actors.domain import Floats, Trajectory
from areal_actors.errors import ExportError
from areal_actors.lib.references import load_function
from areal_actors.training.config import KlEstimator, KlPlace, ObjectiveConfig, Surrogate
from areal_actors.training.custom import CustomSurrogate
from areal_actors.training.forward import TokenScores
from areal_actors.training.phases import Phase, PhaseName
from areal_actors.training.surrogates import (
    BehaviourCorrection,
    LossInputs,
    ProbabilityRegion,
    SurrogateLoss,
    bounded_exp,
    create_surrogate,
    estimate_kl,
)

MAXIMA = ("importance_max", "behaviour_gap_max")
"""Fields of ``TokenSums`` that combine by maximum instead of sum."""


@frozen(kw_only=True)
class TokenSums:
    """Sums over tokens, which add up over passes; ``importance_max`` and ``behaviour_gap_max`` combine by maximum.

    ``behaviour_gap`` is |log π - log π_behaviour|: before the first update of on-policy rows it is the engine's error.
    It and the KL sums cover the ``num_plain`` tokens that were sampled from the distribution that the trainer computes.
    The log-probabilities of other tokens, such as those that a grammar forced, belong to another distribution.
    ``teacher_kl`` is the sum of log π/teacher over the ``num_taught`` tokens that a teacher scored.
    """

    num_tokens: int = 0
    num_plain: float = 0.0
    num_clipped: float = 0.0
    entropy: float = 0.0
    approximate_kl: float = 0.0
    reference_kl: float = 0.0
    importance: float = 0.0
    importance_max: float = 0.0
    num_out_of_range: float = 0.0
    behaviour_gap: float = 0.0
    behaviour_gap_max: float = 0.0
    teacher_kl: float = 0.0
    num_taught: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        pairs = {name: (value, getattr(other, name)) for name, value in asdict(self).items()}
        return TokenSums(**{name: max(pair) if name in MAXIMA else sum(pair) for name, pair in pairs.items()})


@frozen(kw_only=True)
class ObjectiveLoss:
    """A pass's part of the loss (a scalar with gradient; the parts of an update add up) and its statistics."""

    loss: Tensor = field(eq=False)
    sums: TokenSums


class Objective(Protocol):
    """A loss to minimise."""

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without any advantage still have a gradient."""
        ...

    def __call__(self, scores: TokenScores, inputs: LossInputs) -> ObjectiveLoss:
        """Return the loss of the tokens of one pass; ``scores`` (with gradient) and ``inputs`` have the same order."""
        ...


@frozen(kw_only=True)
class PolicyObjective:
    """Implements ``Σ_t weight_t · (w_t · policy_loss_t + kl_coefficient · KL_t - entropy_coefficient · H_t)``.

    ``correction`` gives w_t; without it w_t is 1. The reference term applies if ``inputs`` carry a reference.
    """

    surrogate: SurrogateLoss = field(factory=ProbabilityRegion)
    correction: BehaviourCorrection | None = field(factory=BehaviourCorrection)
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coefficient: float = 0.0

    @property
    def needs_every_row(self) -> bool:
        """Whether a custom surrogate, the distance or the entropy gives rows without advantage a gradient."""
        is_custom = isinstance(self.surrogate, CustomSurrogate)  # may have a gradient where the advantage is 0
        return is_custom or bool(self.kl_coefficient or self.entropy_coefficient)

    def __call__(self, scores: TokenScores, inputs: LossInputs) -> ObjectiveLoss:
        """Return the weighted sum of the losses of the tokens, and their statistics."""
        policy = self.surrogate(scores.logprobs, inputs)
        losses = policy.losses if self.correction is None else policy.losses * self.correction(inputs)
        if self.kl_coefficient and inputs.reference is not None:
            distances = estimate_kl(scores.logprobs, inputs.reference, self.kl_estimator)
            # With the ratio r = π/π_behaviour, r k1 and r k3 are in expectation KL(π || reference), so the gradient
            # also goes through r: on-policy, that of k3 is then log(π/reference) ∇log π, and without r it would be that
            # of KL(reference || π). k2 alone already has the right gradient, so r is a constant there.
            ratio = self._bounded_ratio(scores.logprobs, inputs)
            if self.kl_estimator is not KlEstimator.K2:
                ratio = ratio * bounded_exp(scores.logprobs - scores.logprobs.detach())
            losses = losses + self.kl_coefficient * ratio * distances
        if self.entropy_coefficient:
            losses = losses - self.entropy_coefficient * scores.entropies
        return ObjectiveLoss(loss=(losses * inputs.weights).sum(), sums=self._sums(scores, inputs, policy.is_clipped))

    def _bounded_ratio(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """Return the ratios [n] policy/behaviour up to the cap, without a gradient."""
        bounds = (self.correction or BehaviourCorrection()).bounds
        return bounded_exp(logprobs.detach() - inputs.behaviour).clamp(max=bounds.cap)

    @torch.no_grad()
    def _sums(self, scores: TokenScores, inputs: LossInputs, is_clipped: Tensor) -> TokenSums:
        if not len(inputs.weights):
            return TokenSums()
        logprobs, is_plain = scores.logprobs.detach(), inputs.is_plain
        correction = self.correction or BehaviourCorrection()
        # Without a correction the ratio to the behaviour policy is part of the surrogate, and that ratio is reported.
        importance = correction.raw(inputs if self.correction else evolve(inputs, proximal=logprobs))
        outside = (importance > correction.bounds.cap) | (importance < correction.bounds.floor)
        gap = ((logprobs - inputs.plain).abs() * is_plain).float()
        # KL(behaviour || policy) from tokens that behaviour sampled: r - 1 - log r with r = policy/behaviour.
        distance = estimate_kl(inputs.plain, logprobs, KlEstimator.K3) * is_plain
        totals = {
            "num_plain": is_plain.sum(),
            "num_clipped": is_clipped.sum(),
            "entropy": scores.entropies.sum(),
            "approximate_kl": distance.sum(),
            "importance": importance.sum(),
            "importance_max": importance.max(),
            "num_out_of_range": outside.sum(),
            "behaviour_gap": gap.sum(),
            "behaviour_gap_max": gap.max(),
        }
        if inputs.reference is not None:
            estimates = estimate_kl(logprobs, inputs.reference, KlEstimator.K3)
            totals["reference_kl"] = (self._bounded_ratio(logprobs, inputs) * estimates * is_plain).sum()
        # Read together: each number that is read by itself would wait for the device once more.
        values = torch.stack([total.double() for total in totals.values()]).tolist()
        return TokenSums(num_tokens=len(logprobs), **dict(zip(totals, values, strict=True)))


def create_objective(config: ObjectiveConfig, *, num_updates: int = 1, rounding: float = 0.0) -> PolicyObjective:
    """Return the objective that ``config`` describes, for steps of ``num_updates`` updates.

    ``rounding`` is that of engine and trainer; see ``resolve_centre``.
    """
    surrogate: SurrogateLoss
    if isinstance(config.surrogate, Surrogate):
        surrogate = create_surrogate(config, config.resolve_centre(num_updates, rounding=rounding))
    else:
        surrogate = CustomSurrogate(function=load_function(config.surrogate))
    is_weighted = config.is_weighted(num_updates, rounding=rounding)
    return PolicyObjective(
        surrogate=surrogate,
        correction=BehaviourCorrection(bounds=config.behaviour) if is_weighted else None,
        kl_coefficient=config.kl.coefficient if config.kl.place is KlPlace.LOSS else 0.0,
        kl_estimator=config.kl.resolve_estimator(),
        entropy_coefficient=config.entropy_coefficient,
    )


_MAX_NATS = 10.0
"""Bound on log teacher/student of one token. Teachers report -9999 or less for what they exclude, and a single such
token would be the whole gradient; at 10 nats the student is already 22,000 times too confident."""


@frozen(kw_only=True)
class LikelihoodObjective:
    """Implements ``Σ_t weight_t · A_t · -log π(t)``: with advantages of 1, the negative log-likelihood."""

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without any advantage still have a gradient: they do not."""
        return False

    def __call__(self, scores: TokenScores, inputs: LossInputs) -> ObjectiveLoss:
        """Return the weighted negative log-likelihood of the tokens.

        Nothing sampled these tokens, so there are no sums about a policy that did.
        """
        losses = -scores.logprobs * inputs.advantages
        sums = TokenSums(num_tokens=len(losses), entropy=float(scores.entropies.detach().sum()))
        return ObjectiveLoss(loss=(losses * inputs.weights).sum(), sums=sums)


@frozen(kw_only=True)
class DistillationObjective:
    """The policy gradient of the reverse KL divergence to a teacher, token by token, with rewards added.

    Token t of the student's own answers has the advantage ::

        A_t = reward_coefficient · A_t(rewards) + coefficient · (log teacher(t) - log π(t))

    whose expected gradient is that of ``-coefficient · KL(π || teacher)`` at this token (MiniLLM, arXiv:2306.08543;
    GKD, arXiv:2306.13649): each token is judged by itself, without a discount. The student's log-probabilities are
    those of the current weights and of the distribution that it sampled from; the teacher's those of its plain softmax.
    ``policy`` has the trust region, and the correction for rows of older weights.
    """

    policy: Objective
    coefficient: float = 1.0
    reward_coefficient: float = 0.0

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without any advantage still have a gradient: the teacher gives them one."""
        return True

    def __call__(self, scores: TokenScores, inputs: LossInputs) -> ObjectiveLoss:
        """Return the policy loss with the teacher's advantages, and the sum of the estimated divergence."""
        assert inputs.teacher is not None, "the trainer scores every row of a distillation phase"
        gaps = (inputs.teacher - scores.logprobs.detach()).clamp(-_MAX_NATS, _MAX_NATS)
        advantages = self.reward_coefficient * inputs.advantages + self.coefficient * gaps
        found = self.policy(scores, evolve(inputs, advantages=advantages))
        return evolve(found, sums=evolve(found.sums, teacher_kl=-float(gaps.sum()), num_taught=float(len(gaps))))


def create_phase_objective(phase: Phase, *, rounding: float = 0.0) -> Objective:
    """Return the objective of the steps of ``phase``; ``rounding`` is that of engine and trainer."""
    if phase.name is PhaseName.SFT:
        return LikelihoodObjective()
    num_updates = phase.config.num_epochs * phase.config.num_minibatches
    policy = create_objective(phase.config.objective, num_updates=num_updates, rounding=rounding)
    if phase.name is PhaseName.RL:
        return policy
    return DistillationObjective(
        policy=policy, coefficient=phase.teacher_coefficient, reward_coefficient=phase.reward_coefficient
    )


def required_scores(row: Trajectory) -> Floats:
    """Return the teacher's log-probabilities float32 [T] of a row. Raises ``ExportError`` if no teacher scored it."""
    if row.teacher_logprobs is None:
        raise ExportError(
            f"No teacher has scored a row of session {row.session}, and a distillation phase needs the scores of all "
            "rows; give the trainer a teacher, or rows with teacher_logprobs."
        )
    return row.teacher_logprobs
