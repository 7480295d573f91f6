"""OpenAI's Responses API as a dialect: the ``response`` object, and the events that lead to it.

Every key that the SDK's model requires is present, including those that only strict clients check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, frozen

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Chunk,
    Completion,
    Delta,
    FinishReason,
    InteractionId,
    ReasoningDelta,
    SampledTokens,
    StreamItem,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from areal_actors.proxy.dialects.base import (
    COUNT_SCHEMA,
    OBJECT_SCHEMA,
    TEXT_SCHEMA,
    BaseDialect,
    TokenBytes,
    count_reasoning,
    create_abort_error,
    format_logprobs,
    has_cut_call,
)
from areal_actors.proxy.dialects.client_tools import CallForm, FreeformInput, format_freeform, read_freeform
from areal_actors.proxy.dialects.fields import Schema, list_of, one_object
from areal_actors.proxy.dialects.responses.request import ParsedResponse, format_item_id, parse_response_request
from areal_actors.proxy.failures import Failure
from areal_actors.proxy.sse import format_named_event

_REFUSED = range(400, 500)
_TOO_MANY = 429


@frozen(kw_only=True)
class ResponsesDialect(BaseDialect):
    """The Responses dialect. ``honours_store`` says whether ``store: false`` keeps an answer from training."""

    def parse(self, body: Mapping[str, Any], *, tag: str | None = None) -> ParsedResponse:
        """Parse a request body; see ``parse_response_request``."""
        return parse_response_request(
            body,
            tag=tag,
            default_max_tokens=self.default_max_tokens,
            inert=self.inert,
            honours_store=self.honours_store,
        )

    def format_answers(self, parsed: ParsedResponse, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the ``response`` object of the one answer, whose id is that of the interaction.

        Raises:
            Unavailable: the engine aborted it.
        """
        (answer,) = answers
        output = format_output(
            answer, has_logprobs=parsed.has_logprobs, token_bytes=self.token_bytes, forms=parsed.forms
        )
        return self._envelope(parsed).end(answer, output, completed=int(self.clock()))

    def open_stream(self, parsed: ParsedResponse) -> ResponseStream:
        """Return the formatter of one streamed answer."""
        return ResponseStream(self._envelope(parsed), clock=self.clock)

    def _envelope(self, parsed: ParsedResponse) -> _Envelope:
        model = parsed.model or self.model
        return _Envelope(parsed=parsed, created=int(self.clock()), model=model, token_bytes=self.token_bytes)


