"""Anthropic's messages: finished answers, streams of events, and errors.

Blocks are in the order thinking, text, calls. If a model continues with text after a call, a stream has a second text
block after the call, while an unstreamed answer has a single text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attrs import frozen

from areal_actors.domain import (
    UNPARSED_ARGUMENTS,
    Answer,
    AnswerStarted,
    ChatMessage,
    ReasoningDelta,
    SampledTokens,
    StreamItem,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from areal_actors.lib.exact_json import dump_json
from areal_actors.lib.json_prefix import JsonPrefix
from areal_actors.proxy.dialects.base import (
    Dialect,
    Parsed,
    TokenBytes,
    count_reasoning,
    has_cut_call,
    is_cut,
)
from areal_actors.proxy.dialects.fields import FieldTable, JsonObject
from areal_actors.proxy.dialects.messages.request import (
    MESSAGES_FIELDS,
    format_input,
    parse_anthropic_request,
    sign_thought,
)
from areal_actors.proxy.failures import Failure, format_anthropic_failure
from areal_actors.proxy.sse import format_named_event

PING = format_named_event("ping", {"type": "ping"})
"""The event with which Anthropic keeps silent streams alive; clients skip it."""

_THINKING, _TEXT, _TOOL_USE = "thinking", "text", "tool_use"


@frozen(kw_only=True)
class MessagesDialect(Dialect):
    """The Messages dialect."""

    operation: ClassVar[str] = "messages"
    summary: ClassVar[str] = "Anthropic's messages"
    fields: ClassVar[FieldTable] = MESSAGES_FIELDS
    keep_alive: ClassVar[bytes] = PING

    def parse(self, body: JsonObject, *, tag: str | None = None) -> Parsed:
        """See ``Dialect.parse``."""
        return parse_anthropic_request(self, body, tag=tag)

    def format_answers(self, parsed: Parsed, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``message`` object of the one answer, whose id is that of the interaction."""
        (answer,) = answers
        return {
            "id": answer.interaction,
            "type": "message",
            "role": "assistant",
            "model": parsed.model or self.model,
            "content": format_blocks(answer.message),
            **_format_end(answer),
            "usage": _format_usage_of(answer, self.token_bytes),
        }

    def open_stream(self, parsed: Parsed) -> MessageStream:
        """Return the formatter of one streamed answer."""
        return MessageStream(model=parsed.model or self.model, token_bytes=self.token_bytes)

    def format_failure(self, failure: Failure) -> dict[str, object]:
        """Return Anthropic's error body."""
        return format_anthropic_failure(failure)


