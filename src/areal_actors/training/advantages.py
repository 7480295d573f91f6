"""Computation of advantages from groups, by statistics over the members of a group. Pure numpy.

Groups are taken from the rows, not from a stride over the batch, so members may fail and episodes may differ in their
number of rows. Failed episodes enter no statistic; an episode whose rows were withheld keeps its reward in the
baseline.

Write R_t for the return of the turn that sampled token t, and G for the values of its group in the chosen
``StatisticsUnit``. With mean and std over G (the population's, not the sample's)::

    rloo                  A_t =  R_t - mean(G without the member itself)     RLOO, arXiv:2402.14740
    grpo                  A_t = (R_t - mean(G)) / max(std(G), floor)         GRPO, arXiv:2402.03300
    dr_grpo               A_t =  R_t - mean(G)                               Dr. GRPO, arXiv:2503.20783
    reinforce_plus_plus   A_t = (R_t - mean_batch(R)) / std_batch(R)         REINFORCE++, arXiv:2501.03262
    group_mean_batch_std  A_t = (R_t - mean(G)) / std_batch(R - mean(G))     its variant with a group baseline
    none                  A_t =  R_t

The units::

    turn_kind    G has one value for each member: the mean return of its turns of the same kind, which are those of the
                 same agent (``x-areal-agent``) at the same depth of their conversation
    episode      one value for each member: its total reward
    row          one value for each row: the return of its last turn
    turn_depth   one value for each turn at the same depth of its conversation: its return

In ``turn_kind``, a member all of whose turns have one return (that of an outcome which nothing discounts) has that
value for every kind, whether it has such turns or not. Another member without turns of a kind is not in its G. If that
leaves no other member, G has the mean over all turns of each member.

``rloo`` with ``turn_kind`` is the default, because its expected update is the gradient of the expected returns, for
sessions of every shape. The baseline subtracted from R_t depends on the other members, and on the agent and the depth
of the turn, which were fixed before its tokens were sampled; E[grad log p(a_t) · b] is 0 for every such b. The other
choices do not have this property:

* A mean over all members contains the member itself. With one final reward that only shrinks the update by 1 - 1/n.
  Where R_t is not the episode's total (``turn_discount`` below 1, several rewards) the update becomes c - 1/n times the
  gradient, with c the part of the total that reaches R_t, which is negative for turns far before the reward.
* Dividing by the standard deviation of the group changes the direction where rewards take more than two values: the
  deviation depends on the member's own reward.
* ``episode`` compares returns with totals: with a reward for each turn, late turns have negative advantages only.
* ``turn_depth`` gives a turn that is alone at its depth the advantage 0, so that the update is biased against turns
  that only long episodes have; and a member with several turns at a depth is in its own baseline.

A group of equal values carries no signal: the methods with a group baseline give it the advantage 0, whatever the
discount of turns. A single member cannot be compared with others, and has the advantage 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from areal_actors.domain import Episode, Floats, Group, InteractionId, SessionId, Trajectory, as_floats, unfold_group
from areal_actors.training.config import AdvantageConfig, Normalisation, StatisticsUnit

Doubles = npt.NDArray[np.float64]

_EQUAL = 1e-9
"""Relative difference below which values count as equal: sums of float32 returns differ in the last bits."""


@frozen(kw_only=True)
class Formula:
    """What a normalisation subtracts from a return, and what it divides by. A new one is a row of ``FORMULAS``."""

    has_group_baseline: bool = False
    """Whether the mean of the group is subtracted."""
    is_leave_one_out: bool = False
    """Whether a value is left out of the mean that it is compared with."""
    divides_by_group: bool = False
    """Whether the standard deviation of the group divides."""
    divides_by_batch: bool = False
    """Whether the standard deviation over all tokens of the step, of the same source, divides."""
    has_batch_baseline: bool = False
    """Whether the mean over all tokens of the step, of the same source, is subtracted."""


FORMULAS: Mapping[Normalisation, Formula] = {
    Normalisation.RLOO: Formula(has_group_baseline=True, is_leave_one_out=True),
    Normalisation.GRPO: Formula(has_group_baseline=True, divides_by_group=True),
    Normalisation.DR_GRPO: Formula(has_group_baseline=True),
    Normalisation.REINFORCE_PLUS_PLUS: Formula(has_batch_baseline=True, divides_by_batch=True),
    Normalisation.GROUP_MEAN_BATCH_STD: Formula(has_group_baseline=True, divides_by_batch=True),
    Normalisation.NONE: Formula(),
}


def formula_of(config: AdvantageConfig) -> Formula:
    """Return the formula of the built-in normalisation that ``config`` names."""
    return FORMULAS[Normalisation(config.normalisation)]


@frozen(kw_only=True)
class GroupAdvantages:
    """Advantages of one group: float32 [T] for each trajectory of its successes, in order, 0 off the mask."""

    rows: tuple[Floats, ...] = field(eq=False)
    has_zero_variance: bool


def compute_advantages(groups: Sequence[Group], config: AdvantageConfig) -> tuple[GroupAdvantages, ...]:
    """Return the advantages of every token of every group, aligned with ``groups``.

    Raises ``ValueError`` for a reward or return that is not finite, naming the session.
    """
    for group in groups:
        _require_finite(group)
    formula = formula_of(config)
    centred = [_centred(group, config) for group in groups]
    scales: dict[str, _Transform] = {group.problem.source: _affine(baseline=0.0) for group in groups}
    if formula.divides_by_batch:
        # Rewards of different sources have different scales, so each source has statistics of its own.
        for source in scales:
            tokens = [
                values[row.loss_mask == 1]
                for group, rows in zip(groups, centred, strict=True)
                if group.problem.source == source
                for row, values in zip(_rows(group), rows, strict=True)
            ]
            values = np.concatenate([*tokens, np.zeros(0)])
            has_mean = len(values) > 0 and formula.has_batch_baseline
            mean = float(values.mean()) if has_mean else 0.0
            scales[source] = (
                np.zeros_like
                if _is_constant(values)
                else _affine(baseline=mean, divisor=max(float(values.std()), config.std_floor))
            )
    result: list[GroupAdvantages] = []
    for group, centred_rows in zip(groups, centred, strict=True):
        scale = scales[group.problem.source]
        rows = [scale(found) * row.loss_mask for row, found in zip(_rows(group), centred_rows, strict=True)]
        # Without a group baseline, groups are compared with each other: those of one episode teach, too.
        compared = centred_rows if formula.has_group_baseline else rows
        result.append(
            GroupAdvantages(rows=tuple(map(as_floats, rows)), has_zero_variance=_has_zero_variance(group, compared))
        )
    return tuple(result)


def supervised_advantages(groups: Sequence[Group]) -> tuple[GroupAdvantages, ...]:
    """Return advantages of 1 for every trained token, under which the likelihood of all is raised alike."""
    return tuple(
        GroupAdvantages(rows=tuple(as_floats(row.loss_mask == 1) for row in group.rows), has_zero_variance=False)
        for group in groups
    )


def has_signal(group: Group, config: AdvantageConfig) -> bool:
    """Return whether anything can be learned from the group.

    Penalties in the reward are not considered. A group with numbers that are not finite counts as one with signal, so
    that the step rejects it.
    """
    unfolded = unfold_group(group)
    try:
        _require_finite(unfolded)
    except ValueError:
        return True
    return not has_zero_variance(unfolded, config)


def has_zero_variance(group: Group, config: AdvantageConfig | None = None) -> bool:
    """Return whether all values are equal that ``config`` compares, so that the group does not say what was better.

    These are its values in the configured unit; for a custom normalisation, and one without group statistics, the
    rewards of its episodes. These compare a group of one episode with other groups, so it has a signal.
    """
    config = config or AdvantageConfig()
    if not isinstance(config.normalisation, Normalisation) or not formula_of(config).has_group_baseline:
        return len(_successes(group)) != 1 and _has_equal_rewards(group)
    return _has_zero_variance(group, _centred(group, config))


def _has_equal_rewards(group: Group) -> bool:
    return _is_constant(np.array([episode.reward for episode in _successes(group)]))


def _has_zero_variance(group: Group, compared: Sequence[Doubles]) -> bool:
    rows = _rows(group)
    if not any(row.num_trained_tokens for row in rows):
        return _has_equal_rewards(group)
    return not any(values[row.loss_mask == 1].any() for row, values in zip(rows, compared, strict=True))


# ------------------------------------------------------------------------------------------- group baselines


def _centred(group: Group, config: AdvantageConfig) -> list[Doubles]:
    """Return for each row float64 [T]: the return minus its baseline, divided by the group's std if configured."""
    if not formula_of(config).has_group_baseline:
        return [row.returns.astype(np.float64) for row in _rows(group)]
    rows = _rows(group)
    match config.unit:
        case StatisticsUnit.TURN_KIND:
            return _centre_by_kind(group, config)
        case StatisticsUnit.TURN_DEPTH:
            return _centre_by_depth(rows, config)
        case StatisticsUnit.EPISODE:
            owners = [index for index, episode in enumerate(_successes(group)) for _ in episode.trajectories]
            values = np.array([episode.reward for episode in _successes(group)], dtype=np.float64)
        case StatisticsUnit.ROW:
            owners = list(range(len(rows)))
            values = np.array([row.reward for row in rows], dtype=np.float64)
    transforms = _transforms(values, config)
    return [transforms[owner](row.returns.astype(np.float64)) for row, owner in zip(rows, owners, strict=True)]


