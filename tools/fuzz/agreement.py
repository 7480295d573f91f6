"""Whether an answer says the same with and without a stream, in strict JSON, whatever the model has written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import orjson
from attrs import evolve
from tools.fuzz.words import Client, Reply

from areal_actors.domain import Answer, AnswerStarted, ToolChoice
from areal_actors.lib.exact_json import dump_json
from areal_actors.lib.json_prefix import JsonPrefix
from areal_actors.rendering import Renderer, join_deltas

__all__ = ["find_disagreements"]


def find_disagreements(client: Client, parsed: Any, answer: Answer, renderer: Renderer) -> Iterator[str]:
    """What a client reads of the tokens of ``answer`` at once and token by token, where it differs or is not JSON."""
    whole = _read_whole(client, parsed, answer, renderer)
    streamed = _read_stream(client, parsed, answer, renderer)
    # A call that breaks off at the end of the answer has incomplete arguments.
    for call in whole.message.tool_calls:
        if _is_incomplete(call.arguments):
            continue
        try:
            if not isinstance(orjson.loads(call.arguments), dict):
                yield f"{answer.interaction}: the arguments {call.arguments!r:.200} are not an object"
        except ValueError as error:
            yield f"{answer.interaction}: {error} in the arguments {call.arguments!r:.200}"
    # A stream has the beginning of a malformed call, whose text an answer without a stream has as its content.
    if len(whole.message.tool_calls) == len(streamed.message.tool_calls) and _said(whole) != _said(streamed):
        yield f"{answer.interaction}: a stream says {_said(streamed)!r:.500} instead of {_said(whole)!r:.500}"


def _is_incomplete(arguments: str) -> bool:
    """Return whether a JSON object has begun and breaks off."""
    prefix = JsonPrefix()
    prefix.feed(arguments)
    return not (prefix.is_complete or prefix.is_broken)


def _options(parsed: Any) -> dict[str, Any]:
    request, numbers = parsed.request, count()
    return {
        "tools": () if request.tool_choice is ToolChoice.NONE else request.tools,
        "stop": request.sampling.stop,
        "template_kwargs": request.template_kwargs,
        "call_ids": lambda: f"call_{next(numbers)}",
    }


def _read_whole(client: Client, parsed: Any, answer: Answer, renderer: Renderer) -> Reply:
    message = renderer.parse(answer.completion.token_ids, **_options(parsed))
    document = client.dialect.format_answers(parsed, [evolve(answer, message=message)])
    (reply,) = client.read(json.loads(dump_json(document)))
    return reply


def _read_stream(client: Client, parsed: Any, answer: Answer, renderer: Renderer) -> Reply:
    parser = renderer.open_stream(is_eager=True, **_options(parsed))
    deltas = [delta for token_id in answer.completion.token_ids.tolist() for delta in parser.feed([token_id])]
    deltas += parser.finish()
    stream = client.dialect.open_stream(parsed)
    items = [AnswerStarted(interaction=answer.interaction), *deltas, evolve(answer, message=join_deltas(deltas))]
    events = b"".join(map(stream.feed, items)) + stream.finish()
    (reply,) = client.read_stream(events)
    return reply


def _said(reply: Reply) -> tuple[Any, ...]:
    message = reply.message
    return (
        message.content or "",
        message.reasoning or "",
        [(call.name, _value(call.arguments)) for call in message.tool_calls],
    )


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
