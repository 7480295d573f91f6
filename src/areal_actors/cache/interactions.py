"""One request and its answer by token, with its reward, under the names that workflow authors know.

``InteractionWithTokenLogpReward`` is a view of the session's record, created at the end of an episode by
``InteractionViews``, or of an exported row, by ``interactions_of``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from attrs import Factory, evolve, field, frozen

from areal_actors.cache.history import full_history, lookup_in, prompt_ids
from areal_actors.cache.rewards import backpropagate
from areal_actors.cache.tensors import to_tensors
from areal_actors.cache.tree import parse_reward
from areal_actors.domain import (
    ChatMessage,
    Completion,
    InteractionId,
    SamplingDistribution,
    SessionId,
    SessionRecord,
    Trajectory,
    TurnInfo,
)
from areal_actors.errors import ExportError, NotFound


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
    turn that this one continues. ``interaction_id`` is by default the id of the completion.
    """

    model_response: ModelResponse | None = None
    reward: float | None = None
    assigned_reward: float | None = None
    parent: InteractionWithTokenLogpReward | None = field(default=None, repr=False)
    messages: Sequence[dict[str, Any]] = ()
    output_message_list: Sequence[dict[str, Any]] | None = None
    completion: Any = field(default=None, repr=False)
    interaction_id: str = field(default=Factory(lambda self: getattr(self.completion, "id", ""), takes_self=True))
    row: Trajectory | None = field(default=None, repr=False)
    """The training row that this interaction ends; ``None`` if it ends none."""
    others: tuple[InteractionWithTokenLogpReward, ...] = field(default=(), repr=False)
    """The other interactions of a row that holds several branches."""

    def to_tensor_dict(self) -> dict[str, Any]:
        """Return the training row as tensors with a leading axis of one row, named and typed as in ``cache.arrays``.

        An interaction that ends no exported row becomes a row of its prompt and answer, with its reward or 0.

        Raises:
            ExportError: there is neither a row nor a ``model_response``, or the lists of that do not fit together.
        """
        return to_tensors([self.row if self.row is not None else self.create_row()])

    def create_row(self, *, session: SessionId | None = None, name: str | None = None) -> Trajectory:
        """Return a training row of the prompt and the answer of ``model_response``. Raises as ``to_tensor_dict``."""
        name, response = name or self.interaction_id, self.model_response
        if response is None:
            raise ExportError(f"Interaction {name} has neither a training row nor a model_response to make one of.")
        num_prompt, num_output, reward = response.input_len, response.output_len, parse_reward(self.reward or 0.0)
        if {num_output} != {len(response.output_logprobs), len(response.output_versions)} or not num_prompt:
            raise ExportError(f"The tokens, logprobs and versions of interaction {name} do not fit together.")
        is_output = np.arange(num_prompt + num_output) >= num_prompt
        return Trajectory(
            session=session or SessionId("by-hand"),
            interactions=(InteractionId(name),),
            input_ids=[*response.input_tokens, *response.output_tokens],
            loss_mask=is_output,
            logprobs=[0.0] * num_prompt + list(response.output_logprobs),
            versions=[-1] * num_prompt + list(response.output_versions),
            returns=is_output * reward,
            turns=is_output.astype(np.int32) - 1,
            reward=reward,
            turn_infos=() if response.sampling is None else (TurnInfo(sampling=response.sampling),),
        )


def interactions_of(
    rows: Sequence[Trajectory], assigned: Mapping[str, float]
) -> dict[str, InteractionWithTokenLogpReward]:
    """Return what a client over HTTP knows of exported rows, each by the interaction that it ends.

    ``assigned`` are the rewards of interactions before propagation. ``model_response`` has the tokens of a row's last
    turn, and ``parent`` is the interaction whose tokens begin the row's prompt; a row of a tree has neither. Messages
    stay at the proxy.
    """
    found: dict[str, InteractionWithTokenLogpReward] = {}
    for row in sorted(rows, key=lambda row: row.num_tokens):
        name = row.interactions[-1]
        # A row of several turns stands for all of them, having no parents: its reward is the sum of theirs.
        values = [assigned[turn] for turn in row.interactions if turn in assigned]
        response = parent = None
        if row.predecessors is None and row.num_trained_tokens:
            num_prompt = int(np.flatnonzero(row.turns == row.turns.max())[0])
            response = ModelResponse(
                input_tokens=row.input_ids[:num_prompt].tolist(),
                output_tokens=row.input_ids[num_prompt:].tolist(),
                output_logprobs=row.logprobs[num_prompt:].tolist(),
                output_versions=row.versions[num_prompt:].tolist(),
                stop_reason=(row.turn_infos[-1].finish if row.turn_infos else None) or "stop",
                sampling=row.turn_infos[-1].sampling if row.turn_infos else None,
            )
            for earlier in reversed(found.values()) if len(row.interactions) == 1 else ():
                known = earlier.row
                if known is not None and known.input_ids.tolist() == list(response.input_tokens[: known.num_tokens]):
                    parent = earlier
                    break
        found[name] = InteractionWithTokenLogpReward(
            interaction_id=name,
            model_response=response,
            reward=row.reward,
            assigned_reward=sum(values) if values else None,
            parent=parent,
            row=row,
        )
    return {row.interactions[-1]: found[row.interactions[-1]] for row in rows}


class InteractionViews:
    """The completed interactions of ``record``. With a ``discount`` their rewards are returns, else as assigned.

    ``completions`` are the SDK's objects, if there are any.
    """

    def __init__(
        self,
        record: SessionRecord,
        *,
        discount: float | None = None,
        completions: Mapping[str, Any] | None = None,
    ) -> None:
        self._lookup = lookup_in(record)
        self.record = record
        self._interactions = {turn.id: turn for turn in record.interactions if turn.output is not None}
        self._completions = completions or {}
        self._returns = None if discount is None else backpropagate(record, discount)
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
            history, completion = full_history(turn, self._lookup), cast("Completion", turn.completion)
            self._made[turn.id] = InteractionWithTokenLogpReward(
                interaction_id=turn.id,
                model_response=ModelResponse(
                    input_tokens=prompt_ids(turn, self._lookup).tolist(),
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
