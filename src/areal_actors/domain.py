"""The words of the house: frozen values that every room shares.

What lives here has no behaviour beyond derived properties. Token arrays are read-only one-dimensional numpy arrays
(ids and versions ``int32``, log-probabilities ``float32``): a tuple of Python integers costs nine times the memory,
and a call with 250 tokens must stay below 4 KB. Messages between actors live in ``messages.py``; settings live beside
the component that they configure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType

import numpy as np
import numpy.typing as npt
from attrs import cmp_using, field, frozen

__all__ = [
    "Answer",
    "ChatMessage",
    "Completion",
    "CompletionRequest",
    "Credential",
    "DataPosition",
    "Episode",
    "FinishReason",
    "Floats",
    "ForkReason",
    "Group",
    "GroupId",
    "Interaction",
    "InteractionId",
    "InteractionStatus",
    "Ints",
    "Problem",
    "Sampling",
    "SampleKey",
    "SessionId",
    "SessionRecord",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "TopLogprob",
    "Trajectory",
    "Untrained",
    "UntrainedReason",
    "Usage",
    "as_floats",
    "as_ints",
]

SessionId = NewType("SessionId", str)
InteractionId = NewType("InteractionId", str)
GroupId = NewType("GroupId", str)

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_array = cmp_using(eq=np.array_equal, class_name="array")


def as_ints(values: Any) -> Ints:
    """A read-only int32 array of ``values`` (copied only if it has to be)."""
    return _read_only(np.asarray(values, dtype=np.int32))


def as_floats(values: Any) -> Floats:
    """A read-only float32 array of ``values`` (copied only if it has to be)."""
    return _read_only(np.asarray(values, dtype=np.float32))


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim == 1 and not array.flags.writeable:
        return array  # so that a changed copy of a value holds its parts and not views of views of them
    view = array.reshape(-1).view()
    view.flags.writeable = False
    return view


# --------------------------------------------------------------------------------------------- conversations


@frozen(kw_only=True)
class ToolCall:
    """One call that the model asked for; ``arguments`` is the JSON text exactly as the model wrote it."""

    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class ChatMessage:
    """One message of a conversation, whatever dialect it came in. List contents are joined to text at the border.

    ``content`` is ``None`` where there is none; ``reasoning`` is the thinking that preceded an answer.
    """

    role: str
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


@frozen(kw_only=True)
class Tool:
    """A function that the model may call; ``parameters`` is its JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(factory=dict)


class ToolChoice(StrEnum):
    """How freely the model may use tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


# -------------------------------------------------------------------------------------------------- sampling


@frozen(kw_only=True)
class Sampling:
    """How to sample. The neutral values are the defaults: temperature 1, no truncation, no penalty.

    ``temperature`` 0 takes the most probable token. ``top_k`` 0 and ``min_p`` 0 are off. ``stop`` strings end a
    generation without changing the ids that were sampled; ``stop_token_ids`` come beside the renderer's own.
    ``top_logprobs`` asks for that many alternatives per token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0


@frozen(kw_only=True)
class SampleKey:
    """What seeds the random numbers of one generation, so that the order of arrival changes no sample.

    ``seed`` is the run's (or the request's own), ``path`` names the generation within it: problem, group member, turn,
    choice. Two generations with equal keys, prompts, weights and settings sample equal tokens.
    """

    seed: int
    path: tuple[int | str, ...] = ()


