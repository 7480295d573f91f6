"""Conversion of the results of rollout workflows to training rows: each sample with its reward.

``parse_rollout`` takes tensors or interactions. Tensors hold one sample per row; interactions are the turns of one
sample, whose reward is the sum assigned to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, frozen

from areal_actors.cache import from_tensors, parse_reward
from areal_actors.cache.interactions import InteractionWithTokenLogpReward
from areal_actors.domain import Ints, SamplingDistribution, SessionId, Trajectory
from areal_actors.errors import EpisodeError, ExportError, RewardError


@frozen(kw_only=True)
class Sample:
    """One sample: its rows, its reward before any propagation, and the number of its turns."""

    trajectories: tuple[Trajectory, ...]
    reward: float
    num_turns: int


def parse_rollout(
    result: Any,
    *,
    session: SessionId,
    name: str = "the workflow",
    version: int | None = None,
    sampling_of: Callable[[Ints], SamplingDistribution | None] = lambda _: None,
    vocab_size: int | None = None,
) -> tuple[Sample, ...]:
    """Return the samples of a result that is not ``None``.

    Args:
        result: the return value of ``arun_episode``.
        session: name for the rows of tensors.
        name: name of the workflow, for errors.
        version: version of the weights that sampled, if tensors do not say.
        sampling_of: finds how a turn with these ids was sampled, if tensors do not say.
        vocab_size: exclusive bound on ids; not checked if ``None``.

    Raises:
        EpisodeError: it is neither kind of dictionary, or one with a mistake.
    """
    if not isinstance(result, Mapping):
        raise EpisodeError(
            f"{name} returned a {type(result).__name__}; return a dict of tensors, a dict of interactions, or None."
        )
    try:
        if is_interactions(result):
            samples: tuple[Sample, ...] = (_join_interactions(result, session),)
        else:
            rows = from_tensors(result, session=session, version=version, sampling_of=sampling_of)
            # Each row is a sample; several samples get a session each, by which the report tells them apart.
            names = [session] if len(rows) == 1 else [SessionId(f"{session}-{index}") for index in range(len(rows))]
            samples = tuple(
                Sample(trajectories=(evolve(row, session=name),), reward=row.reward, num_turns=len(row.interactions))
                for row, name in zip(rows, names, strict=True)
            )
    except (ExportError, RewardError) as error:
        raise EpisodeError(f"{name} returned what cannot be trained. {error}") from error
    largest = max((int(row.input_ids.max(initial=0)) for s in samples for row in s.trajectories), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise EpisodeError(
            f"{name} returned what cannot be trained. There is an id {largest}, and the model's ids are below "
            f"{vocab_size}."
        )
    return samples


def is_interactions(result: Mapping[str, Any]) -> bool:
    """Return whether the values are interactions. An empty dictionary counts as interactions: nothing was completed."""
    return all(isinstance(value, InteractionWithTokenLogpReward) for value in result.values())


def _join_interactions(result: Mapping[str, InteractionWithTokenLogpReward], session: SessionId) -> Sample:
    if not result:
        raise ExportError("There are no interactions in it; return None to reject an episode.")
    rows: list[Trajectory] = []
    assigned: list[float | None] = []
    for name, interaction in result.items():
        if interaction.row is not None:
            rows.append(interaction.row)
        else:
            rows.append(interaction.create_row(session=session, name=name))
        # An interaction that a workflow created itself has a reward only.
        is_own = interaction.row is None and interaction.assigned_reward is None
        assigned.append(interaction.reward if is_own else interaction.assigned_reward)
    # A result may have only the last turn of a row: the turns that lead to it count as well, and their rewards.
    # One that a workflow created itself need not have an id.
    seen: set[str | int] = {turn.interaction_id or id(turn) for turn in result.values()}
    ancestors: list[InteractionWithTokenLogpReward] = []
    for start in (turn for interaction in result.values() for turn in (interaction.parent, *interaction.others)):
        turn = start
        while turn is not None and (turn.interaction_id or id(turn)) not in seen:
            seen.add(turn.interaction_id or id(turn))
            ancestors.append(turn)
            turn = turn.parent
    assigned += [turn.assigned_reward for turn in ancestors]
    total = parse_reward(sum(reward or 0.0 for reward in assigned))
    return Sample(trajectories=tuple(rows), reward=total, num_turns=len(result) + len(ancestors))
