"""Conversations as agents send and read them, independent of any dialect."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType

from attrs import field, frozen

from areal_actors.domain.grammar import Grammar
from areal_actors.domain.sampling import Chunk, Completion, Sampling

SessionId = NewType("SessionId", str)
InteractionId = NewType("InteractionId", str)


UNPARSED_ARGUMENTS = "unparsed_arguments"
"""The key of arguments whose text is not a JSON object, where an object is needed: nothing that was sampled is lost."""


@frozen(kw_only=True)
class ToolCall:
    """A call that the model requested; ``arguments`` is the JSON text exactly as the model wrote it."""

    id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class ChatMessage:
    """One message of a conversation in any dialect. The proxy joins list contents to text.

    ``content`` is ``None`` if there is none; ``reasoning`` is the thinking that preceded an answer.
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

    ``is_strict`` asks for calls that satisfy the whole schema, or else for a refusal.
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
    """The caller's credential: a session named by its URL, a key, or both. At least one is present.

    With ``is_capability``, the session id was in the URL's path, where knowing it is enough for completions; an id from
    a query or a body needs its key as well. With ``has_control``, naming the session is enough to reward and end it,
    too: this holds for the administrator, the user who started the session, and code of this process. Others need its
    key.
    """

    session: SessionId | None = None
    key: str | None = field(default=None, repr=False)
    is_capability: bool = True
    has_control: bool = False


@frozen(kw_only=True)
class Attempt:
    """One sending of a request: the information that tells a retry from a second request that happens to be equal.

    ``fingerprint`` is a digest of the route and the body. ``number`` counts the sendings before this one, as reported
    by the client's SDK; ``idempotency_key`` is the client's name for the request.
    """

    fingerprint: str
    number: int = 0
    idempotency_key: str | None = None


@frozen(kw_only=True)
class CompletionRequest:
    """A request for an answer, independent of any dialect.

    With ``has_instructions``, the first message applies to this request alone: a request that follows its answer by
    ``previous`` follows it without that message.

    ``tool_choice`` is a ``ToolChoice`` or the name of the tool that must be called. ``response_format`` is the grammar
    of the answer's text, if the answer is not a call. ``tag`` names the requesting agent of a multi-agent episode.
    ``seed`` is the client's seed, if given. ``id_prefix`` is the dialect's prefix of the answers' ids. ``previous``
    names the answer that ``messages`` follow, if the client sent that instead of the history. ``begun`` is the
    beginning of the answer, if the client wrote it: the model continues it. With ``streams_tokens``, a
    stream has the ``SampledTokens`` of each chunk before the chunk's deltas.

    A raw prompt has no messages, template or tools: it is a text (``prompt``) or ids (``prompt_ids``) to be continued
    unchanged.
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
    begun: ChatMessage | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] = ()
    streams_tokens: bool = False


@frozen(kw_only=True)
class Usage:
    """Token counts of one answer. ``cached_tokens`` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@frozen(kw_only=True)
class Answer:
    """One finished choice: the message for the client, and the interaction that stores its tokens.

    ``stop_sequence`` is the stop string at which the text ended, if any. ``is_repeated`` says that it was delivered
    before and is sent again to a retry, so that its tokens count towards no quota a second time. ``temperature`` is
    that which was sampled at, if it is known; the run may have replaced that of the request.
    """

    interaction: InteractionId
    message: ChatMessage
    completion: Completion
    usage: Usage
    stop_sequence: str | None = None
    is_repeated: bool = False
    temperature: float | None = None


@frozen(kw_only=True)
class AnswerStarted:
    """The answer of choice ``choice`` begins.

    Sent once, before its deltas, so that a stream has its id from the first chunk. ``temperature`` is as in ``Answer``.
    """

    interaction: InteractionId
    num_prompt_tokens: int = 0
    choice: int = 0
    temperature: float | None = None


@frozen(kw_only=True)
class SampledTokens:
    """The engine's next tokens of choice ``choice``. Their text is in later deltas, or hidden from clients."""

    chunk: Chunk
    choice: int = 0


@frozen(kw_only=True)
class TextDelta:
    """More text of choice ``choice``. The deltas of an answer join to its message."""

    text: str
    choice: int = 0


@frozen(kw_only=True)
class ReasoningDelta:
    """More reasoning text. An empty one means that the model wrote its reasoning tags with nothing between them."""

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
StreamItem = AnswerStarted | SampledTokens | Delta | Answer
"""An item of a streamed answer, in the order of the members for each choice; the middle two alternate."""
