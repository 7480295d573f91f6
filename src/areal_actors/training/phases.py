"""The phases of a run: which objective each step has, with which settings, and the teacher of distillation.

A run is one axis of steps, cut into phases that follow one another: ``sft`` trains on conversations, ``distillation``
and ``rl`` on what agents do with the current weights. The phase of a step depends on its number only, so that every
rank of a gang, and a run that resumes, finds the same one. Each phase begins with a new optimiser.

The runner asks a teacher elsewhere for scores as part of an episode group, while the trainer trains others, so that a
step does not wait for the teacher. The trainer asks only for rows that have none yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import anyio
import numpy as np
from attrs import evolve, field, frozen
from attrs.validators import ge

from areal_actors.domain import Episode, Floats, Group, GroupId, Ints, Problem, Trajectory, unfold
from areal_actors.errors import ConfigError
from areal_actors.training.config import Aggregation, KlPlace, ObjectiveConfig, OptimizerConfig, TrainerConfig


class PhaseName(StrEnum):
    """The kinds of phases, by what their steps minimise."""

    SFT = "sft"
    """The negative log-likelihood of the answers of given conversations: a warm start."""
    DISTILLATION = "distillation"
    """The reverse KL divergence to a teacher, on what the student samples; rewards can be added."""
    RL = "rl"
    """The policy gradient of the rewards."""


@frozen(kw_only=True)
class Phase:
    """``num_steps`` steps with one objective; ``None`` is all that remain.

    ``teacher_coefficient`` and ``reward_coefficient`` weight the two parts of the advantage in a distillation phase.
    """

    name: PhaseName = PhaseName.RL
    num_steps: int | None = field(default=None)
    config: TrainerConfig = field(factory=TrainerConfig)
    teacher_coefficient: float = field(default=1.0, validator=ge(0))
    reward_coefficient: float = field(default=0.0, validator=ge(0))


def phase_of(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of ``step``, counted from 1 over all phases; the last one goes on without end."""
    end = 0
    for phase in phases:
        end += phase.num_steps or 0
        if phase.num_steps is None or step <= end:
            return phase
    return phases[-1]


def check_phases(phases: Sequence[Phase], *, has_reference: bool) -> None:
    """Raise ``ConfigError`` for settings that one of ``phases`` ignores, and for a penalty without a reference.

    All phases are checked at the start: the first one of a warm start has no penalty, and the others come hours later.
    """
    for phase in phases:
        config = phase.config
        if config.objective.kl.coefficient and not has_reference and config.lora is None:
            raise ConfigError(
                "objective.kl.coefficient: a KL penalty needs a reference model; give one, or set it to 0"
            )
        if phase.name is not PhaseName.DISTILLATION:
            continue
        if config.objective.kl.coefficient and config.objective.kl.place is KlPlace.REWARD:
            raise ConfigError(
                "objective.kl.place: reward has no effect in a distillation phase, whose advantages are those of the "
                "teacher; set it to loss, or the coefficient to 0"
            )
        if config.advantages.drop_zero_variance:
            raise ConfigError(
                "advantages.drop_zero_variance: a distillation phase trains groups without a reward signal; set it to "
                "false"
            )


def sft_phase(config: TrainerConfig, *, num_steps: int | None = None, learning_rate: float | None = None) -> Phase:
    """Return a phase of supervised steps: one update on the mean over tokens, without any policy-gradient setting."""
    return Phase(
        name=PhaseName.SFT,
        num_steps=num_steps,
        config=evolve(
            config,
            objective=ObjectiveConfig(aggregation=Aggregation.TOKEN_MEAN),
            optimizer=_optimizer(config, learning_rate),
            temperature=1.0,
            num_epochs=1,
            num_minibatches=1,
        ),
    )


def distillation_phase(
    config: TrainerConfig,
    *,
    num_steps: int | None = None,
    learning_rate: float | None = None,
    coefficient: float = 1.0,
    reward_coefficient: float = 0.0,
) -> Phase:
    """Return a phase whose advantages are ``coefficient`` times log teacher/student, plus weighted rewards."""
    return Phase(
        name=PhaseName.DISTILLATION,
        num_steps=num_steps,
        config=evolve(config, optimizer=_optimizer(config, learning_rate)),
        teacher_coefficient=coefficient,
        reward_coefficient=reward_coefficient,
    )


def supervised_group(rows: Sequence[Trajectory], *, position: int = 0) -> Group:
    """Return the rows of one conversation in the form that steps take; they are trained if the phase is ``sft``."""
    session = rows[0].session
    episode = Episode(session=session, member=0, reward=max(row.reward for row in rows), trajectories=tuple(rows))
    return Group(id=GroupId(f"sft-{position}"), problem=Problem(position=position, data={}), episodes=(episode,))


def _optimizer(config: TrainerConfig, learning_rate: float | None) -> OptimizerConfig:
    return config.optimizer if learning_rate is None else evolve(config.optimizer, learning_rate=learning_rate)


Score = Callable[[Ints], Awaitable[Floats]]
"""Returns the log-probability of each token of a sequence, float32 [T]."""


@frozen(kw_only=True)
class GroupTeacher:
    """A teacher for the groups that the distillation steps ``first_step`` to ``last_step`` train."""

    score: Score
    first_step: int
    last_step: int

    async def teach(self, group: Group, *, version: int, max_staleness: int = 0) -> Group:
        """Return the group with scores if it may be trained in such a step, or else unchanged.

        The group is trained at ``version`` or up to ``max_staleness`` versions later.
        """
        is_taught = version + 1 <= self.last_step and version + 1 + max_staleness >= self.first_step
        return await teach_group(group, self.score) if is_taught else group


async def teach_group(group: Group, score: Score) -> Group:
    """Return the group with ``teacher_logprobs`` in every row that has trained tokens and no scores yet.

    A sequence that another one begins with is not sent: of a conversation of many turns, the longest is enough.
    """
    rows = [row for row in group.rows if row.num_trained_tokens and row.teacher_logprobs is None]
    if not rows:
        return group
    branches = [branch.row.input_ids for row in rows for branch in unfold(row)]
    longest: list[Ints] = []
    for token_ids in sorted(branches, key=len, reverse=True):
        if not any(_begins_with(other, token_ids) for other in longest):
            longest.append(token_ids)
    scored: dict[bytes, Floats] = {}

    async def ask(token_ids: Ints) -> None:
        scored[token_ids.tobytes()] = await score(token_ids)

    async with anyio.create_task_group() as tasks:
        for token_ids in longest:
            tasks.start_soon(ask, token_ids)

    def find(token_ids: Ints) -> Floats:
        whole = next(other for other in longest if _begins_with(other, token_ids))
        return scored[whole.tobytes()][: len(token_ids)]

    taught = {}
    for row in rows:
        values = np.zeros(row.num_tokens, dtype=np.float32)
        for branch in unfold(row):
            values[branch.places] = find(branch.row.input_ids)
        taught[id(row)] = evolve(row, teacher_logprobs=np.where(row.loss_mask == 1, values, 0.0))
    episodes = tuple(
        evolve(episode, trajectories=tuple(taught.get(id(row), row) for row in episode.trajectories))
        for episode in group.episodes
    )
    return evolve(group, episodes=episodes)


def _begins_with(whole: Ints, part: Ints) -> bool:
    return bool(np.array_equal(whole[: len(part)], part))
