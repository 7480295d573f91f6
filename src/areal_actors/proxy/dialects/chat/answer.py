"""OpenAI's chat completions: formatting of finished answers, streams of chunks and errors.

The output satisfies the strictest clients: every key that any of them validates is present, ``finish_reason`` is one of
OpenAI's values, and a tool call's id and name are sent once. ``request`` reads the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Delta,
    InteractionId,
    ReasoningDelta,
    SampledTokens,
    StreamItem,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
)
from areal_actors.proxy.dialects.base import (
    Dialect,
    Parsed,
    TokenBytes,
    count_reasoning,
    format_logprobs,
    has_cut_call,
    is_cut,
)
from areal_actors.proxy.dialects.chat.request import CHAT_FIELDS, parse_chat_request
from areal_actors.proxy.dialects.client_tools import CallForm, read_freeform
from areal_actors.proxy.dialects.fields import FieldTable, JsonObject
from areal_actors.proxy.failures import Failure, format_openai_failure
from areal_actors.proxy.sse import DONE, format_event


@frozen(kw_only=True)
class ChatDialect(Dialect):
    """The chat completions dialect."""

    operation: ClassVar[str] = "chat/completions"
    summary: ClassVar[str] = "OpenAI's chat completions; streamed as ChatCompletionChunk events"
    fields: ClassVar[FieldTable] = CHAT_FIELDS

    def parse(self, body: JsonObject, *, tag: str | None = None) -> Parsed:
        """See ``Dialect.parse``."""
        return parse_chat_request(self, body, tag=tag)

    def format_answers(self, parsed: Parsed, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``chat.completion`` object; see ``format_choices``."""
        return format_choices(
            self, parsed, answers, "chat.completion", [self._format(parsed, each) for each in answers]
        )

    def _format(self, parsed: Parsed, answer: Answer) -> dict[str, Any]:
        calls = answer.message.tool_calls
        content = answer.message.content or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.message.reasoning:
            message |= _format_reasoning(answer.message.reasoning)
        if calls:
            message["tool_calls"] = [_format_call(call, parsed.forms) for call in calls]
        logprobs = None
        if parsed.has_logprobs:
            logprobs = {"content": format_logprobs(answer.completion, self.token_bytes), "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def open_stream(self, parsed: Parsed) -> ChatStream:
        """Return the formatter of one streamed answer."""
        return ChatStream(self, parsed)


def format_choices(
    dialect: Dialect, parsed: Parsed, answers: Sequence[Answer], kind: str, contents: Sequence[JsonObject]
) -> dict[str, Any]:
    """Return an object of ``kind`` with a choice of each of ``contents``; its id is that of the first interaction.

    If there are several choices, each also carries its own ``interaction_id``, by which it can be rewarded.

    Raises:
        Unavailable: the engine aborted a choice.
    """
    choices = []
    for index, (answer, content) in enumerate(zip(answers, contents, strict=True)):
        choice = {"index": index, **content, "finish_reason": format_finish(answer)}
        choices.append(choice | {"interaction_id": answer.interaction} if len(answers) > 1 else choice)
    return {
        "id": answers[0].interaction,
        "object": kind,
        "created": int(dialect.clock()),
        "model": parsed.model or dialect.model,
        "choices": choices,
        "usage": format_usage(answers, dialect.token_bytes),
    }


def _format_reasoning(text: str) -> dict[str, Any]:
    """Return thinking under both names: newer servers and clients have ``reasoning``, many clients the older one."""
    return {"reasoning_content": text, "reasoning": text}


def _format_call(call: ToolCall, forms: Mapping[str, CallForm]) -> dict[str, Any]:
    """Return a call: of a freeform tool if it was offered and the arguments fit, otherwise of a function."""
    text = read_freeform(call.arguments) if call.name in forms else None
    if text is not None:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class OpenAIStream:
    """The envelope and the end of a stream of completions, whose chunks are objects of ``kind``."""

    kind: ClassVar[str]

    def __init__(self, dialect: Dialect, parsed: Parsed) -> None:
        self._parsed = parsed
        self._token_bytes = dialect.token_bytes
        created, model = int(dialect.clock()), parsed.model or dialect.model
        self._envelope: dict[str, Any] = {"id": "", "object": self.kind, "created": created, "model": model}
        if parsed.include_usage:
            # As OpenAI has it: null in all chunks but the last.
            self._envelope["usage"] = None
        self._choices: dict[InteractionId, int] = {}
        self._answers: list[Answer] = []
        self._num_sent = 0
        """Tokens of the present choice whose log-probabilities were sent."""
        self._num_seen = 0
        """Tokens of the present choice that have arrived."""

    def finish(self) -> bytes:
        """Return the usage, if the client asked for it, and the end marker."""
        if not self._parsed.include_usage:
            return DONE
        return (
            format_event(self._envelope | {"choices": [], "usage": format_usage(self._answers, self._token_bytes)})
            + DONE
        )

    def fail(self, failure: Failure) -> bytes:
        """Return an event that OpenAI's SDKs raise as an ``APIError``."""
        return format_event(format_openai_failure(failure))


class ChatStream(OpenAIStream):
    """The ``chat.completion.chunk`` events of one request.

    The first chunk of a choice carries the role. It is held back until the first delta, which shows whether the answer
    starts with text: ``content`` is ``""`` before text and ``null`` before tool calls, as in OpenAI's streams. If
    log-probabilities were requested, a chunk carries those of all tokens since the chunk before. The call of a freeform
    tool is sent when it is complete, because its form depends on its arguments.
    """

    kind = "chat.completion.chunk"

    def __init__(self, dialect: Dialect, parsed: Parsed) -> None:
        super().__init__(dialect, parsed)
        self._headless: set[int] = set()
        self._unsent: list[dict[str, Any]] = []
        """Log-probabilities that wait for a chunk. Choices are streamed one after another, so they share the list."""
        self._held: ToolCallStarted | None = None
        """The call of a freeform tool whose arguments are arriving."""
        self._arguments: list[str] = []

    def feed(self, item: StreamItem) -> bytes:
        """Return the events of one item."""
        if isinstance(item, AnswerStarted):
            self._envelope["id"] = self._envelope["id"] or item.interaction
            self._choices[item.interaction] = item.choice
            self._headless.add(item.choice)
            self._unsent, self._num_sent, self._num_seen = [], 0, 0
            return b""
        if isinstance(item, SampledTokens):
            self._unsent += format_logprobs(item.chunk, self._token_bytes, num_earlier=self._num_seen)
            self._num_seen += len(item.chunk.token_ids)
            return b""
        if isinstance(item, Answer):
            index = self._choices[item.interaction]
            finish_reason = format_finish(item)
            self._answers.append(item)
            extra: dict[str, Any] = {}
            if self._parsed.request.num_choices > 1:
                extra["interaction_id"] = item.interaction
            # An answer without deltas still needs the chunk with the role.
            head = self._release() + self._head(index, has_text=True)
            if self._parsed.has_logprobs:
                # The answer has every token: those of a repeated answer, which has no ``SampledTokens``, as well.
                content = format_logprobs(item.completion, self._token_bytes, start=self._num_sent)
                extra["logprobs"] = {"content": content, "refusal": None}
            return head + self._chunk(index, {}, finish_reason, **extra)
        return self._send(item)

    def _send(self, item: Delta) -> bytes:
        """Return the chunk of a delta, with the log-probabilities that are waiting."""
        if self._held is not None and isinstance(item, ToolArgumentsDelta) and item.index == self._held.index:
            self._arguments.append(item.text)
            return b""
        released = self._release()
        match item:
            case ToolCallStarted(name=name) if name in self._parsed.forms:
                self._held, self._arguments = item, []
                return released
            case ReasoningDelta(text=""):
                # An empty delta must not send the first chunk: what follows decides between ``""`` and ``null``.
                return released
            case TextDelta():
                delta: dict[str, Any] = {"content": item.text}
            case ReasoningDelta():
                delta = _format_reasoning(item.text)
            case ToolCallStarted():
                function = {"name": item.name, "arguments": ""}
                delta = {"tool_calls": [{"index": item.index, "id": item.id, "type": "function", "function": function}]}
            case ToolArgumentsDelta():  # pragma: no branch - there are no others
                delta = {"tool_calls": [{"index": item.index, "function": {"arguments": item.text}}]}
        return released + self._delta(item.choice, delta, has_text=isinstance(item, TextDelta))

    def _release(self) -> bytes:
        """Return the chunk of a freeform tool's call, whose arguments have all arrived."""
        if self._held is None:
            return b""
        held, self._held = self._held, None
        call = ToolCall(id=held.id, name=held.name, arguments="".join(self._arguments))
        formatted = {"index": held.index, **_format_call(call, self._parsed.forms)}
        return self._delta(held.choice, {"tool_calls": [formatted]}, has_text=False)

    def _delta(self, choice: int, delta: dict[str, Any], *, has_text: bool) -> bytes:
        head = self._head(choice, has_text=has_text)
        extra: dict[str, Any] = {}
        if self._unsent:
            extra["logprobs"] = {"content": self._unsent, "refusal": None}
            self._num_sent += len(self._unsent)
            self._unsent = []
        return head + self._chunk(choice, delta, **extra)

    def _head(self, choice: int, *, has_text: bool) -> bytes:
        if choice not in self._headless:
            return b""
        self._headless.discard(choice)
        return self._chunk(choice, {"role": "assistant", "content": "" if has_text else None})

    def _chunk(self, choice: int, delta: dict[str, Any], finish_reason: str | None = None, **extra: Any) -> bytes:
        body = {"index": choice, "delta": delta, "finish_reason": finish_reason, **extra}
        return format_event({**self._envelope, "choices": [body]})


def format_finish(answer: Answer) -> str:
    """Return OpenAI's ``finish_reason`` for an answer.

    Raises:
        Unavailable: the engine aborted the generation.
    """
    if is_cut(answer):
        return "length"
    # Agents run the calls of ``tool_calls``; arguments that a stop string cut off could pass for whole ones.
    return "tool_calls" if answer.message.tool_calls and not has_cut_call(answer) else "stop"


def format_usage(answers: Sequence[Answer], token_bytes: TokenBytes | None) -> dict[str, Any]:
    """Return token counts over all choices; their common prompt counts once."""
    prompt = answers[0].usage.prompt_tokens if answers else 0
    completion = sum(answer.usage.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].usage.cached_tokens if answers else 0},
        "completion_tokens_details": {"reasoning_tokens": sum(count_reasoning(a, token_bytes) for a in answers)},
    }
