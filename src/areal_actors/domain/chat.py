"""Conversations as agents send them and read them, free of any dialect."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType

from attrs import field, frozen

from areal_actors.domain.sampling import Completion, Sampling

SessionId = NewType("SessionId", str)
InteractionId = NewType("InteractionId", str)


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


@frozen(kw_only=True)
class Credential:
    """Who asks: a session named by its URL, a key, or both. At least one is present.

    ``is_capability`` tells that the session id stood in the URL's path, where knowing it is enough; an id from a
    query or a body needs its key beside it.
    """

    session: SessionId | None = None
    key: str | None = field(default=None, repr=False)
    is_capability: bool = True


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


@frozen(kw_only=True)
class AnswerStarted:
    """The answer of choice ``choice`` begins. Said once, before its deltas: a stream is named from its first chunk."""

    interaction: InteractionId
    choice: int = 0


@frozen(kw_only=True)
class TextDelta:
    """More text of choice ``choice``. The deltas of an answer, joined, are its message."""

    text: str
    choice: int = 0


@frozen(kw_only=True)
class ReasoningDelta:
    """More thinking. An empty one says that the model thought nothing, in so many tags."""

    text: str
    choice: int = 0


@frozen(kw_only=True)
class ToolCallStarted:
    """The ``index``-th tool call begins; its id and name are sent once, here."""

    index: int
    id: str
    name: str
    choice: int = 0


@frozen(kw_only=True)
class ToolArgumentsDelta:
    """More JSON text of the arguments of the ``index``-th tool call."""

    index: int
    text: str
    choice: int = 0


Delta = TextDelta | ReasoningDelta | ToolCallStarted | ToolArgumentsDelta
