"""The events of one streamed response: each output item is added, grows and is done in turn, then the response is done.

Reasoning, text and calls are separate items. An item is done when a delta of another kind arrives; text or reasoning
that resumes later is a new item, and ``responses_items`` joins the items again when they are sent back. If
log-probabilities were requested, a message stays open until the end instead, because its log-probabilities are sent
with its end. Parts of the final answer that no delta had are streamed before the end, and nothing that was sent is
retracted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Delta,
    InteractionId,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from areal_actors.proxy.failures import Failure
from areal_actors.proxy.responses_answer import (
    Envelope,
    format_call,
    format_output_logprobs,
    format_reasoning,
    format_text,
    is_cut,
)
from areal_actors.proxy.responses_items import format_item_id
from areal_actors.proxy.sse import format_named_event

__all__ = ["ResponseStream"]


@define
class _Item:
    """An output item that is being streamed. ``position`` is its index in the output."""

    kind: str
    id: str
    position: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    is_open: bool = True
    done: dict[str, Any] | None = None

    def format(self, text: str | None, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item as it is sent to the client."""
        if self.kind == "rs":
            return format_reasoning(self.id, text, status)
        if self.kind == "msg":
            return format_text(self.id, text, logprobs, status)
        return format_call(self.id, call_id=self.call_id, name=self.name, arguments=text or "", status=status)


class ResponseStream:
    """The events of one request."""

    def __init__(self, envelope: Envelope, *, clock: Callable[[], float]) -> None:
        self._envelope = envelope
        self._clock = clock
        self._interaction: InteractionId | None = None
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._events: list[bytes] = []
        self._num_events = 0

    def feed(self, item: AnswerStarted | Delta | Answer) -> bytes:
        """Return the events of one item."""
        if isinstance(item, AnswerStarted):
            self._start(item.interaction)
        elif isinstance(item, Answer):
            self._end(item)
        else:
            self._grow(item)
        return self._take()

    def finish(self) -> bytes:
        """Return nothing: the answer's last event ends the stream."""
        return b""

    def fail(self, failure: Failure) -> bytes:
        """Return a ``response.failed`` event, then an event that OpenAI's SDKs raise as an ``APIError``."""
        if self._interaction is not None:
            output = [item.done or item.format(item.text, "incomplete", []) for item in self._items]
            self._say("response.failed", response=self._envelope.fail(self._interaction, output, failure))
        error = {"type": failure.type, "code": failure.code, "message": failure.message, "param": failure.param}
        self._say("error", **{**error, "error": error})
        return self._take()

    def _say(self, event: str, **fields: Any) -> None:
        payload = {**fields, "type": event, "sequence_number": self._num_events}
        self._num_events += 1
        self._events.append(format_named_event(event, payload))

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    # --------------------------------------------------------------------------------------- the whole response

    def _start(self, interaction: InteractionId) -> None:
        self._interaction = interaction
        response = self._envelope.begin(interaction)
        self._say("response.created", response=response)
        self._say("response.in_progress", response=response)

    def _end(self, answer: Answer) -> None:
        cut = is_cut(answer)
        self._complete(answer)
        logprobs = format_output_logprobs(answer, self._envelope.decode) if self._envelope.parsed.has_logprobs else []
        for item in self._items:
            is_last = item is self._items[-1]
            self._close(item, status="incomplete" if cut and is_last else "completed", logprobs=logprobs)
        output = [item.done for item in self._items if item.done is not None]
        response = self._envelope.end(answer, output, completed=int(self._clock()))
        self._say("response.incomplete" if cut else "response.completed", response=response)

    def _complete(self, answer: Answer) -> None:
        """Stream the parts of the answer that no delta had. An empty answer becomes an empty message."""
        message = answer.message
        self._grow(ReasoningDelta(text=_missing(self._said("rs"), message.reasoning)))
        self._grow(TextDelta(text=_missing(self._said("msg"), message.content)))
        for index, call in enumerate(message.tool_calls):
            if index not in self._calls:
                self._grow(ToolCallStarted(index=index, id=call.id, name=call.name))
            self._grow(ToolArgumentsDelta(index=index, text=_missing(self._calls[index].text, call.arguments)))
        if not self._calls and not self._said("msg"):
            self._open("msg")

    def _said(self, kind: str) -> str:
        return "".join(item.text for item in self._items if item.kind == kind)

    # --------------------------------------------------------------------------------------------- single items

    def _grow(self, delta: Delta) -> None:
        if isinstance(delta, ToolCallStarted):
            self._calls[delta.index] = self._open("fc", call_id=delta.id, name=delta.name)
        elif not delta.text:
            return
        elif isinstance(delta, ToolArgumentsDelta):
            self._add(self._calls[delta.index], "function_call_arguments", delta.text)
        elif isinstance(delta, ReasoningDelta):
            self._add(self._continue("rs"), "reasoning_text", delta.text)
        else:
            self._add(self._continue("msg"), "output_text", delta.text)

    def _continue(self, kind: str) -> _Item:
        """Return the open item of this kind, or a new one."""
        return next((item for item in self._items if item.is_open and item.kind == kind), None) or self._open(kind)

    def _open(self, kind: str, *, call_id: str = "", name: str = "") -> _Item:
        for item in self._items:
            # A message waits for its log-probabilities, which arrive only with the finished answer.
            if item.kind != "msg" or not self._envelope.parsed.has_logprobs:
                self._close(item)
        assert self._interaction is not None
        number = sum(item.kind == kind for item in self._items)
        item_id = format_item_id(kind, number, self._interaction)
        item = _Item(kind, item_id, len(self._items), call_id=call_id, name=name)
        self._items.append(item)
        self._say("response.output_item.added", output_index=item.position, item=item.format(None, "in_progress", []))
        if kind != "fc":
            self._tell(item, "content_part.added", part=_part(item.format("", "in_progress", [])))
        return item

    def _add(self, item: _Item, event: str, text: str) -> None:
        if item.is_open:
            item.text += text
            self._tell(item, f"{event}.delta", delta=text, **({"logprobs": []} if item.kind == "msg" else {}))

    def _close(self, item: _Item, *, status: str = "completed", logprobs: list[dict[str, Any]] | None = None) -> None:
        """Send the events that mark an item as done, unless they were sent before."""
        if not item.is_open:
            return
        item.is_open = False
        item.done = item.format(item.text, status, logprobs or [])
        if item.kind == "fc":
            self._tell(item, "function_call_arguments.done", name=item.name, arguments=item.text)
        else:
            part = _part(item.done)
            told = {"logprobs": part["logprobs"]} if item.kind == "msg" else {}
            event = "output_text.done" if item.kind == "msg" else "reasoning_text.done"
            self._tell(item, event, text=item.text, **told)
            self._tell(item, "content_part.done", part=part)
        self._say("response.output_item.done", output_index=item.position, item=item.done)

    def _tell(self, item: _Item, event: str, **fields: Any) -> None:
        """Send an event within an item; a text is always the first and only content part of its item."""
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.position}
        if item.kind != "fc":
            place["content_index"] = 0
        self._say(f"response.{event}", **place, **fields)


def _part(formatted: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = formatted["content"][0]
    return part


def _missing(said: str, whole: str | None) -> str:
    """Return the rest of ``whole`` after ``said``; empty if ``said`` is not a prefix of it."""
    return whole[len(said) :] if whole and whole.startswith(said) else ""
