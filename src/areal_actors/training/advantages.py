"""From groups to advantages: statistics over the members of a group. Pure numpy.

Groups are those that the rows carry, never a stride over the batch, so members may fail and episodes may differ in
rows. Failed episodes are in no statistic; an episode whose rows were withheld keeps its reward in the baseline.

Write R_t for the return of the turn that sampled token t, and G for the values of its group in the chosen
``StatisticsUnit`` (total rewards of episodes, returns of rows, or returns of the turns at the same depth). With mean
and std over G (the population's, not the sample's)::

    grpo                  A_t = (R_t - mean(G)) / max(std(G), floor)         GRPO, arXiv:2402.03300
    dr_grpo               A_t =  R_t - mean(G)                               Dr. GRPO, arXiv:2503.20783
    rloo                  A_t =  R_t - mean(G without the member itself)     RLOO, arXiv:2402.14740
    reinforce_plus_plus   A_t = (R_t - mean_batch(R)) / std_batch(R)         REINFORCE++, arXiv:2501.03262
    group_mean_batch_std  A_t = (R_t - mean(G)) / std_batch(R - mean(G))     its variant with a group baseline
    none                  A_t =  R_t

A group of equal values carries no signal: the methods with a group baseline give it 0, however turns discounted it.

Why returns, not totals, in the numerator: with one final reward and ``turn_discount`` 1 every turn's return is the
episode's reward and A_t is the group-normalised reward. Otherwise R_t is the reward-to-go that the turn can be credited
with, and any baseline that does not depend on the turn's tokens leaves the policy gradient unbiased; a baseline that
fits the turn better (``turn_depth``) only lowers its variance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from areal_actors.domain import Episode, Floats, Group, Trajectory, as_floats, unfold_group
from areal_actors.training.config import AdvantageConfig, Normalisation, StatisticsUnit

__all__ = ["GroupAdvantages", "compute_advantages", "has_zero_variance"]

Doubles = npt.NDArray[np.float64]

_EQUAL = 1e-9
"""Values closer than this, relative to the largest, are one value: sums of float32 returns differ in the last bits."""


@frozen(kw_only=True)
class GroupAdvantages:
    """Advantages of one group: float32 [T] for each trajectory of its successes, in order, 0 off the mask."""

    rows: tuple[Floats, ...] = field(eq=False)
    has_zero_variance: bool


def compute_advantages(groups: Sequence[Group], config: AdvantageConfig) -> tuple[GroupAdvantages, ...]:
    """Advantages of every token of every group, aligned with ``groups``.

    Raises ``ValueError`` for a reward or return that is not finite, naming the session.
    """
    for group in groups:
        _require_finite(group)
    centred = [_centred(group, config) for group in groups]
    scale = _batch_scale(groups, centred, config)
    return tuple(
        GroupAdvantages(
            rows=tuple(
                as_floats(scale(values) * row.loss_mask) for row, values in zip(_rows(group), rows, strict=True)
            ),
            has_zero_variance=has_zero_variance(group),
        )
        for group, rows in zip(groups, centred, strict=True)
    )


def has_signal(group: Group, config: AdvantageConfig) -> bool:
    """Whether something can be learnt from the group. One whose numbers are not finite is left for the step to refuse.

    Penalties in the reward are not part of it.
    """
    try:
        (found,) = compute_advantages([unfold_group(group)], config)
    except ValueError:
        return True
    return not found.has_zero_variance


def has_zero_variance(group: Group) -> bool:
    """Whether all rewards of the group's successful episodes are equal: then it does not say what was better."""
    return _is_constant(np.array([episode.reward for episode in _successes(group)]))


# ------------------------------------------------------------------------------------------- group baselines


def _centred(group: Group, config: AdvantageConfig) -> list[Doubles]:
    """For each row float64 [T]: the return minus its baseline, divided by the group's std where the method says so."""
    if config.normalisation in (Normalisation.NONE, Normalisation.REINFORCE_PLUS_PLUS):
        return [row.returns.astype(np.float64) for row in _rows(group)]
    baseline = _BASELINES[config.unit]
    return baseline(group, config)


def _episode_baseline(group: Group, config: AdvantageConfig) -> list[Doubles]:
    values = np.array([episode.reward for episode in _successes(group)], dtype=np.float64)
    transforms = _transforms(values, config)
    by_session = {id(episode): transform for episode, transform in zip(_successes(group), transforms, strict=True)}
    return [
        by_session[id(episode)](row.returns.astype(np.float64))
        for episode in _successes(group)
        for row in episode.trajectories
    ]


def _row_baseline(group: Group, config: AdvantageConfig) -> list[Doubles]:
    rows = _rows(group)
    transforms = _transforms(np.array([row.reward for row in rows], dtype=np.float64), config)
    return [transform(row.returns.astype(np.float64)) for row, transform in zip(rows, transforms, strict=True)]


