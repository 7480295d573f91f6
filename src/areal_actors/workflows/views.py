"""Conversion of session records to interactions with the names that workflow authors know (``interactions``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from attrs import evolve

from areal_actors.cache import backpropagate, full_history, lookup_in, prompt_ids
from areal_actors.domain import ChatMessage, Completion, Interaction, InteractionId, Ints, SessionRecord, Trajectory
from areal_actors.errors import NotFound
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward, ModelResponse

__all__ = ["InteractionViews"]


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
        if name not in self._made:
            self._make(name)
        made = self._made[name]
        if row is None:
            return made
        others = tuple(map(self.view, row.interactions[:-1])) if row.predecessors is not None else ()
        return evolve(made, row=row, reward=row.reward, others=others)

    def rows(self, trajectories: Sequence[Trajectory]) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the interactions that end the training rows, in order, each with its row."""
        return {row.interactions[-1]: self.view(row.interactions[-1], row=row) for row in trajectories}

    def _make(self, name: InteractionId) -> None:
        """Create the views of ``name`` and of its ancestors, the oldest first, without recursion."""
        # A conversation may have more turns than the recursion limit allows.
        line = [self._interactions[name]]
        while (parent := line[-1].parent) is not None and parent not in self._made and parent in self._interactions:
            line.append(self._interactions[parent])
        for turn in reversed(line):
            self._made[turn.id] = self._create(turn)

    def _create(self, turn: Interaction) -> InteractionWithTokenLogpReward:
        history, returns = self._history(turn), self._returns
        return InteractionWithTokenLogpReward(
            interaction_id=turn.id,
            model_response=self._response_of(turn, cast("Completion", turn.completion)),
            assigned_reward=turn.reward,
            reward=turn.reward if returns is None else returns.get(turn.id),
            parent=None if turn.parent is None else self._made.get(turn.parent),
            messages=[_plain(message) for message in history[:-1]],
            output_message_list=[_plain(history[-1])],
            completion=self._completions.get(turn.id),
        )

    def _response_of(self, turn: Interaction, completion: Completion) -> ModelResponse:
        return ModelResponse(
            input_tokens=self._prompt_tokens(turn).tolist(),
            output_tokens=completion.token_ids.tolist(),
            output_logprobs=completion.logprobs.tolist(),
            output_versions=completion.versions.tolist(),
            stop_reason=completion.finish,
            sampling=turn.sampling,
        )


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
