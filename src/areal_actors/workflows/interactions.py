"""Answers as rollout workflows read and return them: tokens, log-probabilities, versions, and the training row.

These are views of the session's record, with the names that workflow authors know. They are created at the end of an
episode and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from areal_actors.cache.arrays import to_tensors
from areal_actors.domain import SamplingDistribution, Trajectory
from areal_actors.errors import ExportError

__all__ = ["InteractionWithTokenLogpReward", "ModelResponse"]


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
