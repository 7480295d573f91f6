"""How clients send our answers back, as JSON: the manners of echo that were measured, by protocol and by degree.

A *wire* writes an answer as the proxy does, questions and results as clients do, and reads the whole history as the
proxy does. Its *styles* turn what was received into what is sent back. Degrees are cumulative: a matcher that knows
degree N links every style up to N; each style is in the lowest degree that links it.

====== ====================================================================================
degree what a client does to an answer beyond the degrees before
====== ====================================================================================
0      nothing
1      adds or drops keys that are null or empty
2      writes no text as null, as empty or not at all, and text as a list of parts
3      adds keys of its own, and drops ids, statuses, types, annotations, cache marks
4      serialises the arguments of tools anew
5      drops the thinking
6      trims the text, or sets line breaks before the thinking
7      loses the text beside a tool call: the ids of the calls are what is left
8      writes the calls into the text
====== ====================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from areal_actors.domain import Answer, ChatMessage, CompletionRequest
from areal_actors.proxy.dialects.base import Parsed
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.messages.answer import MessagesDialect, format_blocks
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect

__all__ = ["WIRES", "Style", "Wire"]

Json = dict[str, Any]
Echo = Callable[[list[Json]], list[Json]]


@frozen
class Style:
    """One manner of echo: what it makes of the pieces of an answer, and its degree."""

    degree: int
    echo: Echo


@frozen(kw_only=True)
class Wire:
    """One protocol, seen from a client."""

    receive: Callable[[Answer], list[Json]]
    """The pieces of an answer, as the client gets them."""
    ask: Callable[[str], Json]
    answer_call: Callable[[str, str], Json]
    """The result of a call, by the call's id."""
    read: Callable[[Sequence[Json]], tuple[ChatMessage, ...]]
    """What the proxy makes of a history."""
    styles: Mapping[str, Style]


def _each(change: Callable[[Json], Json]) -> Echo:
    """A style that treats the pieces alike."""
    return lambda pieces: [change(json.loads(json.dumps(piece))) for piece in pieces]


def _without(*names: str) -> Callable[[Json], Json]:
    return lambda piece: {key: value for key, value in piece.items() if key not in names}


def _without_empty(piece: Json) -> Json:
    return {key: value for key, value in piece.items() if value not in (None, [], {})}


def _rewrite(arguments: str, **style: Any) -> str:
    """Arguments, serialised anew; what no client can parse stays as it is."""
    try:
        return json.dumps(json.loads(arguments, parse_constant=_refuse), **style)
    except (ValueError, RecursionError):
        return arguments


def _refuse(literal: str) -> object:
    raise ValueError(literal)


_SPACED: Json = {"ensure_ascii": False}
_COMPACT: Json = {"ensure_ascii": False, "separators": (",", ":")}
_ESCAPED: Json = {"ensure_ascii": True}

# ----------------------------------------------------------------------------------------------- chat completions


def _receive_chat(answer: Answer) -> list[Json]:
    dialect = ChatDialect(clock=lambda: 0.0)
    parsed = dialect.parse({"messages": [{"role": "user", "content": ""}]})
    completion = dialect.format_answers(parsed, [answer])
    message = completion["choices"][0]["message"]
    return [json.loads(json.dumps(message))]


def _with_calls(change: Callable[[Json], Json]) -> Callable[[Json], Json]:
    def changed(message: Json) -> Json:
        calls = message.get("tool_calls")
        return message | {"tool_calls": [change(call) for call in calls]} if calls else message

    return changed


def _rewriting_call(**style: Any) -> Echo:
    def rewrite(call: Json) -> Json:
        function = call["function"]
        return call | {"function": function | {"arguments": _rewrite(function["arguments"], **style)}}

    return _each(_with_calls(rewrite))


def _parse_arguments(call: Json) -> Json:
    """What the SDK's stream helper adds to a call."""
    function = call["function"] | {"parsed_arguments": None}
    return call | {"index": 0, "function": function}


def _content(change: Callable[[str], Any]) -> Callable[[Json], Json]:
    return lambda message: message | {"content": change(message["content"])} if message.get("content") else message


def _trim(content: Any) -> Any:
    """The text, or the text of each part, if other manners made parts of it."""
    if isinstance(content, str):
        return content.strip()
    return [part | {"text": part["text"].strip()} for part in content]


