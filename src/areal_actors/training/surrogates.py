"""Policy losses and penalties per token, and the weight that corrects for rows sampled by older policies.

An asynchronous run has three policies: *behaviour* sampled the token, *proximal* is the policy before the update, and
the policy itself is being updated. With u_t the ratio to the centre (``Centre``) and w_t the importance weight of
the centre::

    u_t = π(t) / π_centre(t)              w_t = bounded(π_centre(t) / π_behaviour(t))

    dppo       centre: the policy itself.   loss_t = - m_t w_t u_t A_t, m_t = 0 where π(t) left the trust region around
                                            π_behaviour(t) on the side that A_t pushes to
    ppo, gspo  centre: behaviour.           loss_t = - min(u_t A_t, clip(u_t) A_t), no less than - c A_t for A_t < 0
    ppo, gspo  decoupled: proximal.         loss_t = - w_t min(u_t A_t, clip(u_t) A_t)
    cispo      centre: behaviour.           loss_t = - clip(u_t) A_t log π(t), clip(u_t) without a gradient
    reinforce  centre: the policy itself.   loss_t = - w_t A_t log π(t)

Decoupled PPO (arXiv:2110.00641, used for asynchronous training in arXiv:2505.24298) separates the centre of the clip
from the policy that sampled. Its trust region is that of one step's updates: with a single update the centre is the
policy itself, and the clip has no effect, however old the rows are.

Everything is flat: one entry per trained token of a forward pass. A row is never split over passes, so sums over the
tokens of a row are complete.

Penalties keep the policy near a reference, in the loss or in the reward, and episodes short. The length penalty creates
new groups before advantages are computed; it changes no group in place. The distance in the reward is subtracted from
the advantages after they were normalised: divided by the standard deviation of a group, it would have unit variance in
a group of equal rewards, whatever its coefficient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from areal_actors.domain import Floats, Group, Trajectory, as_floats
from areal_actors.training.config import (
    BehaviourConfig,
    Centre,
    KlEstimator,
    Level,
    ObjectiveConfig,
    OutOfRange,
    OverlongConfig,
    Surrogate,
)

_MAX_EXPONENT = 20.0
"""Bound on the exponent of a ratio: e^20 is far beyond any clip, and its square is still a float32 number."""


@frozen(kw_only=True)
class LossInputs:
    """Tensors [n] over the trained tokens of one pass.

    ``advantages``, ``weights`` (share in the loss), ``behaviour`` (log-probabilities when sampled), ``proximal`` (those
    that ratios are taken to; see ``Centre``), ``reference`` (those of the frozen model, if there is one) and
    ``teacher`` (those of the teacher's plain softmax, if there is one) are float32; ``rows`` int64 numbers each token's
    row from 0 to ``num_rows`` - 1. None of them carries a gradient.

    ``plain`` float32 holds the sampler's log-probabilities under the distribution that the trainer computes, and
    ``is_plain`` bool says whether ``behaviour`` belongs to that distribution, which it does not for tokens that a
    grammar forced.
    """

    advantages: Tensor = field(eq=False)
    weights: Tensor = field(eq=False)
    behaviour: Tensor = field(eq=False)
    proximal: Tensor = field(eq=False)
    reference: Tensor | None = field(default=None, eq=False)
    teacher: Tensor | None = field(default=None, eq=False)
    rows: Tensor = field(eq=False)
    num_rows: int
    plain: Tensor = field(default=Factory(lambda self: self.behaviour, takes_self=True), eq=False)
    is_plain: Tensor = field(
        default=Factory(lambda self: torch.ones_like(self.behaviour, dtype=torch.bool), takes_self=True), eq=False
    )


@frozen(kw_only=True)
class PolicyLoss:
    """Losses [n], and whether a clip or mask acted on each token (bool [n]).

    All but the clip of cispo stop its gradient.
    """

    losses: Tensor = field(eq=False)
    is_clipped: Tensor = field(eq=False)


class SurrogateLoss(Protocol):
    """A policy loss per token."""

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> PolicyLoss:
        """Return the losses of tokens with log-probabilities ``logprobs`` [n] (with gradient) under the policy."""
        ...


@frozen(kw_only=True)
class ProbabilityRegion:
    """DPPO with the binary total variation, arXiv:2602.04879: a trust region in differences of probabilities.

    A token has no gradient if its advantage would move its probability further away from that of the behaviour policy,
    and it is already more than the bound away: ``A_t > 0`` and ``π(t) - π_behaviour(t) > clip_high``, or ``A_t < 0``
    and ``π_behaviour(t) - π(t) > clip_low``. Updates that would bring it back keep their gradient.

    The ratio is not used, because it is an estimate from one sample, far too strict for rare tokens (from 0.001 to
    0.002 is a ratio of 2 and moves almost no probability) and lax for likely ones (from 0.99 to 0.8). Rounding in
    bfloat16 moves log-probabilities by 0.05 to 0.07, so a ratio clip of 0.2 masks correct tokens of fresh rows; their
    probabilities move by less than 0.07.

    The upper bound is wider because rows that are four versions old, in a job whose policy changes completely within
    six updates, learn as fast with it as without a bound (mean reward over 25 steps 0.78 and 0.79), and slower with 0.2
    (0.71). The lower bound costs nothing there, and pushing down the tokens of bad rows is what makes training diverge.
    """

    clip_low: float = 0.2
    clip_high: float = 0.5

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> PolicyLoss:
        """Return the losses, masked outside the trust region."""
        moved = logprobs.detach().exp() - inputs.plain.exp()
        is_masked = ((inputs.advantages > 0) & (moved > self.clip_high)) | (
            (inputs.advantages < 0) & (moved < -self.clip_low)
        )
        ratio = bounded_exp(logprobs - inputs.proximal)
        return PolicyLoss(losses=(-ratio * inputs.advantages).masked_fill(is_masked, 0.0), is_clipped=is_masked)


@frozen(kw_only=True)
class ClippedRatio:
    """PPO, arXiv:1707.06347; with ``clip_high`` above ``clip_low`` the clip-higher of DAPO, arXiv:2503.14476.

    ``loss_t = -min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t)`` with u_t the token's ratio to the centre.
    With ``dual_clip`` c (arXiv:1912.09729) the loss of a negative advantage is at most ``-c A_t``, without a gradient
    beyond: a single token that was extremely unlikely under the behaviour policy does not outweigh all others.

    At the level of sequences it is GSPO, arXiv:2507.18071: one ratio per row, the geometric mean of its tokens' ratios,
    whose clip ranges are hundreds of times smaller. With ``sequence_mean`` aggregation it is the published objective.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    level: Level = Level.TOKEN

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> PolicyLoss:
        """Return the clipped losses."""
        log_ratio = logprobs - inputs.proximal
        ratio = bounded_exp(sequence_mean(log_ratio, inputs) if self.level is Level.SEQUENCE else log_ratio)
        free, held = ratio * inputs.advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        gains, is_clipped = torch.minimum(free, held), held < free
        if self.dual_clip is not None:
            is_absurd = (inputs.advantages < 0) & (ratio > self.dual_clip)
            gains, is_clipped = (
                torch.where(is_absurd, self.dual_clip * inputs.advantages, gains),
                is_clipped | is_absurd,
            )
        return PolicyLoss(losses=-gains, is_clipped=is_clipped.detach())


