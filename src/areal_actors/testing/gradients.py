"""The exact bias of an estimator's expected update, by enumeration of small episodes.

A ``Shape`` is a small agent whose choices can be counted: a function that asks for turns, each of which picks one of
a few options with known probabilities, and returns the reward as an agent does. ``enumerate_episodes`` plays it along
every path, and keeps for each one its probability, its session record and the gradient of each choice's
log-probability with respect to the policy (a table of logits, one for each state and option). From that follow

* the true gradient of the expected episode reward, ``sum p(episode) reward sum_t grad log pi(a_t)``;
* the expected update of an estimator, ``sum p(group) sum_t weight_t A_t grad log pi(a_t)`` over all groups of n
  episodes, whose rows, advantages and weights are those of the library: ``export_trajectories``,
  ``compute_advantages``, ``token_weights``.

::

    from areal_actors.testing.gradients import SHAPES, Estimator, measure

    measure(SHAPES["sub-agent decides"], Estimator(), group_size=4)   # Bias(scale=…, cosine=…)

Members of a group are exchangeable, so groups are enumerated by how often each episode occurs in them: eight members
with four episodes are 165 groups instead of 65,536. No sampling is involved, and nothing here needs torch.

The first token of a turn carries its choice; the others follow from it with probability 1, and have no gradient.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from areal_actors.cache.export import export_trajectories
from areal_actors.cache.rewards import total_reward
from areal_actors.domain import (
    Completion,
    Episode,
    FinishReason,
    ForkReason,
    Group,
    GroupId,
    Interaction,
    InteractionId,
    InteractionStatus,
    Problem,
    RewardScope,
    SessionId,
    SessionRecord,
)
from areal_actors.domain.branches import unfold_group
from areal_actors.domain.truncation import mask_truncated
from areal_actors.training.advantages import compute_advantages
from areal_actors.training.batch import Batch, TrainingRow
from areal_actors.training.config import AdvantageConfig, Aggregation, Normalisation, ObjectiveConfig

__all__ = ["EXACT", "SHAPES", "Bias", "Estimator", "Play", "Shape", "Turn", "enumerate_episodes", "measure"]

Doubles = npt.NDArray[np.float64]
Rule = Callable[[Group], Sequence[npt.NDArray[Any]]]
"""Maps a group to the advantages [T] of its rows, in the order of episodes and rows."""

EXACT = 0.999999
"""The cosine above which a direction counts as right: advantages and weights are float32."""
_PROMPT = 2
"""Tokens that are read before each answer."""
_BATCHWISE = (Normalisation.REINFORCE_PLUS_PLUS, Normalisation.GROUP_MEAN_BATCH_STD)


# ------------------------------------------------------------------------------------------------- playing


@frozen(kw_only=True)
class Turn:
    """A turn that was taken: its number in the session, and the option that was picked."""

    number: int
    option: int


@frozen(kw_only=True)
class _Choice:
    """The policy's decision in a turn. ``state`` and its number of options are a block of the policy's logits."""

    state: str
    option: int
    probabilities: tuple[float, ...]


@define
class Play:
    """One episode along a path of choices, as the agent of a ``Shape`` sees it.

    Choices beyond ``path`` take their first option; ``num_options`` records how many there were, so that other paths
    can be tried.
    """

    path: tuple[int, ...] = ()
    num_options: list[int] = field(factory=list)
    probability: float = 1.0
    interactions: list[Interaction] = field(factory=list)
    choices: list[_Choice | None] = field(factory=list)
    rewards: dict[Turn, float] = field(factory=dict)
    failure: str | None = None

    def turn(
        self,
        state: str,
        probabilities: Sequence[float] = (1.0,),
        *,
        after: Turn | None = None,
        lengths: Sequence[int] = (),
        is_fork: bool = False,
        cut: Sequence[int] = (),
        tag: str | None = None,
    ) -> Turn:
        """Ask the policy, which picks one of the options.

        Args:
            state: The policy's parameters: equal names share them.
            probabilities: Those of the options; a single option is not a choice.
            after: The turn that this one continues, ``None`` for a new conversation.
            lengths: Tokens of the answer for each option, 2 without them.
            is_fork: Whether the prompt does not extend the tokens of the turn that it continues.
            cut: The options whose answer ends by its length.
            tag: The agent's name.
        """
        option = self._pick(probabilities)
        number = len(self.interactions)
        parent = None if after is None else self.interactions[after.number]
        token_parent = None if is_fork else parent
        num_tokens = lengths[option] if lengths else 2
        interaction = Interaction(
            id=InteractionId(str(number)),
            order=number,
            parent=None if parent is None else parent.id,
            token_parent=None if token_parent is None else token_parent.id,
            fork=None
            if token_parent is not None
            else ForkReason.TEMPLATE_REWROTE_HISTORY
            if parent
            else ForkReason.ROOT,
            prompt_suffix=[1] * _PROMPT,
            num_prompt_tokens=_PROMPT + (0 if token_parent is None else _num_tokens(token_parent)),
            completion=Completion(
                token_ids=[10 + option] * num_tokens,
                logprobs=[-1.0] * num_tokens,
                raw_logprobs=[-1.0] * num_tokens,
                versions=[0] * num_tokens,
                finish=FinishReason.LENGTH if option in cut else FinishReason.STOP,
            ),
            status=InteractionStatus.COMPLETED,
            completed_order=number,
            tag=tag,
        )
        self.interactions.append(interaction)
        is_choice = len(probabilities) > 1
        self.choices.append(
            _Choice(state=state, option=option, probabilities=tuple(probabilities)) if is_choice else None
        )
        return Turn(number=number, option=option)

    def chance(self, probabilities: Sequence[float]) -> int:
        """Pick by the environment, whose probabilities do not depend on the policy."""
        return self._pick(probabilities)

    def reward(self, turn: Turn, reward: float) -> None:
        """Reward one answer while the episode runs."""
        self.rewards[turn] = reward

    def fail(self) -> None:
        """End the episode as a failed one, which trains nothing."""
        self.failure = "failed"

    def _pick(self, probabilities: Sequence[float]) -> int:
        place = len(self.num_options)
        option = self.path[place] if place < len(self.path) else 0
        self.num_options.append(len(probabilities))
        self.probability *= probabilities[option]
        return option


def _num_tokens(turn: Interaction) -> int:
    assert turn.completion is not None, "every turn that is played is completed"
    return turn.num_prompt_tokens + turn.completion.token_ids.size


Script = Callable[[Play], "float | Mapping[Turn, float]"]
"""An agent: takes turns, and returns the reward of the last one or a reward for each of several, as real agents do."""


@frozen(kw_only=True)
class Shape:
    """A small agent and its problems, which are drawn with equal probability.

    ``note`` explains why an estimator may differ from the gradient of the episode's reward by its configuration (it
    estimates another quantity); ``None`` if it may not. ``is_selected`` means that the policy's choices decide which
    episodes are trained at all, so that no advantage can compensate for it.
    """

    name: str
    statement: str
    problems: tuple[Script, ...]
    note: str | None = None
    is_selected: bool = False

    @cached_property
    def episodes(self) -> tuple[tuple[_Played, ...], ...]:
        """All episodes of each problem."""
        return tuple(enumerate_episodes(script) for script in self.problems)

    @cached_property
    def places(self) -> Mapping[str, slice]:
        """The place of each state's logits among the parameters."""
        sizes = {
            choice.state: len(choice.probabilities)
            for played in self.episodes
            for episode in played
            for choice in episode.choices
            if choice is not None
        }
        ends = list(itertools.accumulate(sizes.values()))
        return {state: slice(end - size, end) for (state, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def num_parameters(self) -> int:
        """The total number of logits."""
        return sum(place.stop - place.start for place in self.places.values())

    def scores(self, played: _Played) -> Doubles:
        """Return the gradient of each turn's log-probability, float64 [turns, parameters]."""
        result = np.zeros((len(played.choices), self.num_parameters))
        for row, choice in zip(result, played.choices, strict=True):
            if choice is not None:
                block = self.places[choice.state]
                row[block] = -np.array(choice.probabilities)
                row[block.start + choice.option] += 1.0
        return result

    @cached_property
    def gradient(self) -> Doubles:
        """The true gradient of the expected reward of an episode, float64 [parameters]. A failed episode earns 0."""
        return _total(
            episode.probability * episode.reward * self.scores(episode).sum(axis=0) / len(self.problems)
            for played in self.episodes
            for episode in played
        )


@frozen(kw_only=True)
class _Played:
    """One possible episode."""

    probability: float
    record: SessionRecord
    choices: tuple[_Choice | None, ...]
    failure: str | None

    @property
    def reward(self) -> float:
        return 0.0 if self.failure else total_reward(self.record)


def enumerate_episodes(script: Script) -> tuple[_Played, ...]:
    """Return every episode that an agent can have, with its probability; they add up to 1."""
    found: list[_Played] = []
    paths: list[tuple[int, ...]] = [()]
    while paths:
        path = paths.pop()
        play = Play(path)
        rewards = script(play)
        taken = path + (0,) * (len(play.num_options) - len(path))
        for place in range(len(path), len(taken)):
            paths += [(*taken[:place], option) for option in range(1, play.num_options[place])]
        found.append(
            _Played(
                probability=play.probability,
                record=_record(play, rewards),
                choices=tuple(play.choices),
                failure=play.failure,
            )
        )
    return tuple(found)


def _record(play: Play, rewards: float | Mapping[Turn, float]) -> SessionRecord:
    """Return the session as the proxy leaves it: a float is the episode's outcome, set on the last answer."""
    by_answer = dict(rewards) if isinstance(rewards, Mapping) else {}
    interactions = list(play.interactions)
    for turn, reward in {**play.rewards, **by_answer}.items():
        interactions[turn.number] = evolve(interactions[turn.number], reward=reward, reward_scope=RewardScope.ANSWER)
    if not isinstance(rewards, Mapping) and interactions:
        interactions[-1] = evolve(interactions[-1], reward=rewards, reward_scope=RewardScope.EPISODE)
    return SessionRecord(id=SessionId("s"), interactions=tuple(interactions), is_ended=True)


# ---------------------------------------------------------------------------------------------- estimators


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
    discount or a mean over branches may make another thing than the episode's reward. ``noise`` is the standard
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
        rows = _training_rows(group)
        kept = [evolve(row, trajectory=mask_truncated(row.trajectory)) for row in rows] if masks_truncated else rows
        batch = Batch.create(kept, aggregation=aggregation)
        values = [np.zeros(row.trajectory.num_tokens) for row in kept]
        remaining = batch.weights
        for row, value in zip(kept, values, strict=True):
            num_tokens = row.trajectory.num_trained_tokens
            value[row.trajectory.loss_mask == 1] = remaining[:num_tokens]
            remaining = remaining[num_tokens:]
        return cls(
            values=_on_mask(group, values),
            num_tokens=len(batch.weights),
            denominator=_denominator(batch, aggregation),
        )


def _denominator(batch: Batch, aggregation: Aggregation) -> int:
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return len(batch.weights)
        case Aggregation.SEQUENCE_MEAN | Aggregation.FIXED_LENGTH:
            return len(batch.rows)
        case Aggregation.EPISODE_MEAN | Aggregation.EPISODE_SUM:
            return len({row.episode for row in batch.rows})
        case _:
            return 1


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
                probability = share * _multinomial(chosen, [episode.probability for episode in played])
                combinations.append(_combine([members[index] for index in chosen], probability, problem))
        return cls(shape=shape, group_size=group_size, estimand=estimand, combinations=tuple(combinations))

    def measure(self, estimator: Estimator, *, num_groups: int | None = None) -> Bias:
        """Return the bias under this export; see the function ``measure``."""
        weights = self._weights_of(estimator.aggregation, masks_truncated=estimator.masks_truncated)
        advantages = self._advantages(estimator)
        shares = self._shares([weight.denominator for weight in weights], num_groups)
        update = np.zeros(self.shape.num_parameters)
        square = total = 0.0
        for found, weight, advantage, share in zip(self.combinations, weights, advantages, shares, strict=True):
            change = (weight.values[found.places] * advantage[found.places]) @ found.scores
            update += share * change
            square += share * share / found.probability * float(change @ change)
            total += share * float(weight.values.sum())
        num_tokens = sum(
            found.probability * weight.num_tokens for found, weight in zip(self.combinations, weights, strict=True)
        )
        return self._compare(update * num_tokens / (self.group_size * total), noise=_noise(update, square))

    def _compare(self, update: Doubles, *, noise: float) -> Bias:
        truth = self.shape.gradient
        length = float(truth @ truth)
        return Bias(
            scale=float(update @ truth) / length if length > _NOTHING**2 else math.nan,
            cosine=_cosine(update, truth),
            estimand_cosine=_cosine(update, self.estimand),
            noise=noise,
        )

    def _weights_of(self, aggregation: Aggregation, *, masks_truncated: bool) -> list[_Weights]:
        key = (aggregation, masks_truncated)
        if key not in self._weights:
            self._weights[key] = [
                _Weights.create(found.group, aggregation, masks_truncated=masks_truncated)
                for found in self.combinations
            ]
        return self._weights[key]

    def _advantages(self, estimator: Estimator) -> list[Doubles]:
        """Return the advantages of the trained tokens of each group."""
        groups = [found.group for found in self.combinations]
        config = estimator.advantages
        if estimator.rule is not None:
            rows = [estimator.rule(group) for group in groups]
        elif config.normalisation in _BATCHWISE:
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
            others = _convolve(others, once)
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
    def create(cls, shape: Shape, played: _Played, export: Mapping[str, Any]) -> _Member:
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


def _combine(members: Sequence[_Member], probability: float, problem: int) -> _Combination:
    counts = [sum(row.num_trained_tokens for row in member.episode.trajectories) for member in members]
    starts = itertools.accumulate(counts, initial=0)
    return _Combination(
        probability=probability,
        group=_group([member.episode for member in members], problem),
        places=np.concatenate([member.places + start for member, start in zip(members, starts, strict=False)]),
        scores=np.concatenate([member.scores for member in members]),
    )


def _group(episodes: Sequence[Episode], problem: int = 0) -> Group:
    """Return a group of episodes, each of which is a separate session."""
    return Group(
        id=GroupId("g"),
        problem=Problem(position=problem, data={}),
        episodes=tuple(_as_member(episode, member) for member, episode in enumerate(episodes)),
    )


def _as_member(episode: Episode, member: int) -> Episode:
    session = SessionId(f"s{member}")
    rows = tuple(evolve(row, session=session) for row in episode.trajectories)
    return evolve(episode, session=session, member=member, trajectories=rows)


def _training_rows(group: Group) -> list[TrainingRow]:
    return [
        TrainingRow(trajectory=row, advantages=np.zeros(row.num_tokens), episode=index)
        for index, episode in enumerate(group.episodes)
        for row in episode.trajectories
    ]


def _on_mask(group: Group, values: Sequence[npt.NDArray[Any]]) -> Doubles:
    rows = [row for episode in group.episodes for row in episode.trajectories]
    parts = [value[row.loss_mask == 1] for row, value in zip(rows, values, strict=True)]
    return np.concatenate([*parts, np.zeros(0)]).astype(np.float64)


def _multinomial(chosen: Sequence[int], probabilities: Sequence[float]) -> float:
    counts = Counter(chosen)
    orders = math.factorial(len(chosen)) // math.prod(math.factorial(count) for count in counts.values())
    return orders * math.prod(probabilities[index] ** count for index, count in counts.items())


def _convolve(left: Mapping[int, float], right: Mapping[int, float]) -> Mapping[int, float]:
    result: dict[int, float] = {}
    for (a, p), (b, q) in itertools.product(left.items(), right.items()):
        result[a + b] = result.get(a + b, 0.0) + p * q
    return result


def _cosine(left: Doubles, right: Doubles) -> float:
    norms = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / norms if norms > _NOTHING else 0.0


def _noise(update: Doubles, square: float) -> float:
    """Return the standard deviation of a random update over its mean ``update``, given its mean squared length."""
    length = float(update @ update)
    return math.sqrt(max(square - length, 0.0) / length) if length > _NOTHING**2 else math.inf


_NOTHING = 1e-9
"""An expected update below this is rounding."""


def _total(vectors: Any) -> Doubles:
    result: Doubles = np.sum(list(vectors), axis=0)
    return result


# -------------------------------------------------------------------------------------------------- shapes


_LOW, _EVEN = (0.7, 0.3), (0.4, 0.6)
_MAJORITY = 2


def _chain(play: Play) -> float:
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    return float(first.option and second.option)


def _chain_of_values(play: Play) -> float:
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    return 2.0 * first.option + 0.5 * second.option


def _rewritten_chain(play: Play) -> float:
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first, is_fork=True)
    return float(first.option or second.option)


def _first_turn(play: Play) -> float:
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    play.turn("third", after=second)
    return float(first.option)


def _sub_agent(play: Play) -> float:
    found = play.turn("sub-agent", (0.5, 0.5))
    play.turn("main", _EVEN)
    return float(found.option)


def _both_decide(play: Play) -> float:
    plan = play.turn("plan", _EVEN, tag="main")
    found = play.turn("sub-agent", _LOW, tag="sub")
    play.turn("end", after=plan, tag="main")
    return 0.5 * plan.option + 1.0 * found.option


def _side_call(play: Play) -> float:
    play.turn("title", _EVEN)
    return float(play.turn("answer", _LOW).option)


def _compaction(play: Play) -> float:
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    third = play.turn("after", _EVEN)
    return float(first.option + second.option + third.option >= _MAJORITY)


def _asked_again(play: Play) -> float:
    first = play.turn("first", _LOW)
    play.turn("thrown away", _EVEN, after=first)
    last = play.turn("kept", _EVEN, after=first)
    return float(first.option and last.option)


def _branches(play: Play) -> float:
    first = play.turn("first", _LOW)
    left = play.turn("left", _EVEN, after=first)
    right = play.turn("right", _EVEN, after=first)
    return float(first.option and (left.option or right.option))


def _graded_branches(play: Play) -> Mapping[Turn, float]:
    first = play.turn("first", _LOW)
    left = play.turn("left", _EVEN, after=first)
    right = play.turn("right", _LOW, after=first)
    return {left: float(first.option and left.option), right: float(right.option)}


def _choices(play: Play) -> float:
    picked = [play.turn("choice", _LOW).option for _ in range(2)]
    return float(max(picked))


def _attempts(play: Play) -> float:
    return sum(play.turn(f"attempt {number}", _LOW).option for number in range(2)) / 2


def _graded(play: Play) -> Mapping[Turn, float]:
    attempts = [play.turn(f"attempt {number}", _LOW) for number in range(2)]
    return {turn: float(turn.option) for turn in attempts}


def _dense(play: Play) -> Mapping[Turn, float]:
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    return {first: float(first.option), second: 2.0 * float(first.option == second.option)}


def _partly_rewarded(play: Play) -> Mapping[Turn, float]:
    found = play.turn("sub-agent", _LOW)
    answer = play.turn("main", _EVEN)
    return {found: 0.5 * found.option, answer: float(answer.option)}


def _rewarded_if_right(play: Play) -> Mapping[Turn, float]:
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN)
    return {first: 1.0, second: float(second.option)} if first.option else {second: float(second.option)}


