"""Turns that ended at their token limit: finding them, and removing them from the loss of rows and episodes."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from areal_actors.domain.arrays import as_floats, as_ints
from areal_actors.domain.chat import InteractionId
from areal_actors.domain.rows import Episode, Trajectory, Untrained, UntrainedReason
from areal_actors.domain.sampling import FinishReason

__all__ = ["find_truncated", "mask_truncated", "withhold_truncated"]


def find_truncated(row: Trajectory) -> dict[InteractionId, int]:
    """Return the turns of ``row`` that ended at their token limit, with the number of their tokens that the row trains.

    Turns without information, such as those of a workflow's own tensors, do not count as truncated.
    """
    cut = [index for index, info in enumerate(row.turn_infos) if info.finish is FinishReason.LENGTH]
    trained = row.turns[row.loss_mask == 1]
    return {row.interactions[index]: int((trained == index).sum()) for index in cut}


def mask_truncated(row: Trajectory) -> Trajectory:
    """Return the row with truncated turns masked in the loss; returns stay.

    Returns the row itself if there are none.
    """
    cut = [index for index, info in enumerate(row.turn_infos) if info.finish is FinishReason.LENGTH]
    if not cut:
        return row
    mask = np.where(np.isin(row.turns, cut), 0, row.loss_mask)
    raw = row.raw_logprobs
    return evolve(
        row,
        loss_mask=as_ints(mask),
        logprobs=as_floats(np.where(mask == 1, row.logprobs, 0)),
        raw_logprobs=None if raw is None else as_floats(np.where(mask == 1, raw, 0)),
    )


def withhold_truncated(episode: Episode) -> Episode:
    """Return the episode with truncated turns masked and listed as untrained."""
    found = [entry for row in episode.trajectories for entry in find_truncated(row).items()]
    listed = tuple(
        Untrained(interaction=interaction, num_tokens=num_tokens, reason=UntrainedReason.TRUNCATED)
        for interaction, num_tokens in found
        if num_tokens
    )
    rows = tuple(map(mask_truncated, episode.trajectories))
    return evolve(episode, trajectories=rows, untrained=episode.untrained + listed)
