"""Unfolding of tree rows: each branch as a linear row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from areal_actors.domain.predecessors import branch_ends, path_to
from areal_actors.domain.rows import Episode, Group, Trajectory

__all__ = ["Branch", "unfold", "unfold_group"]


@frozen(kw_only=True)
class Branch:
    """One branch: a linear row, and the indices, int64 [T], of its tokens in the tree row."""

    row: Trajectory
    places: npt.NDArray[np.int64] = field(eq=False)


def unfold(row: Trajectory) -> tuple[Branch, ...]:
    """Return the branches of ``row``, in the order of their ends. A linear row is its only branch.

    A token that several branches share is trained in the first of them and masked in the others. Branches with nothing
    left to train are omitted, unless the row trains nothing at all.
    """
    if row.predecessors is None:
        return (Branch(row=row, places=np.arange(row.num_tokens)),)
    is_done = np.zeros(row.num_tokens, np.bool_)
    branches: list[Branch] = []
    for end in branch_ends(row.predecessors).tolist():
        places = path_to(end, row.predecessors)
        branch = _branch(row, places, is_done[places])
        is_done[places] = True
        if branch.num_trained_tokens or not row.num_trained_tokens:
            branches.append(Branch(row=branch, places=places))
    return tuple(branches)


def _branch(row: Trajectory, places: npt.NDArray[np.int64], is_done: npt.NDArray[np.bool_]) -> Trajectory:
    mask = np.where(is_done, 0, row.loss_mask[places])
    sampled = row.turns[places] >= 0
    kept, turns = np.unique(row.turns[places][sampled], return_inverse=True)
    renumbered = np.full(len(places), -1, np.int32)
    renumbered[sampled] = turns
    last = int(places[sampled][-1]) if sampled.any() else None
    is_whole = last is not None and int(row.turns[last]) == len(row.interactions) - 1
    return evolve(
        row,
        interactions=tuple(row.interactions[turn] for turn in kept) or row.interactions[-1:],
        turn_infos=(tuple(row.turn_infos[turn] for turn in kept) or row.turn_infos[-1:]) if row.turn_infos else (),
        input_ids=row.input_ids[places],
        loss_mask=mask,
        logprobs=np.where(mask == 1, row.logprobs[places], 0),
        versions=row.versions[places],
        returns=row.returns[places],
        turns=renumbered,
        reward=row.reward if last is None or is_whole else float(row.returns[last]),
        predecessors=None,
        raw_logprobs=None if row.raw_logprobs is None else np.where(mask == 1, row.raw_logprobs[places], 0),
        teacher_logprobs=None if row.teacher_logprobs is None else np.where(mask == 1, row.teacher_logprobs[places], 0),
    )


def unfold_group(group: Group) -> Group:
    """Return the group with each tree row replaced by its branches, or the group itself if all rows are linear."""
    rows = [row for episode in group.episodes for row in episode.trajectories]
    if all(row.predecessors is None for row in rows):
        return group
    return evolve(group, episodes=tuple(map(_unfold_episode, group.episodes)))


def _unfold_episode(episode: Episode) -> Episode:
    rows = tuple(branch.row for row in episode.trajectories for branch in unfold(row))
    return evolve(episode, trajectories=rows)