def _centre_by_depth(rows: Sequence[Trajectory], config: AdvantageConfig) -> list[Doubles]:
    turns = {(row.session, turn.interaction): turn for row in rows for turn in _turns_of(row)}
    by_depth: dict[int, list[_TurnKey]] = defaultdict(list)
    for key, turn in turns.items():
        by_depth[turn.kind[1]].append(key)
    transforms: dict[_TurnKey, _Transform] = {}
    for keys in by_depth.values():
        values = np.array([turns[key].value for key in keys], dtype=np.float64)
        transforms |= dict(zip(keys, _transforms(values, config), strict=True))
    return [
        _apply_by_turn(row, [(turn, transforms[row.session, turn.interaction]) for turn in _turns_of(row)])
        for row in rows
    ]


def _centre_by_kind(group: Group, config: AdvantageConfig) -> list[Doubles]:
    members = [_Member.of(episode) for episode in _successes(group)]
    rows = [
        (index, row, _turns_of(row)) for index, episode in enumerate(_successes(group)) for row in episode.trajectories
    ]
    by_kind: dict[_Kind, list[_Transform]] = {}
    for kind in {turn.kind for _, _, turns in rows for turn in turns}:
        found = [member.value_of(kind) for member in members]
        # No other member has such a turn to compare with, so all turns of each member are compared.
        if sum(value is not None for value in found) <= 1:
            found = [member.mean for member in members]
        present = [index for index, value in enumerate(found) if value is not None]
        values = np.array([found[index] for index in present], dtype=np.float64)
        if len(values) > 1 and formula_of(config).is_leave_one_out:
            # Not ``_transforms``: giving a group of equal values 0 would depend on the member's own value, which is a
            # mean over its turns, whose returns may differ.
            rounding = _EQUAL * max(1.0, float(np.abs(values).max()))
            transforms = [_affine(baseline=float(mean), rounding=rounding) for mean in _leave_one_out(values)]
        else:
            transforms = _transforms(values, config)
        by_kind[kind] = [np.zeros_like for _ in members]  # a member without turns of the kind uses none
        for index, transform in zip(present, transforms, strict=True):
            by_kind[kind][index] = transform
    return [_apply_by_turn(row, [(turn, by_kind[turn.kind][index]) for turn in turns]) for index, row, turns in rows]