@frozen(kw_only=True)
class ClippedWeight:
    """CISPO, arXiv:2506.13585: ``loss_t = -clip(u_t, 1 - clip_low, 1 + clip_high) A_t log π(t)``.

    The clipped ratio has no gradient, so every token keeps that of its log-probability, also over several updates.
    The paper sets no lower bound (``clip_low`` 1), and says of the upper one only that it is tuned.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> PolicyLoss:
        """Return the losses, weighted by the clipped ratios."""
        ratio = bounded_exp(logprobs.detach() - inputs.proximal)
        weights = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return PolicyLoss(losses=-weights * inputs.advantages * logprobs, is_clipped=weights != ratio)


@frozen(kw_only=True)
class Reinforce:
    """The plain policy gradient: ``loss_t = -A_t log π(t)``, without ratio or clip."""

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> PolicyLoss:
        """Return the losses; none is clipped."""
        losses = -inputs.advantages * logprobs
        return PolicyLoss(losses=losses, is_clipped=torch.zeros_like(losses, dtype=torch.bool))


@frozen(kw_only=True)
class BehaviourCorrection:
    """Bounded importance weights centre/behaviour: truncated (clamp) or masked importance sampling.

    Per token ``w_t = exp(log π_centre(t) - log π_behaviour(t))``; at the level of sequences the product over the
    row's tokens. ``clamp`` moves weights into [floor, cap]; ``mask`` sets those outside to 0.
    """

    bounds: BehaviourConfig = field(factory=BehaviourConfig)

    def raw(self, inputs: LossInputs) -> Tensor:
        """Return the weights [n] before the bounds."""
        log_weights = inputs.proximal - inputs.behaviour
        if self.bounds.level is Level.SEQUENCE:
            log_weights = sequence_sum(log_weights, inputs)
        return bounded_exp(log_weights)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return the bounded weights [n]."""
        weights, bounds = self.raw(inputs), self.bounds
        if bounds.out_of_range is OutOfRange.CLAMP:
            return weights.clamp(bounds.floor, bounds.cap)
        return weights * ((weights >= bounds.floor) & (weights <= bounds.cap))


