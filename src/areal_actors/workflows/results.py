"""Conversion of the result of a rollout workflow to training rows, each sample with its reward.

Tensors hold one sample per row. Interactions are the turns of one sample, whose reward is the sum assigned to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from areal_actors.cache import from_tensors, parse_reward
from areal_actors.domain import InteractionId, Ints, SamplingDistribution, SessionId, Trajectory, TurnInfo
from areal_actors.errors import EpisodeError, ExportError, RewardError
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward, ModelResponse
from areal_actors.workflows.rollout import is_interactions

__all__ = ["Sample", "parse_rollout"]


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
            samples: tuple[Sample, ...] = (_of_interactions(result, session),)
        else:
            rows = from_tensors(result, session=session, version=version, sampling_of=sampling_of)
            samples = _of_tensors(rows, session)
        _check_ids(samples, vocab_size)
    except (ExportError, RewardError) as error:
        raise EpisodeError(f"{name} returned what cannot be trained. {error}") from error
    return samples


def _check_ids(samples: tuple[Sample, ...], vocab_size: int | None) -> None:
    largest = max((int(row.input_ids.max(initial=0)) for s in samples for row in s.trajectories), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise ExportError(f"There is an id {largest}, and the model's ids are below {vocab_size}.")


def _of_tensors(rows: Sequence[Trajectory], session: SessionId) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            trajectories=(evolve(row, session=_part(session, index, of=len(rows))),),
            reward=row.reward,
            num_turns=len(row.interactions),
        )
        for index, row in enumerate(rows)
    )


def _part(session: SessionId, index: int, *, of: int) -> SessionId:
    return session if of == 1 else SessionId(f"{session}-{index}")


def _of_interactions(result: Mapping[str, InteractionWithTokenLogpReward], session: SessionId) -> Sample:
    if not result:
        raise ExportError("There are no interactions in it; return None to reject an episode.")
    rows = tuple(_row(name, interaction, session) for name, interaction in result.items())
    ancestors = _ancestors(result)
    assigned = [*map(_assigned, result.values()), *(turn.assigned_reward or 0.0 for turn in ancestors)]
    return Sample(trajectories=rows, reward=parse_reward(sum(assigned)), num_turns=len(result) + len(ancestors))


def _ancestors(result: Mapping[str, InteractionWithTokenLogpReward]) -> list[InteractionWithTokenLogpReward]:
    """Return the turns that lead to a turn in ``result`` but are missing there: it has only the last turn of a row."""
    seen = {interaction.interaction_id for interaction in result.values()}
    found: list[InteractionWithTokenLogpReward] = []
    starts = [turn for interaction in result.values() for turn in (interaction.parent, *interaction.others)]
    for start in starts:
        turn = start
        while turn is not None and turn.interaction_id not in seen:
            seen.add(turn.interaction_id)
            found.append(turn)
            turn = turn.parent
    return found


def _assigned(interaction: InteractionWithTokenLogpReward) -> float:
    """Return the assigned reward; for an interaction that a workflow created itself, its reward."""
    is_own = interaction.row is None and interaction.assigned_reward is None
    return (interaction.reward if is_own else interaction.assigned_reward) or 0.0


def _row(name: str, interaction: InteractionWithTokenLogpReward, session: SessionId) -> Trajectory:
    if interaction.row is not None:
        return interaction.row
    if interaction.model_response is None:
        raise ExportError(f"Interaction {name} has neither a training row nor a model_response to make one of.")
    return _row_of_response(interaction.model_response, InteractionId(name), interaction.reward or 0.0, session)


def _row_of_response(response: ModelResponse, name: InteractionId, reward: float, session: SessionId) -> Trajectory:
    num_prompt, num_output = response.input_len, response.output_len
    if {num_output} != {len(response.output_logprobs), len(response.output_versions)} or not num_prompt:
        raise ExportError(f"The tokens, logprobs and versions of interaction {name} do not fit together.")
    is_output = np.arange(num_prompt + num_output) >= num_prompt
    return Trajectory(
        session=session,
        interactions=(name,),
        input_ids=[*response.input_tokens, *response.output_tokens],
        loss_mask=is_output,
        logprobs=[0.0] * num_prompt + list(response.output_logprobs),
        versions=[-1] * num_prompt + list(response.output_versions),
        returns=is_output * parse_reward(reward),
        turns=is_output.astype(np.int32) - 1,
        reward=parse_reward(reward),
        turn_infos=() if response.sampling is None else (TurnInfo(sampling=response.sampling),),
    )