def format_blocks(message: ChatMessage) -> list[dict[str, Any]]:
    """Return thinking, text and tool call blocks, in this order. There is always at least one block."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": sign_thought(message.reasoning)})
    # Many agents read the first block without checking that there is one.
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content or ""})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": format_input(call.arguments)}
        for call in message.tool_calls
    ]


def _format_end(answer: Answer) -> dict[str, Any]:
    """Return the stop reason of an answer in Anthropic's terms.

    Raises:
        Unavailable: the engine aborted it.
    """
    was_cut = is_cut(answer)
    # Agents run tools on ``tool_use`` only; a call that a limit or a stop string cut off must not be run.
    if answer.message.tool_calls and not was_cut and not has_cut_call(answer):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}
    return {"stop_reason": "max_tokens" if was_cut else "end_turn", "stop_sequence": None}


def _format_usage_of(answer: Answer, token_bytes: TokenBytes | None) -> dict[str, Any]:
    usage = answer.usage
    return _format_usage(usage.prompt_tokens, usage.completion_tokens, count_reasoning(answer, token_bytes))


def _format_usage(prompt_tokens: int, completion_tokens: int, thinking_tokens: int = 0) -> dict[str, Any]:
    """Return token counts. ``input_tokens`` is the whole prompt, as ``count_tokens`` counts it."""
    return {
        "input_tokens": prompt_tokens,
        # Clients add the three counts of the prompt. Tokens from the engine's prefix cache are part of
        # ``input_tokens``, because they have no separate price here.
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


class MessageStream:
    """The events of one request. ``model`` is the model name in the answer.

    ::

        message_start  (content_block_start  content_block_delta*  content_block_stop)+  message_delta  message_stop

    One block is open at a time; a delta of another kind closes it. The input of a tool call is sent as it arrives, as
    far as it is the beginning of a JSON object, because clients parse it incrementally. Text that is not one is sent
    when its block closes, as ``format_input`` wraps it; an object that breaks off is completed, and also has the text.
    """

    def __init__(self, *, model: str, token_bytes: TokenBytes | None = None) -> None:
        self._model = model
        self._token_bytes = token_bytes
        self._num_blocks = 0
        self._open: str | None = None
        self._streamed: list[str] = []
        """The text of the open block, for blocks whose closing event needs it."""
        self._input = JsonPrefix()
        self._has_input = False

    def feed(self, item: StreamItem) -> bytes:
        """Return the events of one item."""
        match item:
            case AnswerStarted():
                message: dict[str, Any] = {
                    "id": item.interaction,
                    "type": "message",
                    "role": "assistant",
                    "model": self._model,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": _format_usage(item.num_prompt_tokens, 0),
                }
                return _event("message_start", message=message)
            case Answer():
                delta = _format_end(item)
                usage = _format_usage_of(item, self._token_bytes)
                closing = self._close()
                # An empty answer still has one text block; see ``format_blocks``.
                if not item.message.content and not item.message.tool_calls:
                    closing += self._begin(_TEXT, {"type": _TEXT, "text": ""}) + self._close()
                return closing + _event("message_delta", delta=delta, usage=usage)
            case TextDelta() | ReasoningDelta():
                return self._grow(_TEXT if isinstance(item, TextDelta) else _THINKING, item.text)
            case ToolCallStarted():
                block = {"type": _TOOL_USE, "id": item.id, "name": item.name, "input": {}}
                return self._close() + self._begin(_TOOL_USE, block)
            case ToolArgumentsDelta():
                self._streamed.append(item.text)
                return self._grow_input(self._input.feed(item.text))
            case SampledTokens():  # pragma: no cover - Messages has no log-probabilities, so it never asks for them
                return b""

    def finish(self) -> bytes:
        """Return the ``message_stop`` event; the answer itself ended with its own ``message_delta``."""
        return _event("message_stop")

    def fail(self, failure: Failure) -> bytes:
        """Return an event that Anthropic's SDKs raise as an ``APIStatusError``."""
        return format_named_event("error", format_anthropic_failure(failure))

    def _grow(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        opening = b""
        if self._open != kind:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == _THINKING else {})}
            opening = self._close() + self._begin(kind, block)
        if kind == _THINKING:
            self._streamed.append(text)
        return opening + self._delta({"type": f"{kind}_delta", kind: text})

    def _grow_input(self, text: str) -> bytes:
        if not text:
            return b""
        self._has_input = True
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open, self._streamed = kind, []
        self._input, self._has_input = JsonPrefix(), False
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        text, last = "".join(self._streamed), b""
        if self._open == _THINKING:
            last = self._delta({"type": "signature_delta", "signature": sign_thought(text)})
        elif self._open == _TOOL_USE:
            if not self._has_input:
                last = self._grow_input(dump_json(format_input(text)).decode())
            elif not self._input.is_complete:
                # Clients parse the whole input when the block ends, so that one that broke off must be JSON as well.
                last = self._grow_input(self._input.complete(UNPARSED_ARGUMENTS, text))
        events = last + _event("content_block_stop", index=self._num_blocks)
        self._open = None
        self._num_blocks += 1
        return events

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return format_named_event(kind, {"type": kind, **fields})
