"""Penalties: distance to the reference model, in the loss or in the reward, and overlong episodes.

The length penalty creates new groups before advantages are computed; it changes no group in place. The distance in the
reward is subtracted from the advantages after they were normalised: divided by the standard deviation of a group, it
would have unit variance in a group of equal rewards, whatever its coefficient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from areal_actors.domain import Floats, Group, Trajectory, as_floats
from areal_actors.training.config import KlEstimator, OverlongConfig

__all__ = ["estimate_kl", "kl_costs", "overlong_penalty", "penalise_overlong"]

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