_Kind: TypeAlias = tuple[str | None, int]
"""The agent that made the request, and the depth in its conversation."""
_TurnKey: TypeAlias = tuple[SessionId, InteractionId]


@frozen
class _TurnReturn:
    """A turn that a row trains: its index in the row, its id, its kind, and the return of its first token."""

    index: int
    interaction: InteractionId
    kind: _Kind
    value: float


def _turns_of(row: Trajectory) -> list[_TurnReturn]:
    """Return the turns that a row trains.

    If a row does not know the depth of its turns, it is their index in the row.
    """
    trained = np.flatnonzero(row.loss_mask == 1)
    indices, first = np.unique(row.turns[trained], return_index=True)
    result: list[_TurnReturn] = []
    for index, token in zip(indices.tolist(), trained[first].tolist(), strict=True):
        info = row.turn_infos[index] if row.turn_infos else None
        kind = (row.tag, index) if info is None else (info.tag, info.depth)
        result.append(_TurnReturn(index, row.interactions[index], kind, float(row.returns[token])))
    return result


@frozen
class _Member:
    """The returns of one member's turns. ``constant`` is the return that all of them share, if they do."""

    by_kind: Mapping[_Kind, float]
    mean: float
    constant: float | None

    @classmethod
    def of(cls, episode: Episode) -> _Member:
        values: dict[_Kind, list[float]] = defaultdict(list)
        for row in episode.trajectories:
            for turn in _turns_of(row):
                values[turn.kind].append(turn.value)
        # Returns are float32: the reward has to be rounded like them to count as equal.
        returns = [value for found in values.values() for value in found] or [float(np.float32(episode.reward))]
        return cls(
            # fsum rounds once, so the order of turns does not change a mean.
            by_kind={kind: math.fsum(found) / len(found) for kind, found in values.items()},
            mean=math.fsum(returns) / len(returns),
            constant=returns[0] if _is_constant(np.array(returns)) else None,
        )

    def value_of(self, kind: _Kind) -> float | None:
        """Return its value in the statistics of a kind, ``None`` if it has none."""
        return self.by_kind.get(kind, self.constant)


