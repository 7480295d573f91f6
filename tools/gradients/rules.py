"""Advantages as other systems compute them, by their formulas, to be measured beside ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve

from areal_actors.cache import Unrewarded
from areal_actors.domain import Group, Trajectory
from areal_actors.training.config import AdvantageConfig, Normalisation, StatisticsUnit
from areal_actors_testing.gradients import Estimator, Rule

__all__ = ["SYSTEMS"]

Doubles = npt.NDArray[np.float64]
_FLOOR = 1e-6


def _trace(normalise: Callable[[Doubles], Doubles]) -> Rule:
    """Every sampled token of an episode has the episode's advantage, whichever conversation it stands in."""

    def rule(group: Group) -> Sequence[Doubles]:
        members = [episode for episode in group.episodes if episode.failure is None]
        if not members:
            return []
        values = normalise(np.array([episode.reward for episode in members]))
        return [
            np.full(row.num_tokens, value)
            for episode, value in zip(members, values, strict=True)
            for row in episode.trajectories
        ]

    return rule


def _turn_index(normalise: Callable[[Doubles], Doubles]) -> Rule:
    """Each turn's return among those of the turns with the same number in their episodes, in order of creation."""

    def rule(group: Group) -> Sequence[Doubles]:
        rows = [row for episode in group.episodes for row in episode.trajectories]
        by_number: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        for index, row in enumerate(rows):
            for turn in np.unique(row.turns[row.loss_mask == 1]):
                by_number[row.interactions[turn]].append((index, int(turn), _return(row, int(turn))))
        result = [np.zeros(row.num_tokens) for row in rows]
        for found in by_number.values():
            values = normalise(np.array([value for _, _, value in found]))
            for (index, turn, _), value in zip(found, values, strict=True):
                result[index][rows[index].turns == turn] = value
        return result

    return rule


def _return(row: Trajectory, turn: int) -> float:
    return float(row.returns[(row.turns == turn) & (row.loss_mask == 1)][0])


def _minus_mean(values: Doubles) -> Doubles:
    return values - values.mean()


def _standardised(values: Doubles) -> Doubles:
    result: Doubles = (values - values.mean()) / (values.std() + _FLOOR)
    return result


_CREATION_ORDER = {"rule": "creation-order"}
_GRPO_ROWS = AdvantageConfig(normalisation=Normalisation.GRPO, unit=StatisticsUnit.ROW)
_GRPO_EPISODES = evolve(_GRPO_ROWS, unit=StatisticsUnit.EPISODE)

SYSTEMS: Mapping[str, Estimator] = {
    "reward of the last answer alone, by std": Estimator(
        advantages=_GRPO_EPISODES, export={"unrewarded": Unrewarded.ZERO}
    ),
    "creation order, std of rows": Estimator(advantages=_GRPO_ROWS, export=_CREATION_ORDER),
    "creation order, std of episodes": Estimator(advantages=_GRPO_EPISODES, export=_CREATION_ORDER),
    "trace advantage, minus mean": Estimator(rule=_trace(_minus_mean)),
    "trace advantage, by std": Estimator(rule=_trace(_standardised)),
    "turn number, minus mean": Estimator(rule=_turn_index(_minus_mean), export=_CREATION_ORDER),
    "turn number, by std": Estimator(rule=_turn_index(_standardised), export=_CREATION_ORDER),
}
"""Estimators by name. Creation order is a running return against the order of requests; a trace's advantage is
stamped on all of
its tokens; turn numbers compare the k-th answers of all members."""
