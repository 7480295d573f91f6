"""Conversations as agents send them and read them, free of any dialect."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType

from attrs import field, frozen

from areal_actors.domain.grammar import Grammar
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
    """A function that the model may call; ``parameters`` is its JSON schema.

    ``is_strict`` asks for calls that satisfy all of the schema, or else for a refusal.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(factory=dict)
    is_strict: bool = False


class ToolChoice(StrEnum):
    """How freely the model may use tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@frozen(kw_only=True)
class Credential:
    """Who asks: a session named by its URL, a key, or both. At least one is present.

    ``is_capability`` tells that the session id stood in the URL's path, where knowing it is enough for completions; an
    id from a query or a body needs its key beside it. ``has_control`` tells that naming the session is enough to reward
    and end it, too: the administrator does, the user who started it, and code of this process. Others need its key.
    """

    session: SessionId | None = None
    key: str | None = field(default=None, repr=False)
    is_capability: bool = True
    has_control: bool = False


@frozen(kw_only=True)
class Attempt:
    """One sending of a request: what tells a retry from a second request that happens to be equal.

    ``fingerprint`` is a digest of the route and the body. ``number`` counts the sendings before this one, as the
    client's SDK tells; ``idempotency_key`` is the client's own name for the request.
    """

    fingerprint: str
    number: int = 0
    idempotency_key: str | None = None


@frozen(kw_only=True)
class CompletionRequest:
    """One request for an answer, free of any dialect.

    ``has_instructions`` tells that the first message is for this request alone: whoever follows its answer by
    ``previous`` follows it without that message.

    ``tool_choice`` is a ``ToolChoice`` or the name of the tool that must be called. ``response_format`` is what the
    text of the answer must match, where it is no call. ``tag`` names the agent of a multi-agent episode that asks.
    ``seed`` is the client's own seed where it gave one. ``id_prefix`` begins the ids of the answers, as the dialect
    has it. ``previous`` names the answer that ``messages`` follow, where the client sent that instead of the history.

    A raw prompt has no messages and knows neither template nor tools: it is a text (``prompt``) or ids (``prompt_ids``)
    to be continued as it is.
    """

    messages: tuple[ChatMessage, ...]
    has_instructions: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | str = ToolChoice.AUTO
    parallel_tool_calls: bool = True
    response_format: Grammar | None = None
    sampling: Sampling = field(factory=Sampling)
    num_choices: int = 1
    seed: int | None = None
    store: bool = True
    template_kwargs: Mapping[str, Any] = field(factory=dict)
    metadata: Mapping[str, str] = field(factory=dict)
    tag: str | None = None
    id_prefix: str = "chatcmpl-"
    previous: InteractionId | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] = ()

    @property
    def is_raw(self) -> bool:
        """Whether a raw prompt is to be continued, in the place of a conversation."""
        return self.prompt is not None or bool(self.prompt_ids)


@frozen(kw_only=True)
class Usage:
    """Token counts of one answer. ``cached_tokens`` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@frozen(kw_only=True)
class Answer:
    """One finished choice: what the client reads, and the interaction that remembers its tokens.

    ``stop_sequence`` is the stop string at which the text ends, where there was one.
    """

    interaction: InteractionId
    message: ChatMessage
    completion: Completion
    usage: Usage
    stop_sequence: str | None = None


@frozen(kw_only=True)
class AnswerStarted:
    """The answer of choice ``choice`` begins. Said once, before its deltas: a stream is named from its first chunk."""

    interaction: InteractionId
    num_prompt_tokens: int = 0
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
