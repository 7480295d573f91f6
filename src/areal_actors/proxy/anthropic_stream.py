"""The events of an Anthropic message while it is sampled.

::

    message_start  (content_block_start  content_block_delta*  content_block_stop)+  message_delta  message_stop

One block is open at a time; a delta of another kind closes it. The input of a tool call is sent in one piece when its
block closes: only then is it known whether it is the JSON object that clients parse incrementally.
"""

from __future__ import annotations

from typing import Any

import orjson

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from areal_actors.proxy.anthropic_answer import format_end, format_usage
from areal_actors.proxy.anthropic_messages import format_input, sign_thought
from areal_actors.proxy.failures import Failure, format_anthropic_failure
from areal_actors.proxy.sse import format_named_event

__all__ = ["PING", "AnthropicStream"]

PING = format_named_event("ping", {"type": "ping"})
"""The event with which Anthropic keeps silent streams alive; clients skip it."""

_THINKING, _TEXT, _TOOL_USE = "thinking", "text", "tool_use"


class AnthropicStream:
    """The events of one request. ``model`` is the model name in the answer."""

    def __init__(self, *, model: str) -> None:
        self._model = model
        self._num_blocks = 0
        self._open: str | None = None
        self._said: list[str] = []
        """The text of the open block, for blocks whose closing event needs it."""

    def feed(self, item: AnswerStarted | Delta | Answer) -> bytes:
        """Return the events of one item."""
        match item:
            case AnswerStarted():
                return self._start(item)
            case Answer():
                return self._end(item)
            case TextDelta():
                return self._say(_TEXT, item.text, {"type": _TEXT, "text": ""})
            case ReasoningDelta():
                return self._say(_THINKING, item.text, {"type": _THINKING, "thinking": "", "signature": ""})
            case ToolCallStarted():
                block = {"type": _TOOL_USE, "id": item.id, "name": item.name, "input": {}}
                return self._close() + self._begin(_TOOL_USE, block)
            case ToolArgumentsDelta():  # pragma: no branch - there are no others
                self._said.append(item.text)
                return b""

    def finish(self) -> bytes:
        """Return the ``message_stop`` event; the answer itself ended with its own ``message_delta``."""
        return _event("message_stop")

    def fail(self, failure: Failure) -> bytes:
        """Return an event that Anthropic's SDKs raise as an ``APIStatusError``."""
        return format_named_event("error", format_anthropic_failure(failure))

    def _start(self, started: AnswerStarted) -> bytes:
        message: dict[str, Any] = {
            "id": started.interaction,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": format_usage(started.num_prompt_tokens, 0),
        }
        return _event("message_start", message=message)

    def _end(self, answer: Answer) -> bytes:
        delta = format_end(answer)
        usage = format_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
        closing = self._close()
        # An empty answer still has one text block; see ``format_blocks``.
        if not answer.message.content and not answer.message.tool_calls:
            closing += self._begin(_TEXT, {"type": _TEXT, "text": ""}) + self._close()
        return closing + _event("message_delta", delta=delta, usage=usage)

    def _say(self, kind: str, text: str, block: dict[str, Any]) -> bytes:
        if not text:
            return b""
        opening = b"" if self._open == kind else self._close() + self._begin(kind, block)
        if kind == _THINKING:
            self._said.append(text)
        return opening + self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open, self._said = kind, []
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        said, last = "".join(self._said), b""
        if self._open == _THINKING:
            last = self._delta({"type": "signature_delta", "signature": sign_thought(said)})
        elif self._open == _TOOL_USE:
            # Only the complete text shows whether the input is a JSON object; see ``format_input``.
            last = self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(format_input(said)).decode()})
        events = last + _event("content_block_stop", index=self._num_blocks)
        self._open = None
        self._num_blocks += 1
        return events

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return format_named_event(kind, {"type": kind, **fields})
