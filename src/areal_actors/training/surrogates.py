"""Policy losses per token, and the weight that corrects for rows sampled by older policies.

Three policies meet in an asynchronous run: *behaviour* sampled the token, *proximal* are the weights before the update,
and the policy itself is being changed. Decoupled PPO (arXiv:2110.00641, used for asynchronous training in
arXiv:2505.24298) clips around the proximal policy and corrects for the behaviour policy by importance sampling::

    loss_t = - w_t · min(u_t A_t, clip(u_t, 1 - ε_low, 1 + ε_high) A_t)
    u_t    = π(t) / π_proximal(t)              w_t = bounded(π_proximal(t) / π_behaviour(t))
"""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from areal_actors.training.config import BehaviourConfig, Level, OutOfRange
from areal_actors.training.terms import Terms, sequence_mean, sequence_sum

__all__ = ["BehaviourCorrection", "ClippedRatio", "ClippedSequenceRatio", "PolicyLoss", "Reinforce", "SurrogateLoss"]

_MAX_EXPONENT = 20.0
"""Bound on the exponent of a ratio: e^20 is far beyond any clip, and still a float32 number after it was squared."""


@frozen(kw_only=True)
class PolicyLoss:
    """Losses [n], and whether the clip stopped each token's gradient (bool [n])."""

    losses: Tensor = field(eq=False)
    is_clipped: Tensor = field(eq=False)


class SurrogateLoss(Protocol):
    """A policy loss per token."""

    def __call__(self, logprobs: Tensor, terms: Terms) -> PolicyLoss:
        """Losses of tokens with log-probabilities ``logprobs`` [n] (with gradient) under the policy."""
        ...


@frozen(kw_only=True)
class ClippedRatio:
    """PPO, arXiv:1707.06347; with ``clip_high`` above ``clip_low`` the clip-higher of DAPO, arXiv:2503.14476.

    ``loss_t = -min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t)`` with u_t the token's ratio to the proximal
    policy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __call__(self, logprobs: Tensor, terms: Terms) -> PolicyLoss:
        """See the class."""
        ratio = bounded_exp(logprobs - terms.proximal)
        return _clipped(ratio, terms.advantages, low=1 - self.clip_low, high=1 + self.clip_high)


@frozen(kw_only=True)
class ClippedSequenceRatio:
    """GSPO, arXiv:2507.18071: one ratio per row, the geometric mean of its tokens' ratios.

    ``u = exp(mean_t(log π(t) - log π_proximal(t)))``, clipped as in PPO. Clip ranges are some hundred times smaller
    than those of token ratios. With ``sequence_mean`` aggregation this is the published objective.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, logprobs: Tensor, terms: Terms) -> PolicyLoss:
        """See the class."""
        ratio = bounded_exp(sequence_mean(logprobs - terms.proximal, terms))
        return _clipped(ratio, terms.advantages, low=1 - self.clip_low, high=1 + self.clip_high)


@frozen(kw_only=True)
class Reinforce:
    """The plain policy gradient: ``loss_t = -A_t log π(t)``, no ratio and no clip."""

    def __call__(self, logprobs: Tensor, terms: Terms) -> PolicyLoss:
        """See the class."""
        losses = -terms.advantages * logprobs
        return PolicyLoss(losses=losses, is_clipped=torch.zeros_like(losses, dtype=torch.bool))


@frozen(kw_only=True)
class BehaviourCorrection:
    """Bounded importance weights proximal/behaviour: truncated (clamp) or masked importance sampling.

    Per token ``w_t = exp(log π_proximal(t) - log π_behaviour(t))``; at the level of sequences the product over the
    row's tokens. ``clamp`` moves weights into [floor, cap]; ``mask`` sets those outside to 0.
    """

    bounds: BehaviourConfig = field(factory=BehaviourConfig)

    def raw(self, terms: Terms) -> Tensor:
        """Weights [n] before the bounds."""
        log_weights = terms.proximal - terms.behaviour
        if self.bounds.level is Level.SEQUENCE:
            log_weights = sequence_sum(log_weights, terms)
        return bounded_exp(log_weights)

    def __call__(self, terms: Terms) -> Tensor:
        """Weights [n], bounded."""
        weights, bounds = self.raw(terms), self.bounds
        if bounds.out_of_range is OutOfRange.CLAMP:
            return weights.clamp(bounds.floor, bounds.cap)
        return weights * ((weights >= bounds.floor) & (weights <= bounds.cap))


def bounded_exp(exponent: Tensor) -> Tensor:
    """``exp`` of a difference of log-probabilities, never infinite."""
    return exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()


def _clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> PolicyLoss:
    free, held = ratio * advantages, ratio.clamp(low, high) * advantages
    return PolicyLoss(losses=-torch.minimum(free, held), is_clipped=(held < free).detach())