def _picks_an_agent(play: Play) -> float:
    plan = play.turn("plan", _EVEN, tag="main")
    tag = ("slow", "fast")[plan.option]
    found = play.turn(tag, _LOW if plan.option else _EVEN, tag=tag)
    return float(found.option)


def _outcome_and_reward(play: Play) -> float:
    found = play.turn("sub-agent", _LOW)
    play.reward(found, 0.5 * found.option)
    answer = play.turn("main", _EVEN)
    return float(found.option and answer.option)


def _truncated(play: Play) -> float:
    answer = play.turn("answer", (0.5, 0.3, 0.2), lengths=(2, 3, 9), cut=(2,))
    return float(answer.option == 1)


def _lengths(play: Play) -> float:
    first = play.turn("first", _LOW, lengths=(2, 8))
    second = play.turn("second", _EVEN, after=first, lengths=(1, 3))
    return first.option + 0.5 * second.option


def _stops(play: Play) -> float:
    first = play.turn("go on", _EVEN)
    if first.option == 0:
        return 0.5
    return float(play.turn("second", _LOW, after=first).option)


def _sub_agents_when_wanted(play: Play) -> float:
    plan = play.turn("plan", _EVEN)
    found = play.turn("sub-agent", _LOW).option if plan.option else 0
    play.turn("end", after=plan)
    return 0.25 + 0.75 * found - 0.25 * plan.option