class FinishReason(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@frozen(kw_only=True)
class TopLogprob:
    """An alternative at one position."""

    token_id: int
    logprob: float


@frozen(kw_only=True)
class Completion:
    """What an engine sampled for one prompt; all arrays have the length of ``token_ids``.

    ``logprobs`` are of the distribution that was sampled from (after temperature, penalties and truncation) and
    ``raw_logprobs`` of the plain softmax; ``versions`` are those of the weights that sampled each token. A stop token is
    included as it was sampled. ``top_logprobs`` holds a tuple per token where the request asked for alternatives.
    """

    token_ids: Ints = field(converter=as_ints, eq=_array)
    logprobs: Floats = field(converter=as_floats, eq=_array)
    raw_logprobs: Floats = field(converter=as_floats, eq=_array)
    versions: Ints = field(converter=as_ints, eq=_array)
    finish: FinishReason
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()


# ---------------------------------------------------------------------------------------------- requests


@frozen(kw_only=True)
class Credential:
    """Who asks: a session named by its URL, a key, or both. At least one is present."""

    session: SessionId | None = None
    key: str | None = field(default=None, repr=False)


@frozen(kw_only=True)
class CompletionRequest:
    """One request for an answer, free of any dialect.

    ``tool_choice`` is a ``ToolChoice`` or the name of the tool that must be called. ``tag`` names the agent of a
    multi-agent episode that asks. ``seed`` is the client's own seed where it gave one.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | str = ToolChoice.AUTO
    parallel_tool_calls: bool = True
    sampling: Sampling = field(factory=Sampling)
    num_choices: int = 1
    seed: int | None = None
    store: bool = True
    template_kwargs: Mapping[str, Any] = field(factory=dict)
    metadata: Mapping[str, str] = field(factory=dict)
    tag: str | None = None


@frozen(kw_only=True)
class Usage:
    """Token counts of one answer. ``cached_tokens`` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@frozen(kw_only=True)
class Answer:
    """One finished choice: what the client reads, and the interaction that remembers its tokens."""

    interaction: InteractionId
    message: ChatMessage
    completion: Completion
    usage: Usage


# ----------------------------------------------------------------------------------------- conversation trees


class InteractionStatus(StrEnum):
    """How far an interaction came. Only completed ones are trained by default."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ForkReason(StrEnum):
    """Why a turn does not extend the exact tokens of the turn before it."""

    ROOT = "root"
    TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
    CLIENT_EDITED_HISTORY = "client_edited_history"
    NEW_SYSTEM_PROMPT = "new_system_prompt"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_OPTIONS_CHANGED = "template_options_changed"
    PARENT_UNFINISHED = "parent_unfinished"


@frozen(kw_only=True)
class Interaction:
    """One request and its answer within a session's tree.

    Two parents: ``parent`` is the turn whose answer this one continues, and carries rewards; ``token_parent`` is the one
    whose exact tokens are a prefix of this prompt, and carries packing and KV reuse. A fork has the first without the
    second, and says why in ``fork``. ``prompt_suffix`` holds the prompt ids beyond the token parent's prompt and output
    (the whole prompt where there is no token parent). ``messages`` are those beyond the conversational parent's prompt and
    answer (all of them for a root); new instructions come first where ``fork`` is ``NEW_SYSTEM_PROMPT``. ``order`` counts requests,
    ``completed_order`` counts completions in a session. ``failure`` says why a failed one failed.
    """

    id: InteractionId
    order: int
    parent: InteractionId | None = None
    token_parent: InteractionId | None = None
    fork: ForkReason | None = None
    messages: tuple[ChatMessage, ...] = ()
    prompt_suffix: Ints = field(converter=as_ints, eq=_array)
    num_prompt_tokens: int
    completion: Completion | None = None
    output: ChatMessage | None = None
    status: InteractionStatus = InteractionStatus.PENDING
    completed_order: int | None = None
    reward: float | None = None
    is_stored: bool = True
    tag: str | None = None
    failure: str | None = None


@frozen(kw_only=True)
class SessionRecord:
    """A session as it stands: what export, journal and report read. ``interactions`` are in order of request."""

    id: SessionId
    interactions: tuple[Interaction, ...] = ()
    is_ended: bool = False
    group: GroupId | None = None
    metadata: Mapping[str, Any] = field(factory=dict)


# ------------------------------------------------------------------------------------------------ training rows


class UntrainedReason(StrEnum):
    """Why sampled tokens are in no training row, or masked in it."""

    CANCELLED = "cancelled"
    FAILED = "failed"
    NOT_STORED = "not_stored"
    NO_REWARD = "no_reward"
    NON_LEAF_PREFIX = "non_leaf_prefix"
    TOO_LONG = "too_long"


@frozen(kw_only=True)
class Untrained:
    """Sampled tokens that no row trains, with the reason that the report shows."""

    interaction: InteractionId
    num_tokens: int
    reason: UntrainedReason


@frozen(kw_only=True)
class Trajectory:
    """One training row of T tokens: ids, and for each token whether it is trained, under what it was sampled, what it earned.

    ``input_ids`` int32 [T]; ``loss_mask`` int32 [T], 1 on sampled tokens that this row trains; ``logprobs`` float32 [T],
    0 off the mask; ``versions`` int32 [T], -1 on tokens that were not sampled; ``returns`` float32 [T], each turn's own
    return on its sampled tokens; ``turns`` int32 [T], the index into ``interactions`` of the turn that sampled the token, -1
    elsewhere. ``reward`` is the return of the row's last interaction.
    """

    session: SessionId
    interactions: tuple[InteractionId, ...]
    input_ids: Ints = field(converter=as_ints, eq=_array)
    loss_mask: Ints = field(converter=as_ints, eq=_array)
    logprobs: Floats = field(converter=as_floats, eq=_array)
    versions: Ints = field(converter=as_ints, eq=_array)
    returns: Floats = field(converter=as_floats, eq=_array)
    turns: Ints = field(converter=as_ints, eq=_array)
    reward: float
    tag: str | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with ``loss_mask`` 1."""
        return int(self.loss_mask.sum())

    @property
    def head_version(self) -> int:
        """The oldest weights that sampled a token of this row; -1 if none did."""
        sampled = self.versions[self.versions >= 0]
        return int(sampled.min()) if len(sampled) else -1

    @property
    def tail_version(self) -> int:
        """The newest weights that sampled a token of this row; -1 if none did."""
        return int(self.versions.max()) if len(self.versions) else -1


@frozen(kw_only=True)
class Problem:
    """One item of a dataset. ``position`` counts problems over all epochs; ``data`` is what the agent's ``run`` receives."""

    position: int
    data: Mapping[str, Any]


@frozen(kw_only=True)
class Episode:
    """One run of an agent on a problem. A failed one has a ``failure`` and no trajectories.

    ``reward`` is the sum of the rewards that were assigned to its interactions, before any propagation.
    """

    session: SessionId
    member: int
    reward: float = 0.0
    trajectories: tuple[Trajectory, ...] = ()
    untrained: tuple[Untrained, ...] = ()
    num_turns: int = 0
    seconds: float = 0.0
    failure: str | None = None


@frozen(kw_only=True)
class Group:
    """The episodes of one problem: the unit of capacity, of staleness and of group-relative advantages."""

    id: GroupId
    problem: Problem
    episodes: tuple[Episode, ...]

    @property
    def head_version(self) -> int:
        """The oldest weights that sampled a token of the group; -1 if there is none."""
        versions = [t.head_version for e in self.episodes for t in e.trajectories if t.head_version >= 0]
        return min(versions, default=-1)


@frozen(kw_only=True)
class DataPosition:
    """How far the problems have been consumed: all below ``next`` but for ``pending``, which are to be run first."""

    next: int = 0
    pending: tuple[int, ...] = ()