def _if_empty(change: Callable[[Json], Json]) -> Callable[[Json], Json]:
    return lambda message: message if message.get("content") else change(message)


def _if_calls(change: Callable[[Json], Json]) -> Callable[[Json], Json]:
    return lambda message: change(message) if message.get("tool_calls") else message


def _pad_reasoning(message: Json) -> Json:
    thought = message.get("reasoning_content")
    return message | {"reasoning_content": f"\n{thought}"} if thought else message


def _calls_as_text(message: Json) -> Json:
    """As smolagents does."""
    calls = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    content = _trim(message.get("content") or "")
    texts = [part["text"] for part in content] if isinstance(content, list) else [content] if content else []
    parts = [{"type": "text", "text": text} for text in (*texts, f"Calling tools:\n{calls}")]
    return {"role": "assistant", "content": parts}


def _with_parsed_arguments(call: Json) -> Json:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"], parse_constant=_refuse)
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


_DUMPED: Json = {"audio": None, "function_call": None, "annotations": None}
_CHAT_STYLES = {
    "exact": Style(0, _each(lambda m: m)),
    "dumped": Style(1, _each(lambda m: _DUMPED | {"tool_calls": None} | m)),
    "empty keys dropped": Style(1, _each(lambda m: _without_empty(m) | {"content": m["content"]})),
    "no text as null": Style(2, _each(_if_empty(lambda m: m | {"content": None}))),
    "no text as empty": Style(2, _each(_if_empty(lambda m: m | {"content": ""}))),
    "no text as no key": Style(2, _each(_if_empty(_without("content")))),
    "text as parts": Style(2, _each(_content(lambda text: [{"type": "text", "text": text}]))),
    "keys added": Style(3, _each(lambda m: m | {"provider_specific_fields": {"refusal": None}, "parsed": None})),
    "calls indexed": Style(3, _each(_with_calls(_parse_arguments))),
    "annotated": Style(3, _each(lambda m: m | {"annotations": [{"type": "url_citation"}]})),
    "named": Style(3, _each(lambda m: m | {"name": "agent"})),
    "arguments spaced": Style(4, _rewriting_call(**_SPACED)),
    "arguments compact": Style(4, _rewriting_call(**_COMPACT)),
    "arguments escaped": Style(4, _rewriting_call(**_ESCAPED)),
    "thinking dropped": Style(5, _each(_without("reasoning_content"))),
    "text trimmed": Style(6, _each(_content(_trim))),
    "thinking padded": Style(6, _each(_pad_reasoning)),
    "text of a tool turn lost": Style(7, _each(_if_calls(lambda m: m | {"content": ""}))),
    "text of a tool turn null": Style(7, _each(_if_calls(lambda m: m | {"content": None}))),
    "calls as text": Style(8, _each(_if_calls(_calls_as_text))),
    "calls as text, nothing else": Style(8, _each(_if_calls(lambda m: _calls_as_text(m | {"content": None})))),
}

CHAT = Wire(
    receive=_receive_chat,
    ask=lambda text: {"role": "user", "content": text},
    answer_call=lambda call, text: {"role": "tool", "tool_call_id": call, "content": text},
    read=lambda history: ChatDialect().parse({"messages": list(history)}).request.messages,
    styles=_CHAT_STYLES,
)

# ------------------------------------------------------------------------------------------------------ Responses


def _receive_items(answer: Answer) -> list[Json]:
    response = ResponsesDialect().format_answers(Parsed(request=CompletionRequest(messages=())), [answer])
    items: list[Json] = json.loads(json.dumps(response["output"]))
    return items


def _of_type(kind: str, change: Callable[[Json], Json]) -> Echo:
    return _each(lambda item: change(item) if item.get("type") == kind else item)


def _rewriting_item(**style: Any) -> Echo:
    return _of_type("function_call", lambda item: item | {"arguments": _rewrite(item["arguments"], **style)})


def _item_text(item: Json) -> str:
    return "".join(part["text"] for part in item["content"])


def _trim_item(item: Json) -> Json:
    return item | {"content": [part | {"text": part["text"].strip()} for part in item["content"]]}


def _without_texts_of_tool_turns(items: list[Json]) -> list[Json]:
    calls = [item for item in items if item.get("type") == "function_call"]
    return calls or items