def _fails_by_chance(play: Play) -> float:
    found = play.turn("first", _LOW)
    if play.chance((0.75, 0.25)):
        play.fail()
        return 0.0
    play.turn("main", _EVEN)
    return float(found.option)


def _fails_by_choice(play: Play) -> float:
    first = play.turn("first", (0.2, 0.5, 0.3))
    if not first.option:
        play.fail()
        return 0.0
    return float(first.option - 1)


def _easy(play: Play) -> float:
    return float(play.turn("easy", (0.1, 0.9)).option)


def _hard(play: Play) -> float:
    return float(play.turn("hard", _EVEN).option)


_ALL = (
    Shape(name="one chain", statement="Two turns, both of which have to be right.", problems=(_chain,)),
    Shape(name="one chain, four rewards", statement="Two turns that earn 2 and 0.5.", problems=(_chain_of_values,)),
    Shape(
        name="rewritten history",
        statement="Two turns, the second of which does not extend the tokens of the first.",
        problems=(_rewritten_chain,),
    ),
    Shape(name="first turn decides", statement="Three turns, of which the first decides.", problems=(_first_turn,)),
    Shape(
        name="sub-agent decides",
        statement="A sub-agent decides; then the main agent answers in another conversation.",
        problems=(_sub_agent,),
    ),
    Shape(
        name="main and sub-agent decide",
        statement="The main agent plans, a sub-agent works, the main agent ends its conversation.",
        problems=(_both_decide,),
    ),
    Shape(
        name="sub-agent when wanted",
        statement="The policy decides whether there is a sub-agent at all.",
        problems=(_sub_agents_when_wanted,),
    ),
    Shape(
        name="side call",
        statement="A call that changes nothing stands before the answer that decides.",
        problems=(_side_call,),
    ),
    Shape(
        name="compaction",
        statement="Two turns, then a summary takes their place and a third follows; two of three have to be right.",
        problems=(_compaction,),
    ),
    Shape(
        name="asked again",
        statement="The second question is asked twice, and only the second answer to it counts.",
        problems=(_asked_again,),
    ),
    Shape(
        name="branches",
        statement="A turn is continued twice; one number is returned, which depends on both.",
        problems=(_branches,),
    ),
    Shape(
        name="graded branches",
        statement="A turn is continued twice, and each continuation has a reward.",
        problems=(_graded_branches,),
        note="The mean over branches halves what the first turn is credited with.",
    ),
    Shape(name="choices", statement="Two choices of one request; the better one counts.", problems=(_choices,)),
    Shape(name="attempts", statement="Two conversations; their mean counts.", problems=(_attempts,)),
    Shape(name="graded attempts", statement="Two conversations with a reward each.", problems=(_graded,)),
    Shape(name="dense rewards", statement="Two turns with a reward each.", problems=(_dense,)),
    Shape(
        name="rewards of two agents",
        statement="A sub-agent and the main agent have a reward each.",
        problems=(_partly_rewarded,),
    ),
    Shape(
        name="rewarded if right",
        statement="Two conversations; the agent rewards the first one only where it was right.",
        problems=(_rewarded_if_right,),
    ),
    Shape(
        name="the policy picks an agent",
        statement="The main agent picks one of two sub-agents, which decides.",
        problems=(_picks_an_agent,),
    ),
    Shape(
        name="outcome and a reward",
        statement="A sub-agent has a reward, and the number that is returned depends on it and on the main agent.",
        problems=(_outcome_and_reward,),
        note="A conversation in which an answer was rewarded is credited with that, and not with the outcome.",
    ),
    Shape(
        name="cut answers",
        statement="One of three answers is long, is cut and earns nothing.",
        problems=(_truncated,),
    ),
    Shape(name="long answers win", statement="What earns more is four times as long.", problems=(_lengths,)),
    Shape(name="the policy stops", statement="The policy ends the episode or goes on.", problems=(_stops,)),
    Shape(
        name="members fail by chance",
        statement="A quarter of the episodes fails, whatever the policy does.",
        problems=(_fails_by_chance,),
    ),
    Shape(
        name="members fail by choice",
        statement="One of three answers makes the episode fail, which trains nothing.",
        problems=(_fails_by_choice,),
        note="A failed episode is in no statistic, so that what fails is not learnt to be avoided.",
        is_selected=True,
    ),
    Shape(name="two problems", statement="One is solved nine times in ten, the other six.", problems=(_easy, _hard)),
)

SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in _ALL}
"""The shapes of the table, by name."""