def _apply_by_turn(row: Trajectory, transforms: Sequence[tuple[_TurnReturn, _Transform]]) -> Doubles:
    result, is_trained = np.zeros(row.num_tokens), row.loss_mask == 1
    for turn, transform in transforms:
        is_turn = (row.turns == turn.index) & is_trained
        result[is_turn] = transform(row.returns[is_turn].astype(np.float64))
    return result


_Transform = Callable[[Doubles], Doubles]


def _transforms(values: Doubles, config: AdvantageConfig) -> list[_Transform]:
    """Return for each value of a group the function that maps a return of its owner to an advantage."""
    if _is_constant(values):
        return [np.zeros_like for _ in values]
    formula = formula_of(config)
    baselines = _leave_one_out(values) if formula.is_leave_one_out else np.full(len(values), values.mean())
    divisor = max(float(values.std()), config.std_floor) if formula.divides_by_group else 1.0
    return [_affine(baseline=float(baseline), divisor=divisor) for baseline in baselines]


def _affine(*, baseline: float, divisor: float = 1.0, rounding: float | None = None) -> _Transform:
    """Return a function that centres returns and divides them, and gives 0 for what is within ``rounding``."""

    def transform(returns: Doubles) -> Doubles:
        difference = returns - baseline
        if rounding is not None:
            return np.where(np.abs(difference) <= rounding, 0.0, difference)
        return difference / divisor

    return transform


def _leave_one_out(values: Doubles) -> Doubles:
    others: Doubles = (values.sum() - values) / (len(values) - 1)
    return others


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