def _turn_depth_baseline(group: Group, config: AdvantageConfig) -> list[Doubles]:
    rows = _rows(group)
    turns = _turn_returns(rows)
    by_depth: dict[int, list[Hashable]] = defaultdict(list)
    for key in turns:
        by_depth[key[1]].append(key)
    transforms: dict[Hashable, _Transform] = {}
    for keys in by_depth.values():
        values = np.array([turns[key] for key in keys], dtype=np.float64)  # type: ignore[index]
        transforms |= dict(zip(keys, _transforms(values, config), strict=True))
    return [_apply_by_turn(row, transforms) for row in rows]


def _turn_returns(rows: Sequence[Trajectory]) -> dict[tuple[Any, int], float]:
    """The return of each trained turn, once, by (session and interaction, depth)."""
    result: dict[tuple[Any, int], float] = {}
    for row in rows:
        for turn in np.unique(row.turns[row.loss_mask == 1]):
            first = int(np.flatnonzero((row.turns == turn) & (row.loss_mask == 1))[0])
            result[_turn_key(row, int(turn))] = float(row.returns[first])
    return result


def _turn_key(row: Trajectory, turn: int) -> tuple[Any, int]:
    return ((row.session, row.interactions[turn]), turn)


def _apply_by_turn(row: Trajectory, transforms: dict[Hashable, _Transform]) -> Doubles:
    result = np.zeros(row.num_tokens)
    for turn in np.unique(row.turns[row.loss_mask == 1]):
        is_turn = (row.turns == turn) & (row.loss_mask == 1)
        result[is_turn] = transforms[_turn_key(row, int(turn))](row.returns[is_turn].astype(np.float64))
    return result


_Transform = Callable[[Doubles], Doubles]

_BASELINES: dict[StatisticsUnit, Callable[[Group, AdvantageConfig], list[Doubles]]] = {
    StatisticsUnit.EPISODE: _episode_baseline,
    StatisticsUnit.ROW: _row_baseline,
    StatisticsUnit.TURN_DEPTH: _turn_depth_baseline,
}


def _transforms(values: Doubles, config: AdvantageConfig) -> list[_Transform]:
    """For each value of a group: what turns a return of its owner into an advantage."""
    if _is_constant(values):
        return [np.zeros_like for _ in values]
    baselines = (
        _leave_one_out(values) if config.normalisation is Normalisation.RLOO else np.full(len(values), values.mean())
    )
    divisor = max(float(values.std()), config.std_floor) if config.normalisation is Normalisation.GRPO else 1.0
    return [_affine(baseline=float(baseline), divisor=divisor) for baseline in baselines]


def _affine(*, baseline: float, divisor: float) -> _Transform:
    return lambda returns: (returns - baseline) / divisor


def _leave_one_out(values: Doubles) -> Doubles:
    others: Doubles = (values.sum() - values) / (len(values) - 1)
    return others


# -------------------------------------------------------------------------------------------- batch statistics


def _batch_scale(groups: Sequence[Group], centred: list[list[Doubles]], config: AdvantageConfig) -> _Transform:
    """The last normalisation, over all trained tokens of the batch, for the methods that have one."""
    if config.normalisation not in (Normalisation.REINFORCE_PLUS_PLUS, Normalisation.GROUP_MEAN_BATCH_STD):
        return lambda values: values
    tokens = [
        values[row.loss_mask == 1]
        for group, rows in zip(groups, centred, strict=True)
        for row, values in zip(_rows(group), rows, strict=True)
    ]
    values = np.concatenate([*tokens, np.zeros(0)])
    if _is_constant(values):
        return np.zeros_like
    mean = float(values.mean()) if config.normalisation is Normalisation.REINFORCE_PLUS_PLUS else 0.0
    return _affine(baseline=mean, divisor=max(float(values.std()), config.std_floor))


# -------------------------------------------------------------------------------------------------- small parts


def _successes(group: Group) -> list[Episode]:
    return [episode for episode in group.episodes if episode.failure is None]


def _rows(group: Group) -> list[Trajectory]:
    return [row for episode in _successes(group) for row in episode.trajectories]


def _is_constant(values: Doubles) -> bool:
    if len(values) == 0:
        return True
    return bool(values.max() - values.min() <= _EQUAL * max(1.0, float(np.abs(values).max())))


def _require_finite(group: Group) -> None:
    for episode in _successes(group):
        if not np.isfinite(episode.reward):
            raise ValueError(
                f"Episode {episode.session} of group {group.id} has the reward {episode.reward}; rewards are finite."
            )
        for row in episode.trajectories:
            if not (np.isfinite(row.returns).all() and np.isfinite(row.reward)):
                raise ValueError(f"A row of session {row.session} has a return that is not finite.")
