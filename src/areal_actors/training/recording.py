"""A record of the rows of one step: their advantages, and the log-probabilities that the trainer computes for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field

from areal_actors.domain import Floats, Group, TrainedRow
from areal_actors.training.batch import TrainingRow

__all__ = ["RowRecorder"]


@define
class RowRecorder:
    """Collects the rows of a step. In a gang only the first rank needs one: all ranks know all log-probabilities."""

    _groups: tuple[Group, ...] = field(default=(), init=False)
    _rows: tuple[TrainingRow, ...] = field(default=(), init=False)
    _logprobs: dict[int, Floats] = field(factory=dict, init=False)

    def expect(self, groups: Sequence[Group], rows: Sequence[TrainingRow]) -> None:
        """Set the rows of the step and the groups that they come from."""
        self._groups, self._rows = tuple(groups), tuple(rows)

    def note(self, rows: Sequence[TrainingRow], indices: Sequence[int], logprobs: Floats) -> None:
        """Add the log-probabilities [n] that a pass computed for the trained tokens of ``rows[i]``, row by row.

        The first ones of a row are kept: later passes see weights that this step has changed.
        """
        bounds = np.cumsum([len(rows[index].positions) for index in indices])[:-1]
        for index, part in zip(indices, np.split(logprobs, bounds), strict=True):
            # By identity: rows are copied when baselines are added to them, and share the trajectory.
            self._logprobs.setdefault(id(rows[index].trajectory), part)

    def rows(self) -> tuple[TrainedRow, ...]:
        """Return the rows, in the order of the batch."""
        # By group first: groups made from files may name their sessions alike.
        episodes = {
            (index, row.session): episode
            for index, group in enumerate(self._groups)
            for episode in group.episodes
            for row in episode.trajectories
        }
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
                    member=episode.member,
                    episode_reward=episode.reward,
                    temperature=row.temperature,
                )
            )
        return tuple(found)
