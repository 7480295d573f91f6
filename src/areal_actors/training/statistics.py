"""The report of a training step: statistics as plain numbers, and with a ``RowRecorder`` the rows that it trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from areal_actors.domain import Episode, Floats, Group, TrainedRow
from areal_actors.training.batch import TrainingRow
from areal_actors.training.distributions import tokens_of
from areal_actors.training.objective import TokenSums


@frozen(kw_only=True)
class DataStatistics:
    """The statistics of the data that a step was given.

    Staleness is the trainer's version minus that of the weights that sampled a trained token. ``num_tokens`` counts the
    tokens of all rows; ``num_trained_tokens`` those with a loss.
    """

    num_zero_variance_groups: int = 0
    num_episodes: int = 0
    num_failed_episodes: int = 0
    num_rejected_episodes: int = 0
    """Failed episodes that their workflow rejected on purpose."""
    num_tokens: int = 0
    num_trained_tokens: int = 0
    reward_mean: float = 0.0
    """Mean reward of the episodes, as reported by their agents, before any penalty."""
    penalty_mean: float = 0.0
    """Mean over the episodes of all penalties: overlong, and the distance to the reference in the reward."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    temperature_mean: float = 1.0
    """Mean temperature of the trained tokens, as used to compute their log-probabilities."""
    num_greedy_tokens: int = 0
    """Tokens taken at temperature 0, which are not trained."""
    num_adjusted_tokens: int = 0
    """Trained tokens whose logits were changed by penalties, a bias or a grammar, which are not recomputed."""


@frozen(kw_only=True)
class UpdateStatistics:
    """The statistics of one update of a step."""

    loss: float
    sums: TokenSums
    num_outside: int
    grad_norm: float
    num_skipped_rows: int
    num_packed_tokens: int


@frozen(kw_only=True)
class StepStatistics:
    """The statistics of a step. ``version`` is that of the weights after it.

    ``loss`` and ``grad_norm`` are means over its updates; the rest are means over the tokens that were computed (nan if
    there were none). ``num_updates`` counts the updates that moved the weights: one without any gradient does not.
    ``approximate_kl`` estimates KL(behaviour || policy) by k3, ``reference_kl`` KL(policy || reference), ``teacher_kl``
    KL(policy || teacher) by k1. ``importance`` is the ratio to the behaviour policy before its bounds.
    ``behaviour_gap`` is |log π - log π_behaviour|. Distances and gap leave out tokens that were not sampled from the
    distribution that the trainer computes. ``outside_fraction`` is the share of tokens that truncation (top-k, top-p,
    min-p) would cut off under the current weights; they are scored before truncation. ``num_packed_tokens`` counts the
    tokens of all forward passes with gradient, without padding.
    """

    version: int
    data: DataStatistics
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    approximate_kl: float
    reference_kl: float
    teacher_kl: float
    clip_fraction: float
    importance_mean: float
    importance_max: float
    out_of_range_fraction: float
    behaviour_gap_mean: float
    behaviour_gap_max: float
    outside_fraction: float
    num_updates: int
    num_skipped_rows: int
    num_packed_tokens: int
    seconds: float
    custom: Mapping[str, float] = field(factory=dict)
    """The numbers returned by custom metrics."""

    @classmethod
    def create(
        cls,
        updates: Sequence[UpdateStatistics],
        *,
        version: int,
        data: DataStatistics,
        learning_rate: float,
        seconds: float,
        custom: Mapping[str, float],
    ) -> StepStatistics:
        """Return the statistics of a step of these ``updates``."""
        sums = sum((update.sums for update in updates), TokenSums())
        num_tokens, num_plain = sums.num_tokens or float("nan"), sums.num_plain or float("nan")
        return cls(
            version=version,
            data=data,
            loss=float(np.mean([update.loss for update in updates])) if updates else 0.0,
            grad_norm=float(np.mean([update.grad_norm for update in updates])) if updates else 0.0,
            learning_rate=learning_rate,
            entropy=sums.entropy / num_tokens,
            approximate_kl=sums.approximate_kl / num_plain,
            reference_kl=sums.reference_kl / num_plain,
            teacher_kl=sums.teacher_kl / (sums.num_taught or float("nan")),
            clip_fraction=sums.num_clipped / num_tokens,
            importance_mean=sums.importance / num_tokens,
            importance_max=sums.importance_max,
            out_of_range_fraction=sums.num_out_of_range / num_tokens,
            behaviour_gap_mean=sums.behaviour_gap / num_plain,
            behaviour_gap_max=sums.behaviour_gap_max,
            outside_fraction=sum(update.num_outside for update in updates) / num_tokens,
            num_updates=sum(update.grad_norm > 0 for update in updates),
            num_skipped_rows=sum(update.num_skipped_rows for update in updates),
            num_packed_tokens=sum(update.num_packed_tokens for update in updates),
            seconds=seconds,
            custom=custom,
        )