def bounded_exp(exponent: Tensor) -> Tensor:
    """Return ``exp`` of a difference of log-probabilities, never infinite."""
    return exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()


def sequence_sum(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return the sum of ``values`` [n] over each token's row, at each token: [n]."""
    totals = values.new_zeros(inputs.num_rows).index_add(0, inputs.rows, values)
    return totals.index_select(0, inputs.rows)


def sequence_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return the mean of ``values`` [n] over each token's row, at each token: [n]."""
    return sequence_sum(values, inputs) / sequence_sum(values.new_ones(len(values)), inputs)


def create_surrogate(config: ObjectiveConfig, centre: Centre) -> SurrogateLoss:
    """Return the built-in policy loss that ``config`` names, with ratios to ``centre``. A new one is a case here."""
    low, high = config.resolve_clip()
    # Around the weights before the update, no token is so unlikely that it needs the second bound.
    dual_clip = config.dual_clip if centre is Centre.BEHAVIOUR else None
    match Surrogate(config.surrogate):
        case Surrogate.DPPO:
            return ProbabilityRegion(clip_low=low, clip_high=high)
        case Surrogate.PPO:
            return ClippedRatio(clip_low=low, clip_high=high, dual_clip=dual_clip)
        case Surrogate.GSPO:
            return ClippedRatio(clip_low=low, clip_high=high, dual_clip=dual_clip, level=Level.SEQUENCE)
        case Surrogate.CISPO:
            return ClippedWeight(clip_low=low, clip_high=high)
        case Surrogate.REINFORCE:
            return Reinforce()


_MAX_DIFFERENCE = 20.0
"""Bound on a log-ratio within k3, whose exponential would otherwise overflow on a single extreme token."""


def estimate_kl(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Return estimates [n] of KL(policy || reference) from tokens that the policy sampled.

    With d = log π - log π_reference::

    k1 = d                      unbiased, of high variance; in the loss its expected gradient is 0
    k2 = d² / 2                 its gradient is that of the KL; biased as a value
    k3 = exp(-d) - 1 + d        unbiased, never negative; used by GRPO (arXiv:2402.03300)

    In the reward, only k1 has the gradient of the KL: that of k3 there is grad KL(policy || reference) minus
    grad KL(reference || policy), which vanish together near the reference.
    """
    difference = logprobs - reference
    match estimator:
        case KlEstimator.K1:
            return difference
        case KlEstimator.K2:
            return difference.square() / 2
        case KlEstimator.K3:
            bounded = difference.clamp(-_MAX_DIFFERENCE, _MAX_DIFFERENCE)
            return torch.exp(-bounded) - 1 + bounded


def kl_costs(row: Trajectory, estimates: Floats, *, coefficient: float) -> Floats:
    """Return the cost to each trained token of ``row`` of the distance to the reference, float32 [T], 0 off the mask.

    ``estimates`` are KL estimates [T]. A token is charged for its own estimate and for those that follow in its row,
    which it influences.
    """
    paid = coefficient * estimates.astype(np.float64) * (row.loss_mask == 1)
    # Cumulative sum from the end: each token is charged for its own estimate and all later ones.
    return as_floats(paid[::-1].cumsum()[::-1] * (row.loss_mask == 1))


def penalise_overlong(groups: Sequence[Group], config: OverlongConfig) -> tuple[Group, ...]:
    """Return groups whose long episodes have lower rewards and returns; unchanged groups if the penalty is off."""
    if config.max_tokens is None:
        return tuple(groups)
    result = []
    for group in groups:
        episodes = []
        for episode in group.episodes:
            penalty = overlong_penalty(sum(row.num_trained_tokens for row in episode.trajectories), config)
            rows = []
            for row in episode.trajectories:
                is_trained = row.loss_mask == 1
                own = penalty if is_trained.any() else 0.0
                rows.append(evolve(row, returns=as_floats(row.returns + penalty * is_trained), reward=row.reward + own))
            episodes.append(evolve(episode, trajectories=tuple(rows), reward=episode.reward + penalty))
        result.append(evolve(group, episodes=tuple(episodes)))
    return tuple(result)


def overlong_penalty(num_tokens: int, config: OverlongConfig) -> float:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476), at most 0 and at least ``-scale``."""
    if config.max_tokens is None:
        return 0.0
    excess = num_tokens - (config.max_tokens - config.buffer_tokens)
    return -config.scale * min(max(excess / config.buffer_tokens, 0.0), 1.0)