@frozen(kw_only=True)
class _Envelope:
    """A response without its output, from the request to its end. ``created`` is in seconds since 1970."""

    parsed: ParsedResponse
    created: int
    model: str
    token_bytes: TokenBytes | None = None

    def begin(self, interaction: InteractionId) -> dict[str, Any]:
        """Return the response as it is while the answer is in progress."""
        return self._format(interaction, "in_progress", [])

    def end(self, answer: Answer, output: list[dict[str, Any]], *, completed: int) -> dict[str, Any]:
        """Return the finished response; its status is ``incomplete`` if the limit of new tokens cut the answer."""
        cut = _is_cut(answer)
        formatted = self._format(answer.interaction, "incomplete" if cut else "completed", output)
        formatted["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        formatted["completed_at"] = None if cut else completed
        formatted["usage"] = format_usage(answer, self.token_bytes)
        return formatted

    def fail(self, interaction: InteractionId, output: list[dict[str, Any]], failure: Failure) -> dict[str, Any]:
        """Return the failed response."""
        formatted = self._format(interaction, "failed", output)
        # One of the few error codes that a response object may have.
        code = "invalid_prompt" if failure.status in _REFUSED else "server_error"
        code = "rate_limit_exceeded" if failure.status == _TOO_MANY else code
        formatted["error"] = {"code": code, "message": failure.message}
        return formatted

    def _format(self, interaction: InteractionId, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": interaction,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
            **self.parsed.echo,
        }


def _is_cut(answer: Answer) -> bool:
    """Return whether the answer ended because it reached its maximum length.

    Raises:
        Unavailable: the engine aborted it.
    """
    finish = answer.completion.finish
    if finish is FinishReason.ABORT:
        raise create_abort_error()
    return finish is FinishReason.LENGTH


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


def format_output(
    answer: Answer,
    *,
    has_logprobs: bool,
    token_bytes: TokenBytes | None,
    forms: Mapping[str, CallForm] | None = None,
) -> list[dict[str, Any]]:
    """Return the items of a whole answer: reasoning, a message, calls. An empty answer becomes an empty message.

    ``forms`` has the tools whose calls are not written as those of functions.
    """
    message, interaction = answer.message, answer.interaction
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(_format_reasoning(format_item_id("rs", 0, interaction), message.reasoning))
    if message.content or not message.tool_calls:
        logprobs = _format_output_logprobs(answer.completion, token_bytes) if has_logprobs else []
        items.append(_format_text(format_item_id("msg", 0, interaction), message.content or "", logprobs))
    for index, call in enumerate(message.tool_calls):
        item_id = format_item_id("fc", index, interaction)
        form = (forms or {}).get(call.name) or CallForm(name=call.name)
        items.append(_format_call(item_id, form, call_id=call.id, arguments=call.arguments))
    if _is_cut(answer) or has_cut_call(answer):
        items[-1]["status"] = "incomplete"
    return items


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
    freeform: FreeformInput | None = None
    """Reads the arguments of a freeform tool."""
    is_held: bool = False
    """Whether nothing was sent, because the form of the call depends on its arguments."""

    def format(self, text: str | None, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item as it is sent to the client."""
        if self.kind == "rs":
            return _format_reasoning(self.id, text, status)
        if self.kind == "msg":
            return _format_text(self.id, text, logprobs, status)
        assert self.form is not None
        form, arguments = self.form, text or ""
        if text is None and self.freeform is not None:
            # The beginning of a call, whose arguments are known to have this form, or not to have it.
            form, arguments = (form, format_freeform("")) if self.freeform.is_freeform else (_as_function(form), "")
        return _format_call(self.id, form, call_id=self.call_id, arguments=arguments, status=status)


def _as_function(form: CallForm) -> CallForm:
    return CallForm(name=form.name, namespace=form.namespace)


class ResponseStream:
    """The events of one request: each output item is added, grows and is done in turn, then the response is done.

    Reasoning, text and calls are separate items. An item is done when a delta of another kind arrives; text or
    reasoning that resumes later is a new item, and ``parse_input`` joins the items again when they are sent back. If
    log-probabilities were requested, a delta of text carries those of all tokens since the delta of text before. The
    message then stays open until the end, because it has those of the whole answer. Parts of the final answer that no
    delta had are streamed before the end, and nothing that was sent is retracted. The call of a freeform tool is sent
    once its arguments show their form, that of another tool that is no function when it is complete.
    """

    def __init__(self, envelope: _Envelope, *, clock: Callable[[], float]) -> None:
        self._envelope = envelope
        self._clock = clock
        self._interaction: InteractionId | None = None
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._events: list[bytes] = []
        self._num_events = 0
        self._unsent: list[dict[str, Any]] = []
        """Log-probabilities that wait for a delta of text."""
        self._num_seen = 0
        """Tokens that have arrived."""

    def feed(self, item: StreamItem) -> bytes:
        """Return the events of one item."""
        if isinstance(item, AnswerStarted):
            self._interaction = item.interaction
            response = self._envelope.begin(item.interaction)
            self._emit("response.created", response=response)
            self._emit("response.in_progress", response=response)
        elif isinstance(item, Answer):
            self._end(item)
        elif isinstance(item, SampledTokens):
            self._unsent += _format_output_logprobs(item.chunk, self._envelope.token_bytes, num_earlier=self._num_seen)
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
            output = [item.done or item.format(item.text, "incomplete", []) for item in self._items]
            self._emit("response.failed", response=self._envelope.fail(self._interaction, output, failure))
        error = {"type": failure.type, "code": failure.code, "message": failure.message, "param": failure.param}
        self._emit("error", **{**error, "error": error})
        return self._take()

    def _emit(self, event: str, **fields: Any) -> None:
        payload = {**fields, "type": event, "sequence_number": self._num_events}
        self._num_events += 1
        self._events.append(format_named_event(event, payload))

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    # --------------------------------------------------------------------------------------- the whole response

    def _end(self, answer: Answer) -> None:
        cut = _is_cut(answer)
        # A response that a stop string ends is complete, as a text is, but not the call in which the stop string was.
        last_status = "incomplete" if cut or has_cut_call(answer) else "completed"
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
        has_logprobs, token_bytes = self._envelope.parsed.has_logprobs, self._envelope.token_bytes
        logprobs = _format_output_logprobs(answer.completion, token_bytes) if has_logprobs else []
        for item in self._items:
            is_last = item is self._items[-1]
            self._close(item, status=last_status if is_last else "completed", logprobs=logprobs)
        output = [item.done for item in self._items if item.done is not None]
        response = self._envelope.end(answer, output, completed=int(self._clock()))
        self._emit("response.incomplete" if cut else "response.completed", response=response)

    def _streamed_text(self, kind: str) -> str:
        return "".join(item.text for item in self._items if item.kind == kind)

    # --------------------------------------------------------------------------------------------- single items

    def _grow(self, delta: Delta) -> None:
        if isinstance(delta, ToolCallStarted):
            form = self._envelope.parsed.forms.get(delta.name) or CallForm(name=delta.name)
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
            if item.kind != "msg" or not self._envelope.parsed.has_logprobs:
                self._close(item)
        assert self._interaction is not None
        number = sum(item.kind == kind for item in self._items)
        item_id = format_item_id(kind, number, self._interaction)
        item = _Item(kind, item_id, len(self._items), call_id=call_id, form=form)
        self._items.append(item)
        if form is not None and (form.is_freeform or form.typed is not None):
            item.freeform = FreeformInput() if form.is_freeform else None
            item.is_held = True
            return item
        self._emit_added(item)
        if kind != "fc":
            self._emit_inside(item, "content_part.added", part=_part(item.format("", "in_progress", [])))
        return item

    def _emit_added(self, item: _Item, text: str | None = None) -> None:
        item.is_held = False
        self._emit("response.output_item.added", output_index=item.position, item=item.format(text, "in_progress", []))

    def _add_arguments(self, item: _Item, text: str) -> None:
        if not item.is_open:
            return
        item.text += text
        if item.form is not None and item.form.typed is not None:
            return
        if item.freeform is None:
            self._emit_inside(item, "function_call_arguments.delta", delta=text)
            return
        more = item.freeform.feed(text)
        if item.freeform.is_freeform is not None:
            self._emit_freeform(item, more, text)

    def _emit_freeform(self, item: _Item, more: str, text: str) -> None:
        """Send a delta of a freeform tool's call: ``more`` of its input, or ``text`` if its arguments have none."""
        was_held = item.is_held
        if was_held:
            self._emit_added(item)
        assert item.freeform is not None
        event = "custom_tool_call_input" if item.freeform.is_freeform else "function_call_arguments"
        delta = more if item.freeform.is_freeform else item.text if was_held else text
        if delta:
            self._emit_inside(item, f"{event}.delta", delta=delta)

    def _add(self, item: _Item, event: str, text: str) -> None:
        if item.is_open:
            item.text += text
            fields: dict[str, Any] = {"delta": text}
            if item.kind == "msg":
                fields["logprobs"], self._unsent = self._unsent, []
            self._emit_inside(item, f"{event}.delta", **fields)

    def _close(self, item: _Item, *, status: str = "completed", logprobs: list[dict[str, Any]] | None = None) -> None:
        """Send the events that mark an item as done, unless they were sent before."""
        if not item.is_open:
            return
        item.is_open = False
        item.done = item.format(item.text, status, logprobs or [])
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
        if item.freeform is not None:
            self._emit_freeform(item, item.freeform.finish(), "")
        elif item.is_held and done["type"] != "function_call":
            self._emit_added(item, item.text)
            return
        elif item.is_held:
            item.form = _as_function(item.form or CallForm(name=""))
            self._emit_added(item)
            self._emit_inside(item, "function_call_arguments.delta", delta=item.text)
        if done["type"] == "custom_tool_call":
            self._emit_inside(item, "custom_tool_call_input.done", input=done["input"])
        else:
            self._emit_inside(item, "function_call_arguments.done", name=done["name"], arguments=done["arguments"])

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


# ------------------------------------------------------------------------------------------------------- schemas

_ITEM: Schema = {
    "anyOf": [
        one_object(
            {
                "id": TEXT_SCHEMA,
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "status": TEXT_SCHEMA,
                "content": list_of(
                    one_object({"type": {"const": "output_text"}, "text": TEXT_SCHEMA, "annotations": list_of({})})
                ),
            }
        ),
        one_object(
            {
                "id": TEXT_SCHEMA,
                "type": {"const": "function_call"},
                "status": TEXT_SCHEMA,
                "call_id": TEXT_SCHEMA,
                "name": TEXT_SCHEMA,
                "arguments": TEXT_SCHEMA,
            }
        ),
        one_object({"id": TEXT_SCHEMA, "type": {"const": "reasoning"}, "summary": list_of({}), "content": list_of({})}),
    ]
}
_USAGE = one_object(
    {
        "input_tokens": COUNT_SCHEMA,
        "input_tokens_details": one_object({"cached_tokens": COUNT_SCHEMA}),
        "output_tokens": COUNT_SCHEMA,
        "output_tokens_details": one_object({"reasoning_tokens": COUNT_SCHEMA}),
        "total_tokens": COUNT_SCHEMA,
    }
)
ANSWERS: Mapping[str, Schema] = {
    "Response": one_object(
        {
            "id": {"type": "string", "minLength": 1},
            "object": {"const": "response"},
            "created_at": COUNT_SCHEMA,
            "completed_at": {"type": ["integer", "null"]},
            "status": {"enum": ["completed", "incomplete"]},
            "error": {"type": "null"},
            "incomplete_details": OBJECT_SCHEMA,
            "model": TEXT_SCHEMA,
            "output": list_of(_ITEM, minItems=1),
            "usage": _USAGE,
            "tools": list_of({"type": "object"}),
            "tool_choice": {"type": ["string", "object"]},
            "parallel_tool_calls": {"type": "boolean"},
        }
    ),
    "InputTokens": one_object({"object": {"const": "response.input_tokens"}, "input_tokens": COUNT_SCHEMA}),
}
"""Schemas of answers, by the names that the OpenAPI document gives them."""
