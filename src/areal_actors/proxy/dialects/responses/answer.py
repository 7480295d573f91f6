"""OpenAI's Responses API as a dialect: the ``response`` object, and the events that lead to it.

Every key that the SDK's model requires is present, including those that only strict clients check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import define, frozen

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Chunk,
    Completion,
    Delta,
    InteractionId,
    ReasoningDelta,
    SampledTokens,
    StreamItem,
    TextDelta,
    ToolArgumentsDelta,
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
from areal_actors.proxy.dialects.client_tools import CallForm, read_freeform
from areal_actors.proxy.dialects.fields import FieldTable, JsonObject
from areal_actors.proxy.dialects.responses.request import RESPONSES_FIELDS, format_item_id, parse_response_request
from areal_actors.proxy.failures import Failure
from areal_actors.proxy.sse import format_named_event

_REFUSED = range(400, 500)
_TOO_MANY = 429


@frozen(kw_only=True)
class ResponsesDialect(Dialect):
    """The Responses dialect."""

    operation: ClassVar[str] = "responses"
    summary: ClassVar[str] = "OpenAI's Responses; streamed as its events"
    fields: ClassVar[FieldTable] = RESPONSES_FIELDS

    def parse(self, body: JsonObject, *, tag: str | None = None) -> Parsed:
        """See ``Dialect.parse``."""
        return parse_response_request(self, body, tag=tag)

    def format_answers(self, parsed: Parsed, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the ``response`` object of the one answer: the one at the end of a stream without deltas."""
        (answer,) = answers
        return ResponseStream(self, parsed, answer.interaction).end(answer)

    def open_stream(self, parsed: Parsed) -> ResponseStream:
        """Return the formatter of one streamed answer."""
        return ResponseStream(self, parsed)


def format_usage(answer: Answer, token_bytes: TokenBytes | None) -> dict[str, Any]:
    """Return token counts."""
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": count_reasoning(answer, token_bytes)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# ------------------------------------------------------------------------------------------------- output items


