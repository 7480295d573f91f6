"""Interactions as rollout workflows read and return them, and their conversion to training rows.

``InteractionWithTokenLogpReward`` is one request and its answer with the names that workflow authors know: a view of
the session's record, created at the end of an episode by ``InteractionViews``. ``parse_rollout`` converts the result of
a workflow, tensors or interactions, to rows: each sample with its reward. Tensors hold one sample per row; interactions
are the turns of one sample, whose reward is the sum assigned to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from attrs import evolve, field, frozen

from areal_actors.cache import backpropagate, from_tensors, full_history, lookup_in, parse_reward, prompt_ids
from areal_actors.cache.tensors import to_tensors
from areal_actors.domain import (
    ChatMessage,
    Completion,
    Interaction,
    InteractionId,
    Ints,
    SamplingDistribution,
    SessionId,
    SessionRecord,
    Trajectory,
    TurnInfo,
)
from areal_actors.errors import EpisodeError, ExportError, NotFound, RewardError

__all__ = [
    "InteractionViews",
    "InteractionWithTokenLogpReward",
    "ModelResponse",
    "Sample",
    "is_interactions",
    "parse_rollout",
]


@frozen(kw_only=True)
class ModelResponse:
    """The tokens that an engine read and sampled, as plain lists: T prompt tokens, and n sampled with their values.

    ``output_logprobs`` belong to the distribution that was sampled from, ``output_versions`` are those of the weights
    that sampled. ``stop_reason`` is ``stop``, ``length`` or ``abort``. ``sampling`` is the distribution that was
    sampled from.
    """

    input_tokens: list[int]
    output_tokens: list[int] = field(factory=list)
    output_logprobs: list[float] = field(factory=list)
    output_versions: list[int] = field(factory=list)
    stop_reason: str = "stop"
    sampling: SamplingDistribution | None = None

    @property
    def input_len(self) -> int:
        """The number of prompt tokens, T."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """The number of sampled tokens, n."""
        return len(self.output_tokens)


@frozen(kw_only=True)
class InteractionWithTokenLogpReward:
    """One request and its answer, by token, with its reward.

    ``reward`` is the return if a discount was applied, otherwise the assigned reward, and ``None`` if there is neither;
    ``assigned_reward`` is always the assigned one. ``messages`` are those of the request and ``output_message_list``
    the answer's, in the format of OpenAI's API; ``completion`` is the SDK's object if there is one. ``parent`` is the
    turn that this one continues.
    """

    interaction_id: str
    model_response: ModelResponse | None = None
    reward: float | None = None
    assigned_reward: float | None = None
    parent: InteractionWithTokenLogpReward | None = field(default=None, repr=False)
    messages: Sequence[dict[str, Any]] = ()
    output_message_list: Sequence[dict[str, Any]] | None = None
    completion: Any = field(default=None, repr=False)
    row: Trajectory | None = field(default=None, repr=False)
    """The training row that this interaction ends; ``None`` if it ends none."""
    others: tuple[InteractionWithTokenLogpReward, ...] = field(default=(), repr=False)
    """The other interactions of a row that holds several branches."""

    def to_tensor_dict(self) -> dict[str, Any]:
        """Return the training row as tensors with a leading axis of one row, named and typed as in ``cache.arrays``.

        Raises:
            ExportError: the interaction is in no row, because it was not completed or not stored.
        """
        if self.row is None:
            raise ExportError(f"Interaction {self.interaction_id} is in no training row; export it to learn why.")
        return to_tensors([self.row])


class InteractionViews:
    """The completed interactions of ``record``. With a ``discount`` their rewards are returns, else as assigned.

    ``completions`` are the SDK's objects, if there are any. ``history`` and ``prompt_tokens`` are for an owner with a
    faster lookup than the record.
    """

    def __init__(
        self,
        record: SessionRecord,
        *,
        discount: float | None = None,
        completions: Mapping[str, Any] | None = None,
        history: Callable[[Interaction], Sequence[ChatMessage]] | None = None,
        prompt_tokens: Callable[[Interaction], Ints] | None = None,
    ) -> None:
        lookup = lookup_in(record)
        self.record = record
        self._interactions = {turn.id: turn for turn in record.interactions if turn.output is not None}
        self._completions = completions or {}
        self._returns = None if discount is None else backpropagate(record, discount)
        self._history = history or (lambda turn: full_history(turn, lookup))
        self._prompt_tokens = prompt_tokens or (lambda turn: prompt_ids(turn, lookup))
        self._made: dict[InteractionId, InteractionWithTokenLogpReward] = {}

    def view(self, name: InteractionId, *, row: Trajectory | None = None) -> InteractionWithTokenLogpReward:
        """Return one interaction with its ancestors; given the ``row`` that it ends, its reward is the row's.

        Raises ``NotFound`` if no completed interaction has that name.
        """
        if name not in self._interactions:
            raise NotFound(f"There is no completed interaction {name}; look at the ids of the answers.")
        # The views of its ancestors first, without recursion: a conversation may have more turns than its limit.
        line = [] if name in self._made else [self._interactions[name]]
        while line:
            parent = line[-1].parent
            if parent is None or parent in self._made or parent not in self._interactions:
                break
            line.append(self._interactions[parent])
        for turn in reversed(line):
            history, completion = self._history(turn), cast("Completion", turn.completion)
            self._made[turn.id] = InteractionWithTokenLogpReward(
                interaction_id=turn.id,
                model_response=ModelResponse(
                    input_tokens=self._prompt_tokens(turn).tolist(),
                    output_tokens=completion.token_ids.tolist(),
                    output_logprobs=completion.logprobs.tolist(),
                    output_versions=completion.versions.tolist(),
                    stop_reason=completion.finish,
                    sampling=turn.sampling,
                ),
                assigned_reward=turn.reward,
                reward=turn.reward if self._returns is None else self._returns.get(turn.id),
                parent=None if turn.parent is None else self._made.get(turn.parent),
                messages=[_plain(message) for message in history[:-1]],
                output_message_list=[_plain(history[-1])],
                completion=self._completions.get(turn.id),
            )
        made = self._made[name]
        if row is None:
            return made
        others = tuple(map(self.view, row.interactions[:-1])) if row.predecessors is not None else ()
        return evolve(made, row=row, reward=row.reward, others=others)

    def rows(self, trajectories: Sequence[Trajectory]) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the interactions that end the training rows, in order, each with its row."""
        return {row.interactions[-1]: self.view(row.interactions[-1], row=row) for row in trajectories}


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the format of OpenAI's API."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    extras = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    return plain | {name: value for name, value in extras.items() if value is not None}


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
        elif interaction.model_response is None:
            raise ExportError(f"Interaction {name} has neither a training row nor a model_response to make one of.")
        else:
            response, reward = interaction.model_response, interaction.reward or 0.0
            rows.append(_create_row(response, InteractionId(name), reward, session))
        # An interaction that a workflow created itself has a reward only.
        is_own = interaction.row is None and interaction.assigned_reward is None
        assigned.append(interaction.reward if is_own else interaction.assigned_reward)
    # A result may have only the last turn of a row: the turns that lead to it count as well, and their rewards.
    seen = {interaction.interaction_id for interaction in result.values()}
    ancestors: list[InteractionWithTokenLogpReward] = []
    for start in (turn for interaction in result.values() for turn in (interaction.parent, *interaction.others)):
        turn = start
        while turn is not None and turn.interaction_id not in seen:
            seen.add(turn.interaction_id)
            ancestors.append(turn)
            turn = turn.parent
    assigned += [turn.assigned_reward for turn in ancestors]
    total = parse_reward(sum(reward or 0.0 for reward in assigned))
    return Sample(trajectories=tuple(rows), reward=total, num_turns=len(result) + len(ancestors))


def _create_row(response: ModelResponse, name: InteractionId, reward: float, session: SessionId) -> Trajectory:
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
