"""What one training step reports: plain numbers, ready for metrics files and displays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from areal_actors.domain import Group
from areal_actors.training.batch import TrainingRow
from areal_actors.training.objective import TokenSums

__all__ = ["DataStatistics", "StepStatistics", "describe_data"]


@frozen(kw_only=True)
class DataStatistics:
    """What a step was given. Staleness is the trainer's version minus that of the weights that sampled a trained token.

    ``num_tokens`` counts the tokens of all rows; ``num_trained_tokens`` those with a loss.
    """

    num_groups: int = 0
    num_zero_variance_groups: int = 0
    num_episodes: int = 0
    num_failed_episodes: int = 0
    num_rejected_episodes: int = 0
    """Those of the failed ones that their workflow threw away on purpose."""
    num_rows: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    reward_mean: float = 0.0
    advantage_mean: float = 0.0
    advantage_std: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0


@frozen(kw_only=True)
class StepStatistics:
    """What a step did. ``version`` is that of the weights after it.

    ``loss``, ``grad_norm`` are means over its updates; the rest are means over the tokens that were computed (nan if
    none was). ``approximate_kl`` is the k3 estimate between behaviour and policy, ``reference_kl`` that between
    reference and policy. ``importance`` is the weight proximal/behaviour before its bounds. ``behaviour_gap`` is |log
    π - log π_behaviour|. ``num_packed_tokens`` counts the tokens of all forward passes with gradient, without
    padding.
    """

    version: int
    data: DataStatistics
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    approximate_kl: float
    reference_kl: float
    clip_fraction: float
    importance_mean: float
    importance_max: float
    out_of_range_fraction: float
    behaviour_gap_mean: float
    behaviour_gap_max: float
    num_updates: int
    num_skipped_rows: int
    num_packed_tokens: int
    seconds: float

    @classmethod
    def create(
        cls,
        sums: TokenSums,
        *,
        version: int,
        data: DataStatistics,
        losses: Sequence[float],
        grad_norms: Sequence[float],
        learning_rate: float,
        num_skipped_rows: int,
        num_packed_tokens: int,
        seconds: float,
    ) -> StepStatistics:
        """The statistics of a step from its sums."""
        num_tokens = sums.num_tokens or float("nan")
        return cls(
            version=version,
            data=data,
            loss=float(np.mean(losses)) if losses else 0.0,
            grad_norm=float(np.mean(grad_norms)) if grad_norms else 0.0,
            learning_rate=learning_rate,
            entropy=sums.entropy / num_tokens,
            approximate_kl=sums.approximate_kl / num_tokens,
            reference_kl=sums.reference_kl / num_tokens,
            clip_fraction=sums.num_clipped / num_tokens,
            importance_mean=sums.importance / num_tokens,
            importance_max=sums.importance_max,
            out_of_range_fraction=sums.num_out_of_range / num_tokens,
            behaviour_gap_mean=sums.behaviour_gap / num_tokens,
            behaviour_gap_max=sums.behaviour_gap_max,
            num_updates=len(losses),
            num_skipped_rows=num_skipped_rows,
            num_packed_tokens=num_packed_tokens,
            seconds=seconds,
        )


def describe_data(
    groups: Sequence[Group], rows: Sequence[TrainingRow], *, version: int, num_zero_variance_groups: int
) -> DataStatistics:
    """Count and average what a step was given, under the trainer's ``version`` before it."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.failure is None]
    advantages = _gather([row.advantages[row.positions] for row in rows])
    ages = version - _gather([row.trajectory.versions[row.positions] for row in rows])
    return DataStatistics(
        num_groups=len(groups),
        num_zero_variance_groups=num_zero_variance_groups,
        num_episodes=len(episodes),
        num_failed_episodes=len(episodes) - len(rewards),
        num_rejected_episodes=sum(episode.is_rejected for episode in episodes),
        num_rows=len(rows),
        num_tokens=sum(row.trajectory.num_tokens for row in rows),
        num_trained_tokens=len(advantages),
        reward_mean=float(np.mean(rewards)) if rewards else 0.0,
        advantage_mean=float(advantages.mean()) if len(advantages) else 0.0,
        advantage_std=float(advantages.std()) if len(advantages) else 0.0,
        staleness_mean=float(ages.mean()) if len(ages) else 0.0,
        staleness_max=int(ages.max()) if len(ages) else 0,
    )


def _gather(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *arrays])