def _format_reasoning(item_id: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    """Return a reasoning item; its content is empty while there is no text."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": None,
        "status": status,
    }


def _format_text(
    item_id: str, text: str | None, logprobs: Sequence[dict[str, Any]] = (), status: str = "completed"
) -> dict[str, Any]:
    """Return a message item; its content is empty while there is no text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    content = [] if text is None else [part]
    return {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}


def _format_call(
    item_id: str, form: CallForm, *, call_id: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """Return an item for a call: in the form of its tool, or as the call of a function if the arguments do not fit."""
    named = {"name": form.name, **({} if form.namespace is None else {"namespace": form.namespace})}
    kind, fields = "function_call", {**named, "arguments": arguments}
    if form.is_freeform and (text := read_freeform(arguments)) is not None:
        kind, fields = "custom_tool_call", {**named, "input": text}
    elif form.typed is not None and (typed := form.typed.format_call(arguments)) is not None:
        kind, fields = form.typed.item, {**typed}
    return {"id": item_id, "type": kind, "call_id": call_id, **fields, "status": status}


def _format_output_logprobs(
    sampled: Completion | Chunk, token_bytes: TokenBytes | None, *, num_earlier: int = 0
) -> list[dict[str, Any]]:
    """Return one entry per sampled token."""
    entries = format_logprobs(sampled, token_bytes, num_earlier=num_earlier)
    for entry in entries:
        for token in (entry, *entry["top_logprobs"]):
            # Unlike in chat completions, ``bytes`` must be a list here; it is empty if only ids are known.
            token["bytes"] = token["bytes"] or []
    return entries


# ------------------------------------------------------------------------------------------------------- streams


@define
class _Item:
    """An output item that is being streamed. ``position`` is its index in the output."""

    kind: str
    id: str
    position: int
    text: str = ""
    call_id: str = ""
    form: CallForm | None = None
    is_open: bool = True
    done: dict[str, Any] | None = None

    @property
    def is_held(self) -> bool:
        """Whether nothing is sent before the end, because the form of the call depends on its arguments."""
        return self.form is not None and (self.form.is_freeform or self.form.typed is not None)

    def format(self, text: str | None, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the item as it is sent to the client."""
        if self.kind == "rs":
            return _format_reasoning(self.id, text, status)
        if self.kind == "msg":
            return _format_text(self.id, text, logprobs, status)
        assert self.form is not None
        return _format_call(self.id, self.form, call_id=self.call_id, arguments=text or "", status=status)


class ResponseStream:
    """The events of one request: each output item is added, grows and is done in turn, then the response is done.

    Reasoning, text and calls are separate items. An item is done when a delta of another kind arrives; text or
    reasoning that resumes later is a new item, and ``parse_input`` joins the items again when they are sent back. If
    log-probabilities were requested, a delta of text carries those of all tokens since the delta of text before. The
    message then stays open until the end, because it has those of the whole answer. Parts of the final answer that no
    delta had are streamed before the end, and nothing that was sent is retracted. The call of a tool that is no
    function is sent when it is complete.
    """

    def __init__(self, dialect: Dialect, parsed: Parsed, interaction: InteractionId | None = None) -> None:
        self._dialect = dialect
        self._parsed = parsed
        self._created = int(dialect.clock())
        """Seconds since 1970."""
        self._interaction = interaction
        self._temperature: float | None = None
        """The temperature that was sampled at, if it is known."""
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._num_events = 0
        self._unsent: list[dict[str, Any]] = []
        """Log-probabilities that wait for a delta of text."""
        self._num_seen = 0
        """Tokens that have arrived."""

    def feed(self, item: StreamItem) -> bytes:
        """Return the events of one item."""
        if isinstance(item, AnswerStarted):
            self._interaction, self._temperature = item.interaction, item.temperature
            response = self._format("in_progress", [])
            self._emit("response.created", response=response)
            self._emit("response.in_progress", response=response)
        elif isinstance(item, Answer):
            response = self.end(item)
            self._emit(f"response.{response['status']}", response=response)
        elif isinstance(item, SampledTokens):
            self._unsent += _format_output_logprobs(item.chunk, self._dialect.token_bytes, num_earlier=self._num_seen)
            self._num_seen += len(item.chunk.token_ids)
        else:
            self._grow(item)
        return self._take()

    def finish(self) -> bytes:
        """Return nothing: the answer's last event ends the stream."""
        return b""

    def fail(self, failure: Failure) -> bytes:
        """Return a ``response.failed`` event, then an event that OpenAI's SDKs raise as an ``APIError``."""
        if self._interaction is not None:
            output = [item.done or item.format(item.text, "incomplete") for item in self._items]
            # One of the few error codes that a response object may have.
            code = "invalid_prompt" if failure.status in _REFUSED else "server_error"
            code = "rate_limit_exceeded" if failure.status == _TOO_MANY else code
            response = self._format("failed", output)
            response["error"] = {"code": code, "message": failure.message}
            self._emit("response.failed", response=response)
        error = {"type": failure.type, "code": failure.code, "message": failure.message, "param": failure.param}
        self._emit("error", **{**error, "error": error})
        return self._take()

    def _emit(self, event: str, **fields: Any) -> None:
        payload = {**fields, "type": event, "sequence_number": self._num_events}
        self._num_events += 1
        self._events.append((event, payload))

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(format_named_event(event, payload) for event, payload in events)

    # --------------------------------------------------------------------------------------- the whole response

    def _format(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._interaction,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._parsed.model or self._dialect.model,
            "output": output,
            "usage": None,
            **self._parsed.echo,
            **({} if self._temperature is None else {"temperature": self._temperature}),
        }

    def end(self, answer: Answer) -> dict[str, Any]:
        """End all items; return the finished response. It is ``incomplete`` if the limit of tokens cut the answer.

        Raises:
            Unavailable: the engine aborted the answer.
        """
        was_cut, self._temperature = is_cut(answer), answer.temperature
        # A response that a stop string ends is complete, as a text is, but not the call in which the stop string was.
        last_status = "incomplete" if was_cut or has_cut_call(answer) else "completed"
        # Parts of the answer that no delta had. The whole text of a repeated answer is one, because it has no deltas.
        message = answer.message
        self._grow(ReasoningDelta(text=_missing(self._streamed_text("rs"), message.reasoning)))
        self._grow(TextDelta(text=_missing(self._streamed_text("msg"), message.content)))
        for index, call in enumerate(message.tool_calls):
            if index not in self._calls:
                self._grow(ToolCallStarted(index=index, id=call.id, name=call.name))
            self._grow(ToolArgumentsDelta(index=index, text=_missing(self._calls[index].text, call.arguments)))
        if not self._calls and not self._streamed_text("msg"):
            self._open("msg")
        token_bytes = self._dialect.token_bytes
        logprobs = _format_output_logprobs(answer.completion, token_bytes) if self._parsed.has_logprobs else []
        for item in self._items:
            is_last = item is self._items[-1]
            self._close(item, status=last_status if is_last else "completed", logprobs=logprobs)
        output = [item.done for item in self._items if item.done is not None]
        response = self._format("incomplete" if was_cut else "completed", output)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if was_cut else None
        response["completed_at"] = None if was_cut else int(self._dialect.clock())
        response["usage"] = format_usage(answer, token_bytes)
        return response

    def _streamed_text(self, kind: str) -> str:
        return "".join(item.text for item in self._items if item.kind == kind)

    # --------------------------------------------------------------------------------------------- single items

    def _grow(self, delta: Delta) -> None:
        if isinstance(delta, ToolCallStarted):
            form = self._parsed.forms.get(delta.name) or CallForm(name=delta.name)
            self._calls[delta.index] = self._open("fc", call_id=delta.id, form=form)
        elif not delta.text:
            return
        elif isinstance(delta, ToolArgumentsDelta):
            self._add_arguments(self._calls[delta.index], delta.text)
        elif isinstance(delta, ReasoningDelta):
            self._add(self._continue("rs"), "reasoning_text", delta.text)
        else:
            self._add(self._continue("msg"), "output_text", delta.text)

    def _continue(self, kind: str) -> _Item:
        """Return the open item of this kind, or a new one."""
        return next((item for item in self._items if item.is_open and item.kind == kind), None) or self._open(kind)

    def _open(self, kind: str, *, call_id: str = "", form: CallForm | None = None) -> _Item:
        for item in self._items:
            # A message waits for its log-probabilities, which arrive only with the finished answer.
            if item.kind != "msg" or not self._parsed.has_logprobs:
                self._close(item)
        assert self._interaction is not None
        number = sum(item.kind == kind for item in self._items)
        item_id = format_item_id(kind, number, self._interaction)
        item = _Item(kind, item_id, len(self._items), call_id=call_id, form=form)
        self._items.append(item)
        if item.is_held:
            return item
        self._emit("response.output_item.added", output_index=item.position, item=item.format(None, "in_progress"))
        if kind != "fc":
            self._emit_inside(item, "content_part.added", part=_part(item.format("", "in_progress")))
        return item

    def _add_arguments(self, item: _Item, text: str) -> None:
        if item.is_open:
            item.text += text
            if not item.is_held:
                self._emit_inside(item, "function_call_arguments.delta", delta=text)

    def _add(self, item: _Item, event: str, text: str) -> None:
        if item.is_open:
            item.text += text
            fields: dict[str, Any] = {"delta": text}
            if item.kind == "msg":
                fields["logprobs"], self._unsent = self._unsent, []
            self._emit_inside(item, f"{event}.delta", **fields)

    def _close(self, item: _Item, *, status: str = "completed", logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Send the events that mark an item as done, unless they were sent before."""
        if not item.is_open:
            return
        item.is_open = False
        item.done = item.format(item.text, status, logprobs)
        if item.kind == "fc":
            self._end_call(item, item.done)
        else:
            part = _part(item.done)
            logprobs_field = {"logprobs": part["logprobs"]} if item.kind == "msg" else {}
            event = "output_text.done" if item.kind == "msg" else "reasoning_text.done"
            self._emit_inside(item, event, text=item.text, **logprobs_field)
            self._emit_inside(item, "content_part.done", part=part)
        self._emit("response.output_item.done", output_index=item.position, item=item.done)

    def _end_call(self, item: _Item, done: Mapping[str, Any]) -> None:
        is_custom = done["type"] == "custom_tool_call"
        event, key = ("custom_tool_call_input", "input") if is_custom else ("function_call_arguments", "arguments")
        if item.is_held:
            begun = {**done, "status": "in_progress", **({key: ""} if key in done else {})}
            self._emit("response.output_item.added", output_index=item.position, item=begun)
            if key not in done:
                # The call of a typed tool, which has no events of its own.
                return
            if done[key]:
                self._emit_inside(item, f"{event}.delta", delta=done[key])
        named = {} if is_custom else {"name": done["name"]}
        self._emit_inside(item, f"{event}.done", **named, **{key: done[key]})

    def _emit_inside(self, item: _Item, event: str, **fields: Any) -> None:
        """Send an event within an item; a text is always the first and only content part of its item."""
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.position}
        if item.kind != "fc":
            place["content_index"] = 0
        self._emit(f"response.{event}", **place, **fields)


def _part(formatted: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = formatted["content"][0]
    return part


def _missing(streamed: str, whole: str | None) -> str:
    """Return the rest of ``whole`` after ``streamed``; empty if ``streamed`` is not a prefix of it."""
    return whole[len(streamed) :] if whole and whole.startswith(streamed) else ""
