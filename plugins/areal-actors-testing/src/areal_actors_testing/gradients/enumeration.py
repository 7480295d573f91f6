"""Small agents whose choices can be counted, and every episode that they can have.

A ``Shape`` is an agent: a function that asks for turns, each of which picks one of a few options with known
probabilities, and returns the reward as an agent does. ``enumerate_episodes`` plays it along every path, and keeps for
each one its probability, its session record and the gradient of each choice's log-probability with respect to the
policy (a table of logits, one for each state and option).

The first token of a turn carries its choice; the others follow from it with probability 1, and have no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from areal_actors.cache.rewards import total_reward
from areal_actors.domain import (
    Completion,
    FinishReason,
    ForkReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    RewardScope,
    SessionId,
    SessionRecord,
)

Doubles = npt.NDArray[np.float64]

_PROMPT = 2
"""Tokens that are read before each answer."""


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
        num_before = 0
        if token_parent is not None:
            assert token_parent.completion is not None, "every turn that is played is completed"
            num_before = token_parent.num_prompt_tokens + token_parent.completion.token_ids.size
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
            num_prompt_tokens=_PROMPT + num_before,
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
    def episodes(self) -> tuple[tuple[Played, ...], ...]:
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

    def scores(self, played: Played) -> Doubles:
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
        terms = [
            episode.probability * episode.reward * self.scores(episode).sum(axis=0) / len(self.problems)
            for played in self.episodes
            for episode in played
        ]
        gradient: Doubles = np.sum(terms, axis=0)
        return gradient


@frozen(kw_only=True)
class Played:
    """One possible episode."""

    probability: float
    record: SessionRecord
    choices: tuple[_Choice | None, ...]
    failure: str | None

    @property
    def reward(self) -> float:
        """The episode's reward; 0 for a failed one."""
        return 0.0 if self.failure else total_reward(self.record)


def enumerate_episodes(script: Script) -> tuple[Played, ...]:
    """Return every episode that an agent can have, with its probability; they add up to 1."""
    found: list[Played] = []
    paths: list[tuple[int, ...]] = [()]
    while paths:
        path = paths.pop()
        play = Play(path)
        rewards = script(play)
        taken = path + (0,) * (len(play.num_options) - len(path))
        # The other options of each choice that this path left at its first one.
        for place in range(len(path), len(taken)):
            paths += [(*taken[:place], option) for option in range(1, play.num_options[place])]
        # As the proxy leaves the session: a float is the episode's outcome, set on the last answer.
        by_answer = play.rewards | (dict(rewards) if isinstance(rewards, Mapping) else {})
        interactions = list(play.interactions)
        for turn, reward in by_answer.items():
            interactions[turn.number] = evolve(
                interactions[turn.number], reward=reward, reward_scope=RewardScope.ANSWER
            )
        if not isinstance(rewards, Mapping) and interactions:
            interactions[-1] = evolve(interactions[-1], reward=rewards, reward_scope=RewardScope.EPISODE)
        found.append(
            Played(
                probability=play.probability,
                record=SessionRecord(id=SessionId("s"), interactions=tuple(interactions), is_ended=True),
                choices=tuple(play.choices),
                failure=play.failure,
            )
        )
    return tuple(found)
