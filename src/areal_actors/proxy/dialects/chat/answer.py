"""OpenAI's chat completions: formatting of finished answers, streams of chunks and errors.

The output satisfies the strictest clients: every key that any of them validates is present, ``finish_reason`` is one of
OpenAI's values, and a tool call's id and name are sent once. ``request`` reads the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import define, field, frozen

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Delta,
    FinishReason,
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
    COUNT_SCHEMA,
    ENVELOPE_SCHEMA,
    FINISH_SCHEMA,
    MAYBE_TEXT_SCHEMA,
    OBJECT_SCHEMA,
    TEXT_SCHEMA,
    USAGE_SCHEMA,
    BaseDialect,
    TokenBytes,
    count_reasoning,
    create_abort_error,
    format_logprobs,
    has_cut_call,
)
from areal_actors.proxy.dialects.chat.request import ParsedChat, parse_chat_request
from areal_actors.proxy.dialects.client_tools import CallForm, FreeformInput, read_freeform
from areal_actors.proxy.dialects.fields import Schema, list_of, one_object
from areal_actors.proxy.failures import Failure, format_openai_failure
from areal_actors.proxy.sse import DONE, format_event


@frozen(kw_only=True)
class ChatDialect(BaseDialect):
    """The chat completions dialect. ``honours_store`` says whether ``store: false`` keeps an answer from training."""

    def parse(self, body: Mapping[str, Any], *, tag: str | None = None) -> ParsedChat:
        """Read a request body; see ``parse_chat_request``."""
        return parse_chat_request(
            body,
            tag=tag,
            default_max_tokens=self.default_max_tokens,
            inert=self.inert,
            honours_store=self.honours_store,
        )

    def format_answers(self, parsed: ParsedChat, answers: Sequence[Answer]) -> dict[str, Any]:
        """Format the finished answers; see ``format_chat_answer``."""
        return format_chat_answer(
            parsed, answers, created=int(self.clock()), model=parsed.model or self.model, token_bytes=self.token_bytes
        )

    def open_stream(self, parsed: ParsedChat) -> ChatStream:
        """Return the formatter of one streamed answer."""
        return ChatStream(
            parsed, created=int(self.clock()), model=parsed.model or self.model, token_bytes=self.token_bytes
        )


def format_chat_answer(
    parsed: ParsedChat, answers: Sequence[Answer], *, created: int, model: str, token_bytes: TokenBytes | None = None
) -> dict[str, Any]:
    """Return a ``chat.completion`` object, whose id is that of the first choice's interaction.

    If there are several choices, each also carries its own ``interaction_id``, by which it can be rewarded.

    Raises:
        Unavailable: the engine aborted a choice.
    """
    choices = []
    for index, answer in enumerate(answers):
        calls = answer.message.tool_calls
        content = answer.message.content or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.message.reasoning:
            message |= _format_reasoning(answer.message.reasoning)
        if calls:
            message["tool_calls"] = [_format_call(call, parsed.forms) for call in calls]
        logprobs = None
        if parsed.has_logprobs:
            logprobs = {"content": format_logprobs(answer.completion, token_bytes), "refusal": None}
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": format_finish(answer),
        }
        if len(answers) > 1:
            choice["interaction_id"] = answer.interaction
        choices.append(choice)
    return {
        "id": answers[0].interaction,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": format_usage(answers, token_bytes),
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

    def __init__(self, parsed: ParsedChat, *, created: int, model: str, token_bytes: TokenBytes | None = None) -> None:
        self._parsed = parsed
        self._token_bytes = token_bytes
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


@define
class _CustomCall:
    """The call of a freeform tool in a stream. It is the call of a function if its arguments have another form."""

    id: str
    name: str
    reader: FreeformInput = field(factory=FreeformInput)
    unsent: str = ""
    """Arguments that wait until their form is known."""
    is_sent: bool = False

    def feed(self, text: str) -> dict[str, Any] | None:
        """Return what a chunk says of the call after more arguments, or ``None`` if there is nothing yet."""
        self.unsent += text
        more = self.reader.feed(text)
        return None if self.reader.is_freeform is None else self._format(more)

    def finish(self) -> dict[str, Any] | None:
        """Return what is left when no more arguments arrive."""
        return self._format(self.reader.finish())

    def _format(self, more: str) -> dict[str, Any] | None:
        named = {} if self.is_sent else {"name": self.name}
        kind, key = ("custom", "input") if self.reader.is_freeform else ("function", "arguments")
        value, self.unsent = (more if self.reader.is_freeform else self.unsent), ""
        if self.is_sent:
            return {kind: {key: value}} if value else None
        self.is_sent = True
        return {"id": self.id, "type": kind, kind: {**named, key: value}}


class ChatStream(OpenAIStream):
    """The ``chat.completion.chunk`` events of one request.

    The first chunk of a choice carries the role. It is held back until the first delta, which shows whether the answer
    starts with text: ``content`` is ``""`` before text and ``null`` before tool calls, as in OpenAI's streams. If
    log-probabilities were requested, a chunk carries those of all tokens since the chunk before. The call of a freeform
    tool is sent once its arguments show their form.
    """

    kind = "chat.completion.chunk"

    def __init__(self, parsed: ParsedChat, *, created: int, model: str, token_bytes: TokenBytes | None = None) -> None:
        super().__init__(parsed, created=created, model=model, token_bytes=token_bytes)
        self._headless: set[int] = set()
        self._unsent: list[dict[str, Any]] = []
        """Log-probabilities that wait for a chunk. Choices are streamed one after another, so they share the list."""
        self._custom: dict[int, _CustomCall] = {}
        """The calls of freeform tools in the present choice, by their index."""

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
            head = self._end_calls(index) + self._head(index, has_text=True)
            if self._parsed.has_logprobs:
                # The answer has every token: those of a repeated answer, which has no ``SampledTokens``, as well.
                content = format_logprobs(item.completion, self._token_bytes, start=self._num_sent)
                extra["logprobs"] = {"content": content, "refusal": None}
            return head + self._chunk(index, {}, finish_reason, **extra)
        return self._send(item)

    def _send(self, item: Delta) -> bytes:
        """Return the chunk of a delta, with the log-probabilities that are waiting."""
        match item:
            case ToolCallStarted(name=name) if name in self._parsed.forms:
                self._custom[item.index] = _CustomCall(id=item.id, name=name)
                return b""
            case ToolArgumentsDelta() if item.index in self._custom:
                found = self._custom[item.index].feed(item.text)
                if found is None:
                    return b""
                delta: dict[str, Any] = {"tool_calls": [{"index": item.index, **found}]}
            case ReasoningDelta(text=""):
                # An empty delta must not send the first chunk: what follows decides between ``""`` and ``null``.
                return b""
            case TextDelta():
                delta = {"content": item.text}
            case ReasoningDelta():
                delta = _format_reasoning(item.text)
            case ToolCallStarted():
                function = {"name": item.name, "arguments": ""}
                delta = {"tool_calls": [{"index": item.index, "id": item.id, "type": "function", "function": function}]}
            case ToolArgumentsDelta():  # pragma: no branch - there are no others
                delta = {"tool_calls": [{"index": item.index, "function": {"arguments": item.text}}]}
        return self._delta(item.choice, delta, has_text=isinstance(item, TextDelta))

    def _end_calls(self, choice: int) -> bytes:
        """Return the chunks of calls of freeform tools that wait for the end of their arguments."""
        events = b""
        for index, call in self._custom.items():
            if (found := call.finish()) is not None:
                events += self._delta(choice, {"tool_calls": [{"index": index, **found}]}, has_text=False)
        self._custom = {}
        return events

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
    # The engine's own finish reason never reaches a client: several clients stop silently on an unknown one.
    finish = answer.completion.finish
    if finish is FinishReason.ABORT:
        raise create_abort_error()
    if finish is FinishReason.LENGTH:
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


# ------------------------------------------------------------------------------------------------------- schemas

_TOOL_CALL: Schema = {
    "anyOf": [
        one_object(
            {
                "id": {"type": "string", "minLength": 1},
                "type": {"const": kind},
                kind: one_object({"name": TEXT_SCHEMA, key: TEXT_SCHEMA}, additionalProperties=False),
            },
            additionalProperties=False,
        )
        for kind, key in (("function", "arguments"), ("custom", "input"))
    ]
}
_MESSAGE = one_object(
    {
        "role": {"const": "assistant"},
        "content": MAYBE_TEXT_SCHEMA,
        "refusal": {"type": "null"},
        "reasoning_content": TEXT_SCHEMA,
        "reasoning": TEXT_SCHEMA,
        "tool_calls": list_of(_TOOL_CALL, minItems=1),
    },
    "reasoning_content",
    "reasoning",
    "tool_calls",
    additionalProperties=False,
)
_TOKEN: Mapping[str, Schema] = {
    "token": TEXT_SCHEMA,
    "logprob": {"type": "number"},
    "bytes": {"type": ["array", "null"]},
}
_LOGPROBS: Schema = {
    "anyOf": [
        {"type": "null"},
        one_object(
            {
                "content": list_of(one_object({**_TOKEN, "top_logprobs": list_of(one_object(_TOKEN))})),
                "refusal": {"type": "null"},
            }
        ),
    ]
}
CHOICE_SCHEMA: Mapping[str, Schema] = {"index": COUNT_SCHEMA, "interaction_id": TEXT_SCHEMA, "logprobs": _LOGPROBS}
_DELTA: Mapping[str, Schema] = {
    "role": {"const": "assistant"},
    "content": MAYBE_TEXT_SCHEMA,
    "reasoning_content": TEXT_SCHEMA,
    "reasoning": TEXT_SCHEMA,
    "tool_calls": list_of(
        one_object(
            {
                "index": COUNT_SCHEMA,
                "id": TEXT_SCHEMA,
                "type": TEXT_SCHEMA,
                "function": OBJECT_SCHEMA,
                "custom": OBJECT_SCHEMA,
            },
            *("id", "type", "function", "custom"),
        )
    ),
}
ANSWERS: Mapping[str, Schema] = {
    "ChatCompletion": one_object(
        {
            **ENVELOPE_SCHEMA,
            "object": {"const": "chat.completion"},
            "choices": list_of(
                one_object({**CHOICE_SCHEMA, "message": _MESSAGE, "finish_reason": FINISH_SCHEMA}, "interaction_id"),
                minItems=1,
            ),
            "usage": USAGE_SCHEMA,
        },
        additionalProperties=False,
    ),
    "ChatCompletionChunk": one_object(
        {
            **ENVELOPE_SCHEMA,
            "object": {"const": "chat.completion.chunk"},
            "choices": list_of(
                one_object(
                    {
                        **CHOICE_SCHEMA,
                        "delta": one_object(_DELTA, *_DELTA, additionalProperties=False),
                        "finish_reason": {"anyOf": [{"type": "null"}, FINISH_SCHEMA]},
                    },
                    "interaction_id",
                    "logprobs",
                )
            ),
            "usage": {"anyOf": [{"type": "null"}, USAGE_SCHEMA]},
        },
        "usage",
        additionalProperties=False,
    ),
}
"""Schemas of answers, by the names that the OpenAPI document gives them."""
