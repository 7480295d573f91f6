"""The exact bias of an estimator's expected update, from all groups of a shape's episodes.

From the episodes of a shape follow

* the true gradient of the expected episode reward, ``sum p(episode) reward sum_t grad log pi(a_t)``;
* the expected update of an estimator, ``sum p(group) sum_t weight_t A_t grad log pi(a_t)`` over all groups of n
  episodes, whose rows, advantages and weights are those of the library: ``export_trajectories``,
  ``compute_advantages``, ``token_weights``.

Members of a group are exchangeable, so groups are enumerated by how often each episode occurs in them: eight members
with four episodes are 165 groups instead of 65,536. No sampling is involved, and nothing here needs torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from areal_actors.cache.export import export_trajectories
from areal_actors.domain import (
    Episode,
    Group,
    GroupId,
    Problem,
    SessionId,
)
from areal_actors.domain.rows import mask_truncated, unfold_group
from areal_actors.training.advantages import compute_advantages, formula_of
from areal_actors.training.batch import Batch, TrainingRow
from areal_actors.training.config import AdvantageConfig, Aggregation, ObjectiveConfig
from areal_actors_testing.gradients.enumeration import Doubles, Played, Shape

Rule = Callable[[Group], Sequence[npt.NDArray[Any]]]
"""Maps a group to the advantages [T] of its rows, in the order of episodes and rows."""

EXACT = 0.999999
"""The cosine above which a direction counts as right: advantages and weights are float32."""


@frozen(kw_only=True)
class Estimator:
    """Computes updates from episodes: the settings of the library, by default its defaults.

    ``masks_truncated`` leaves answers that were cut by their length out of the loss, as the setting of that name does.
    ``rule``, if given, computes the advantages instead of ``compute_advantages``, for the estimator of another system
    or a new one.
    """

    advantages: AdvantageConfig = field(factory=AdvantageConfig)
    aggregation: Aggregation = ObjectiveConfig().aggregation
    export: Mapping[str, Any] = field(factory=dict)
    masks_truncated: bool = False
    rule: Rule | None = None

    @property
    def export_settings(self) -> dict[str, Any]:
        """Arguments of ``export_trajectories``."""
        return {"discount": 1.0, "style": "individual", **self.export}


@frozen(kw_only=True)
class Bias:
    """An expected update against the true gradient: its ``scale`` along it (1 is right), and the cosine between them.

    Where the true gradient is zero, the scale is NaN and the cosine 0.
    ``estimand_cosine`` is the cosine to the gradient of what the settings ask for: each turn's own return, which a
    discount or a mean over branches may make another thing than the episode's reward; it is 1 where neither gradient
    is above rounding, as where a later reward equals what an earlier choice lost. ``noise`` is the standard
    deviation of a single group's update over the length of the expected one: with k groups in a batch, divide it by
    the square root of k.
    """

    scale: float
    cosine: float
    estimand_cosine: float
    noise: float

    @property
    def angle(self) -> float:
        """Degrees between the expected update and the true gradient."""
        return math.degrees(math.acos(max(-1.0, min(1.0, self.cosine))))

    @property
    def is_right(self) -> bool:
        """Whether the expected update points along the true gradient."""
        return self.scale > 0 and self.cosine >= EXACT


def measure(shape: Shape, estimator: Estimator, *, group_size: int, num_groups: int | None = None) -> Bias:
    """Return the exact bias of an estimator for a shape.

    ``num_groups`` is the number of groups in a batch. The denominators of most aggregations count the tokens, rows or
    episodes of the whole batch; ``None`` takes a batch so large that they are constant. Statistics over a batch
    (``reinforce_plus_plus``, ``group_mean_batch_std``) are taken over one group in any case.
    """
    groups = Enumeration.create(shape, group_size=group_size, **estimator.export_settings)
    return groups.measure(estimator, num_groups=num_groups)


@frozen(kw_only=True)
class _Combination:
    """A group up to the order of its members; ``places`` are those of the tokens that carry a choice, in its batch."""

    probability: float
    group: Group
    places: npt.NDArray[np.int64] = field(eq=False)
    scores: Doubles = field(eq=False)

    @classmethod
    def create(cls, members: Sequence[_Member], *, probability: float, problem: int) -> _Combination:
        counts = [sum(row.num_trained_tokens for row in member.episode.trajectories) for member in members]
        starts = itertools.accumulate(counts, initial=0)
        return cls(
            probability=probability,
            group=_group([member.episode for member in members], problem),
            places=np.concatenate([member.places + start for member, start in zip(members, starts, strict=False)]),
            scores=np.concatenate([member.scores for member in members]),
        )


@frozen(kw_only=True)
class _Weights:
    """The weights of a group's trained tokens in a batch of only this group; 0 if they are masked.

    ``denominator`` is the part of the divisor that depends on the whole batch.
    """

    values: Doubles = field(eq=False)
    num_tokens: int
    denominator: int

    @classmethod
    def create(cls, group: Group, aggregation: Aggregation, *, masks_truncated: bool) -> _Weights:
        rows = [
            TrainingRow(trajectory=row, advantages=np.zeros(row.num_tokens), episode=index)
            for index, episode in enumerate(group.episodes)
            for row in episode.trajectories
        ]
        kept = [evolve(row, trajectory=mask_truncated(row.trajectory)) for row in rows] if masks_truncated else rows
        batch = Batch.create(kept, aggregation=aggregation)
        values = [np.zeros(row.trajectory.num_tokens) for row in kept]
        remaining = batch.weights
        for row, value in zip(kept, values, strict=True):
            num_tokens = row.trajectory.num_trained_tokens
            value[row.trajectory.loss_mask == 1] = remaining[:num_tokens]
            remaining = remaining[num_tokens:]
        match aggregation:
            case Aggregation.TOKEN_MEAN:
                denominator = len(batch.weights)
            case Aggregation.SEQUENCE_MEAN | Aggregation.FIXED_LENGTH:
                denominator = len(batch.rows)
            case Aggregation.EPISODE_MEAN | Aggregation.EPISODE_SUM:
                denominator = len({row.episode for row in batch.rows})
            case _:
                denominator = 1
        return cls(values=_on_mask(group, values), num_tokens=len(batch.weights), denominator=denominator)


@define(slots=False)
class Enumeration:
    """All groups of a shape under one export, and the values computed from them."""

    shape: Shape
    group_size: int
    estimand: Doubles
    combinations: tuple[_Combination, ...]
    _weights: dict[tuple[Aggregation, bool], list[_Weights]] = field(factory=dict)

    @classmethod
    def create(cls, shape: Shape, *, group_size: int, **export: Any) -> Enumeration:
        """Export every episode once and combine them to groups."""
        estimand = np.zeros(shape.num_parameters)
        combinations: list[_Combination] = []
        for problem, played in enumerate(shape.episodes):
            share = 1.0 / len(shape.problems)
            members = [_Member.create(shape, episode, export) for episode in played]
            for episode, member in zip(played, members, strict=True):
                estimand += share * episode.probability * member.estimand
            for chosen in itertools.combinations_with_replacement(range(len(played)), group_size):
                # A combination occurs in as many orders as the multinomial coefficient of its counts says.
                counts = Counter(chosen)
                num_orders = math.factorial(group_size) // math.prod(map(math.factorial, counts.values()))
                each = math.prod(played[index].probability ** count for index, count in counts.items())
                probability = share * num_orders * each
                combinations.append(
                    _Combination.create([members[index] for index in chosen], probability=probability, problem=problem)
                )
        return cls(shape=shape, group_size=group_size, estimand=estimand, combinations=tuple(combinations))

    def measure(self, estimator: Estimator, *, num_groups: int | None = None) -> Bias:
        """Return the bias under this export; see the function ``measure``."""
        key = (estimator.aggregation, estimator.masks_truncated)
        # The same for all advantages, and slower to compute than they are.
        if key not in self._weights:
            self._weights[key] = [
                _Weights.create(found.group, estimator.aggregation, masks_truncated=estimator.masks_truncated)
                for found in self.combinations
            ]
        weights = self._weights[key]
        advantages = self._advantages(estimator)
        shares = self._shares([weight.denominator for weight in weights], num_groups)
        update = np.zeros(self.shape.num_parameters)
        square = total = 0.0
        for found, weight, advantage, share in zip(self.combinations, weights, advantages, shares, strict=True):
            change = (weight.values[found.places] * advantage[found.places]) @ found.scores
            update += share * change
            # A group's update is share / probability times its change, and occurs with that probability.
            square += share * share / found.probability * float(change @ change)
            total += share * float(weight.values.sum())
        num_tokens = sum(
            found.probability * weight.num_tokens for found, weight in zip(self.combinations, weights, strict=True)
        )
        truth, variance = self.shape.gradient, square - float(update @ update)
        length = float(truth @ truth)
        mean = update * num_tokens / (self.group_size * total)
        return Bias(
            scale=float(mean @ truth) / length if length > _NOTHING**2 else math.nan,
            cosine=_cosine(mean, truth),
            estimand_cosine=_cosine(mean, self.estimand) if _is_nonzero(mean) or _is_nonzero(self.estimand) else 1.0,
            # The deviation of a random update over the length of its mean, given its mean squared length.
            noise=math.sqrt(max(variance, 0.0) / float(update @ update))
            if float(update @ update) > _NOTHING**2
            else math.inf,
        )

    def _advantages(self, estimator: Estimator) -> list[Doubles]:
        """Return the advantages of the trained tokens of each group."""
        groups = [found.group for found in self.combinations]
        config = estimator.advantages
        if estimator.rule is not None:
            rows = [estimator.rule(group) for group in groups]
        elif formula_of(config).divides_by_batch:
            # Their statistics are over a batch, which is one group here.
            rows = [compute_advantages([group], config)[0].rows for group in groups]
        else:
            rows = [found.rows for found in compute_advantages(groups, config)]
        return [_on_mask(group, values) for group, values in zip(groups, rows, strict=True)]

    def _shares(self, own: Sequence[int], num_groups: int | None) -> list[float]:
        """Return for each group its probability times its expected share of the batch's denominator.

        For a batch of ``num_groups`` groups, its denominator over the batch's is averaged over the other groups.
        """
        mean = sum(found.probability * size for found, size in zip(self.combinations, own, strict=True))
        if num_groups is None:
            return [found.probability * size / mean for found, size in zip(self.combinations, own, strict=True)]
        once: Counter[int] = Counter()
        for found, size in zip(self.combinations, own, strict=True):
            once[size] += found.probability  # type: ignore[assignment]  # a distribution over denominators
        others: Mapping[int, float] = {0: 1.0}
        for _ in range(num_groups - 1):
            sums: dict[int, float] = {}
            for (a, p), (b, q) in itertools.product(others.items(), once.items()):
                sums[a + b] = sums.get(a + b, 0.0) + p * q
            others = sums
        return [
            found.probability * num_groups * sum(p * size / max(size + rest, 1) for rest, p in others.items())
            for found, size in zip(self.combinations, own, strict=True)
        ]


@frozen(kw_only=True)
class _Member:
    """One episode as it is exported, and which of its trained tokens carry a choice."""

    episode: Episode
    places: npt.NDArray[np.int64] = field(eq=False)
    scores: Doubles = field(eq=False)
    estimand: Doubles = field(eq=False)

    @classmethod
    def create(cls, shape: Shape, played: Played, export: Mapping[str, Any]) -> _Member:
        exported = () if played.failure else export_trajectories(played.record, **export).trajectories
        episode = Episode(
            session=played.record.id,
            member=0,
            reward=played.reward,
            trajectories=exported,
            num_turns=len(played.record.interactions),
            failure=played.failure,
        )
        (episode,) = unfold_group(_group([episode])).episodes
        scores = shape.scores(played)
        places: list[int] = []
        kept: list[Doubles] = []
        estimand = np.zeros(shape.num_parameters)
        start = 0
        for row in episode.trajectories:
            turns = row.turns[row.loss_mask == 1]
            returns = row.returns[row.loss_mask == 1]
            for turn in np.unique(turns):
                first = int(np.flatnonzero(turns == turn)[0])
                score = scores[int(row.interactions[turn])]
                estimand += float(returns[first]) * score
                places.append(start + first)
                kept.append(score)
            start += len(turns)
        return cls(
            episode=episode,
            places=np.array(places, dtype=np.int64),
            scores=np.array(kept).reshape(len(kept), shape.num_parameters),
            estimand=estimand,
        )


def _group(episodes: Sequence[Episode], problem: int = 0) -> Group:
    """Return a group of episodes, each of which is a separate session."""
    members = []
    for member, episode in enumerate(episodes):
        session = SessionId(f"s{member}")
        rows = tuple(evolve(row, session=session) for row in episode.trajectories)
        members.append(evolve(episode, session=session, member=member, trajectories=rows))
    return Group(id=GroupId("g"), problem=Problem(position=problem, data={}), episodes=tuple(members))


def _on_mask(group: Group, values: Sequence[npt.NDArray[Any]]) -> Doubles:
    rows = [row for episode in group.episodes for row in episode.trajectories]
    parts = [value[row.loss_mask == 1] for row, value in zip(rows, values, strict=True)]
    return np.concatenate([*parts, np.zeros(0)]).astype(np.float64)


def _cosine(left: Doubles, right: Doubles) -> float:
    norms = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / norms if norms > _NOTHING else 0.0


def _is_nonzero(gradient: Doubles) -> bool:
    return float(np.linalg.norm(gradient)) > _NOTHING


_NOTHING = 1e-9
"""An expected update below this is rounding."""
