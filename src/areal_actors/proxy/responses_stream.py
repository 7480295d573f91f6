"""The events of one streamed response: items are added, grow, and are done, one after another; then the response is.

Reasoning, text and calls are items of their own. An item is done when another kind of delta arrives; text or thinking
that resumes later is a new item, and reading the items back joins them again. Only where log-probabilities were asked
for does a message stay open until the end, because they are told with it. What the final answer has beyond its deltas
is streamed before the end, and nothing that was said is taken back.
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
    """An output item in the making. ``position`` is its index in the output."""

    kind: str
    id: str
    position: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    is_open: bool = True
    done: dict[str, Any] | None = None

    def format(self, text: str | None, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """The item as the client reads it."""
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
        """The events of one item."""
        if isinstance(item, AnswerStarted):
            self._start(item.interaction)
        elif isinstance(item, Answer):
            self._end(item)
        else:
            self._grow(item)
        return self._take()

    def finish(self) -> bytes:
        """Nothing: the last event of the answer ends the stream."""
        return b""

    def fail(self, failure: Failure) -> bytes:
        """The response has failed; then an event that OpenAI's SDKs raise as an ``APIError``."""
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
        """Stream what no delta has said, if there is anything; an answer that says nothing is an empty message."""
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
        """The open item of this kind, or a new one."""
        return next((item for item in self._items if item.is_open and item.kind == kind), None) or self._open(kind)

    def _open(self, kind: str, *, call_id: str = "", name: str = "") -> _Item:
        for item in self._items:
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
        """Say that an item is done, once."""
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
        """An event within an item; texts are the first and only part of theirs."""
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.position}
        if item.kind != "fc":
            place["content_index"] = 0
        self._say(f"response.{event}", **place, **fields)


def _part(formatted: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = formatted["content"][0]
    return part


def _missing(said: str, whole: str | None) -> str:
    """What remains to be said; nothing, where what was said is no beginning of it."""
    return whole[len(said) :] if whole and whole.startswith(said) else ""