def describe_data(
    groups: Sequence[Group],
    rows: Sequence[TrainingRow],
    *,
    version: int,
    num_zero_variance_groups: int,
    num_greedy_tokens: int = 0,
    penalty: float = 0.0,
) -> DataStatistics:
    """Return counts and averages of the data of a step, under the trainer's ``version`` before it.

    ``groups`` are those that the agents made; ``penalty`` is the sum of all penalties on their episodes.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.failure is None]
    temperatures = _gather([row.distributions.temperatures for row in rows])
    ages = version - _gather([row.trajectory.versions[row.positions] for row in rows])
    return DataStatistics(
        num_zero_variance_groups=num_zero_variance_groups,
        num_episodes=len(episodes),
        num_failed_episodes=len(episodes) - len(rewards),
        num_rejected_episodes=sum(episode.is_rejected for episode in episodes),
        num_tokens=sum(row.trajectory.num_tokens for row in rows),
        num_trained_tokens=len(ages),
        reward_mean=float(np.mean(rewards)) if rewards else 0.0,
        penalty_mean=penalty / len(rewards) if rewards else 0.0,
        staleness_mean=float(ages.mean()) if len(ages) else 0.0,
        staleness_max=int(ages.max()) if len(ages) else 0,
        temperature_mean=float(temperatures.mean()) if len(temperatures) else 1.0,
        num_greedy_tokens=num_greedy_tokens,
        num_adjusted_tokens=sum(
            int(
                tokens_of(row.trajectory, lambda sampling: sampling is not None and sampling.is_adjusted)[
                    row.positions
                ].sum()
            )
            for row in rows
        ),
    )


def _gather(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *arrays])


_MAX_RUNS = 100_000
"""Runs of equal advantages in the news of a step. A critic gives each token its own, and the reporter may be remote."""


@define
class RowRecorder:
    """Collects the rows of a step. In a gang only the first rank needs one: all ranks know all log-probabilities."""

    _groups: tuple[Group, ...] = field(default=(), init=False)
    _rows: tuple[TrainingRow, ...] = field(default=(), init=False)
    _logprobs: dict[int, Floats] = field(factory=dict, init=False)

    def expect(self, groups: Sequence[Group], rows: Sequence[TrainingRow]) -> None:
        """Set the rows of the step and the groups that they come from."""
        self._groups, self._rows = tuple(groups), tuple(rows)

    def note(self, row: TrainingRow, logprobs: Floats) -> None:
        """Add the log-probabilities [n] that a pass computed for the trained tokens of ``row``.

        The first ones of a row are kept: later passes see weights that this step has changed.
        """
        # By identity: rows are copied when baselines are added to them, and share the trajectory.
        self._logprobs.setdefault(id(row.trajectory), logprobs)

    def _episodes(self) -> dict[tuple[int, str], Episode]:
        # By group first: groups made from files may name their sessions alike.
        return {
            (index, row.session): episode
            for index, group in enumerate(self._groups)
            for episode in group.episodes
            for row in episode.trajectories
        }

    def advantages(self) -> dict[str, tuple[tuple[float, int], ...]]:
        """Return the advantages of the sampled tokens of each turn, as ``GroupsTrained`` has them."""
        found: dict[str, tuple[tuple[float, int], ...]] = {}
        num_left = _MAX_RUNS
        for row in self._rows:
            trajectory = row.trajectory
            sampled = np.flatnonzero(trajectory.turns >= 0)
            turns = trajectory.turns[sampled]
            values = np.where(trajectory.loss_mask == 1, row.advantages, 0)[sampled]
            for own in np.split(np.arange(len(turns)), np.flatnonzero(np.diff(turns)) + 1):
                if not len(own):  # a row without sampled tokens
                    continue
                turn = trajectory.interactions[turns[own[0]]]
                # Of a turn that several branches share, one trains the tokens.
                if turn in found and not values[own].any():
                    continue
                found[turn] = tuple((float(f"{value:.4g}"), len(list(run))) for value, run in groupby(values[own]))
                num_left -= len(found[turn])
            if num_left < 0:
                break
        return found

    def rows(self) -> tuple[TrainedRow, ...]:
        """Return the rows, in the order of the batch."""
        episodes = self._episodes()
        found = []
        for row in self._rows:
            trajectory = row.trajectory
            episode = episodes[row.group, trajectory.session]
            computed = np.full(trajectory.num_tokens, np.nan, dtype=np.float32)
            if id(trajectory) in self._logprobs:
                computed[row.positions] = self._logprobs[id(trajectory)]
            found.append(
                TrainedRow(
                    trajectory=trajectory,
                    advantages=np.where(trajectory.loss_mask == 1, row.advantages, 0),
                    trainer_logprobs=computed,
                    task=self._groups[row.group].problem.position,
                    source=self._groups[row.group].problem.source,
                    member=episode.member,
                    episode_reward=episode.reward,
                    temperature=row.temperature,
                )
            )
        return tuple(found)
