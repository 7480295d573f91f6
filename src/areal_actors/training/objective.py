"""The objective: policy loss, behaviour correction, distance to the reference and entropy, by the tokens' weights.

``Objective`` is the protocol that the trainer calls; ``PolicyObjective`` is the house's own, made of the parts in
``surrogates.py`` and ``penalties.py``. An objective is pure: log-probabilities in, a loss and sums of statistics out.
"""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from areal_actors.training.config import KlEstimator, KlPlace, ObjectiveConfig, Surrogate
from areal_actors.training.custom import CustomSurrogate, load_surrogate
from areal_actors.training.forward import TokenScores
from areal_actors.training.penalties import estimate_kl
from areal_actors.training.surrogates import (
    BehaviourCorrection,
    ClippedRatio,
    ClippedSequenceRatio,
    Reinforce,
    SurrogateLoss,
)
from areal_actors.training.terms import Terms

__all__ = ["Objective", "ObjectiveLoss", "PolicyObjective", "TokenSums", "create_objective"]


@frozen(kw_only=True)
class TokenSums:
    """Sums over tokens, which add up over passes; ``importance_max`` and ``behaviour_gap_max`` combine by maximum.

    ``behaviour_gap`` is |log π - log π_behaviour|: before the first update of on-policy rows it is the engine's error.
    """

    num_tokens: int = 0
    num_clipped: float = 0.0
    entropy: float = 0.0
    approximate_kl: float = 0.0
    reference_kl: float = 0.0
    importance: float = 0.0
    importance_max: float = 0.0
    num_out_of_range: float = 0.0
    behaviour_gap: float = 0.0
    behaviour_gap_max: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(
            num_tokens=self.num_tokens + other.num_tokens,
            num_clipped=self.num_clipped + other.num_clipped,
            entropy=self.entropy + other.entropy,
            approximate_kl=self.approximate_kl + other.approximate_kl,
            reference_kl=self.reference_kl + other.reference_kl,
            importance=self.importance + other.importance,
            importance_max=max(self.importance_max, other.importance_max),
            num_out_of_range=self.num_out_of_range + other.num_out_of_range,
            behaviour_gap=self.behaviour_gap + other.behaviour_gap,
            behaviour_gap_max=max(self.behaviour_gap_max, other.behaviour_gap_max),
        )


@frozen(kw_only=True)
class ObjectiveLoss:
    """A pass's part of the loss (a scalar with gradient; the parts of an update add up) and its statistics."""

    loss: Tensor = field(eq=False)
    sums: TokenSums


class Objective(Protocol):
    """What is minimised."""

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without any advantage still have a gradient."""
        ...

    def __call__(self, scores: TokenScores, terms: Terms) -> ObjectiveLoss:
        """The loss of the tokens of one pass, which ``scores`` (with gradient) and ``terms`` describe alike."""
        ...


@frozen(kw_only=True)
class PolicyObjective:
    """``Σ_t weight_t · (w_t · policy_loss_t + kl_coefficient · KL_t - entropy_coefficient · H_t)``.

    ``correction`` gives w_t; without it w_t is 1. The reference term applies where ``terms`` carry a reference.
    """

    surrogate: SurrogateLoss = field(factory=ClippedRatio)
    correction: BehaviourCorrection | None = field(factory=BehaviourCorrection)
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coefficient: float = 0.0

    @property
    def needs_every_row(self) -> bool:
        """See ``Objective``."""
        is_custom = isinstance(self.surrogate, CustomSurrogate)  # may have a gradient where the advantage is 0
        return is_custom or bool(self.kl_coefficient or self.entropy_coefficient)

    def __call__(self, scores: TokenScores, terms: Terms) -> ObjectiveLoss:
        """See ``Objective``."""
        policy = self.surrogate(scores.logprobs, terms)
        losses = policy.losses if self.correction is None else policy.losses * self.correction(terms)
        if self.kl_coefficient and terms.reference is not None:
            losses = losses + self.kl_coefficient * estimate_kl(scores.logprobs, terms.reference, self.kl_estimator)
        if self.entropy_coefficient:
            losses = losses - self.entropy_coefficient * scores.entropies
        return ObjectiveLoss(loss=(losses * terms.weights).sum(), sums=self._sums(scores, terms, policy.is_clipped))

    @torch.no_grad()
    def _sums(self, scores: TokenScores, terms: Terms, is_clipped: Tensor) -> TokenSums:
        if not len(terms.weights):
            return TokenSums()
        logprobs = scores.logprobs.detach()
        correction = self.correction or BehaviourCorrection()
        importance, gap = correction.raw(terms), (logprobs - terms.behaviour).abs()
        outside = (importance > correction.bounds.cap) | (importance < correction.bounds.floor)
        reference = (
            0.0 if terms.reference is None else float(estimate_kl(logprobs, terms.reference, KlEstimator.K3).sum())
        )
        return TokenSums(
            num_tokens=len(logprobs),
            num_clipped=float(is_clipped.sum()),
            entropy=float(scores.entropies.sum()),
            approximate_kl=float(estimate_kl(logprobs, terms.behaviour, KlEstimator.K3).sum()),
            reference_kl=reference,
            importance=float(importance.sum()),
            importance_max=float(importance.max()),
            num_out_of_range=float(outside.sum()),
            behaviour_gap=float(gap.sum()),
            behaviour_gap_max=float(gap.max()),
        )


def create_objective(config: ObjectiveConfig) -> PolicyObjective:
    """The objective that ``config`` describes."""
    return PolicyObjective(
        surrogate=_create_surrogate(config),
        correction=BehaviourCorrection(bounds=config.behaviour) if config.is_decoupled else None,
        kl_coefficient=config.kl.coefficient if config.kl.place is KlPlace.LOSS else 0.0,
        kl_estimator=config.kl.estimator,
        entropy_coefficient=config.entropy_coefficient,
    )


def _create_surrogate(config: ObjectiveConfig) -> SurrogateLoss:
    match config.surrogate:
        case Surrogate.PPO:
            return ClippedRatio(clip_low=config.clip_low, clip_high=config.clip_high)
        case Surrogate.GSPO:
            return ClippedSequenceRatio(clip_low=config.clip_low, clip_high=config.clip_high)
        case Surrogate.REINFORCE:
            return Reinforce()
        case reference:
            return load_surrogate(reference)