_RESPONSES_STYLES = {
    "exact": Style(0, _each(lambda i: i)),
    "dumped": Style(1, _each(lambda i: i | {"namespace": None, "caller": None, "phase": None})),
    "empty keys dropped": Style(1, _each(lambda i: _without_empty(i) | {k: i[k] for k in ("content",) if k in i})),
    "status dropped": Style(3, _each(_without("status"))),
    "ids dropped": Style(3, _each(_without("id", "status"))),
    "text as a string": Style(3, _of_type("message", lambda i: {"role": "assistant", "content": _item_text(i)})),
    "text without marks": Style(
        3, _of_type("message", lambda i: i | {"content": [{"type": "output_text", "text": _item_text(i)}]})
    ),
    "arguments spaced": Style(4, _rewriting_item(**_SPACED)),
    "arguments compact": Style(4, _rewriting_item(**_COMPACT)),
    "thinking emptied": Style(5, _of_type("reasoning", lambda i: i | {"content": []})),
    "thinking dropped": Style(5, lambda items: [item for item in items if item.get("type") != "reasoning"]),
    "text trimmed": Style(6, _of_type("message", _trim_item)),
    "all but the calls of a tool turn lost": Style(7, _without_texts_of_tool_turns),
}

RESPONSES = Wire(
    receive=_receive_items,
    ask=lambda text: {"role": "user", "content": text},
    answer_call=lambda call, text: {"type": "function_call_output", "call_id": call, "output": text},
    read=lambda history: ResponsesDialect().parse({"input": list(history)}).request.messages,
    styles=_RESPONSES_STYLES,
)

# ------------------------------------------------------------------------------------------------------- Messages


def _receive_blocks(answer: Answer) -> list[Json]:
    return [{"role": "assistant", "content": json.loads(json.dumps(format_blocks(answer.message)))}]


def _blocks(change: Callable[[list[Json]], list[Json]]) -> Echo:
    return _each(lambda m: m | {"content": change(m["content"])} if isinstance(m["content"], list) else m)


def _text_only(message: Json) -> Json:
    """A turn that is nothing but a text becomes a string."""
    content = message["content"]
    is_text = isinstance(content, list) and [block["type"] for block in content] == ["text"]
    return message | {"content": content[0]["text"]} if is_text else message


def _mark_cached(blocks: list[Json]) -> list[Json]:
    return [*blocks[:-1], blocks[-1] | {"cache_control": {"type": "ephemeral"}}]


def _trim_block(block: Json) -> Json:
    return block | {"text": block["text"].strip()} if block["type"] == "text" else block


def _sign_anew(block: Json) -> Json:
    return block | {"signature": "c2lnbmVk"} if block["type"] == "thinking" else block


def _pad_thought(block: Json) -> Json:
    return block | {"thinking": "\n" + block["thinking"]} if block["type"] == "thinking" else block


_MESSAGES_STYLES = {
    "exact": Style(0, _each(lambda m: m)),
    "empty keys dropped": Style(1, _blocks(lambda blocks: [_without("citations")(block) for block in blocks])),
    "text as a string": Style(2, _each(_text_only)),
    "marked for the cache": Style(3, _blocks(_mark_cached)),
    "signed anew": Style(3, _blocks(lambda blocks: [_sign_anew(block) for block in blocks])),
    "call marked": Style(3, _blocks(lambda blocks: [block | {"caller": {"type": "direct"}} for block in blocks])),
    "thinking dropped": Style(5, _blocks(lambda blocks: [b for b in blocks if b["type"] != "thinking"])),
    "text trimmed": Style(6, _blocks(lambda blocks: [_trim_block(block) for block in blocks])),
    "thinking padded": Style(6, _blocks(lambda blocks: [_pad_thought(block) for block in blocks])),
    "text of a tool turn lost": Style(
        7, _blocks(lambda blocks: [b for b in blocks if b["type"] == "tool_use"] or blocks)
    ),
}

MESSAGES = Wire(
    receive=_receive_blocks,
    ask=lambda text: {"role": "user", "content": text},
    answer_call=lambda call, text: {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call, "content": text}],
    },
    read=lambda history: MessagesDialect().parse({"messages": list(history), "max_tokens": 8}).request.messages,
    styles=_MESSAGES_STYLES,
)

WIRES: Mapping[str, Wire] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
"""The protocols, by name."""
