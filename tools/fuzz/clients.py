"""Clients of the three protocols without a network: bodies out, answers in, echoes in the manner of real clients.

What all of them have in common is in ``words``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve
from tools.fuzz.words import Client, Entry, Reply, Wire, refuse_number, rename

from areal_actors.domain import ChatMessage, ToolCall
from areal_actors.lib.exact_json import load_json
from areal_actors.proxy.dialects.base import Dialect
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect

__all__ = ["CLIENTS"]


def _payloads(events: bytes) -> list[Wire]:
    lines = events.split(b"\n")
    return [load_json(line[6:]) for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]


# --------------------------------------------------------------------------------------------------------- chat


class ChatClient:
    """OpenAI's chat completions."""

    dialect: Dialect = ChatDialect()
    styles = (
        *("as sent", "nulls", "content absent", "content empty", "parts", "indices", "ascii", "foreign keys"),
        "ids renamed",
    )

    def body(self, system: Sequence[str], entries: Sequence[Entry], tools: Sequence[Wire], limit: int) -> Wire:
        """See ``Client``."""
        messages: list[Wire] = [{"role": "system", "content": text} for text in system]
        for entry in entries:
            messages += entry.wire
        body: Wire = {"model": "policy", "messages": messages, "max_tokens": limit}
        if tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        return body

    def read(self, document: Any) -> list[Reply]:
        """See ``Client``."""
        return [
            self._reply(choice.get("interaction_id", document["id"]), choice["message"])
            for choice in document["choices"]
        ]

    def read_stream(self, events: bytes) -> list[Reply]:
        """See ``Client``."""
        messages: dict[int, Wire] = {}
        names: dict[int, str] = {}
        for chunk in _payloads(events):
            for choice in chunk["choices"]:
                index = choice["index"]
                names.setdefault(index, chunk["id"])
                names[index] = choice.get("interaction_id", names[index])
                self._grow(messages.setdefault(index, {"role": "assistant", "content": None}), choice["delta"])
        return [self._reply(names[index], message) for index, message in sorted(messages.items())]

    def _grow(self, message: Wire, delta: Wire) -> None:
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        calls = message.setdefault("tool_calls", []) if delta.get("tool_calls") else []
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def _reply(self, interaction: str, raw: Wire) -> Reply:
        calls = tuple(
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in raw.get("tool_calls") or ()
        )
        message = ChatMessage(
            role="assistant", content=raw["content"], tool_calls=calls, reasoning=raw.get("reasoning_content")
        )
        return Reply(interaction=interaction, message=message, raw=raw)

    def echo(self, reply: Reply, message: ChatMessage, style: str) -> list[Wire]:
        """See ``Client``."""
        if message is reply.message and style == "as sent":
            return [reply.raw]
        said: Wire = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        more = {"reasoning_content": message.reasoning, "name": message.name}
        said |= {name: value for name, value in more.items() if value}
        _CHAT_STYLES.get(style, _leave)(said)
        return [said]

    def result(self, call: ToolCall, text: str) -> Wire:
        """See ``Client``."""
        return {"role": "tool", "tool_call_id": call.id, "content": text}


def _leave(_: Wire) -> None:
    """As it is."""


def _nulls(said: Wire) -> None:
    said |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    said.setdefault("tool_calls", None)


def _absent(said: Wire) -> None:
    if not said["content"]:
        del said["content"]


def _empty(said: Wire) -> None:
    said["content"] = said["content"] or ""


def _parts(said: Wire) -> None:
    said["content"] = [{"type": "text", "text": said["content"]}] if said["content"] else []


def _indices(said: Wire) -> None:
    for index, call in enumerate(said.get("tool_calls") or ()):
        call |= {"index": index, "parsed_arguments": None}


def _ascii(said: Wire) -> None:
    for call in said.get("tool_calls") or ():
        try:
            value = json.loads(call["function"]["arguments"], parse_constant=refuse_number)
        except (ValueError, RecursionError):
            continue
        call["function"]["arguments"] = json.dumps(value)


def _foreign(said: Wire) -> None:
    said["provider_specific_fields"] = {"refusal": None}
    said["cache_control"] = {"type": "ephemeral"}


def _renamed(said: Wire) -> None:
    for call in said.get("tool_calls") or ():
        call["id"] = rename(call["id"])


_CHAT_STYLES: Mapping[str, Callable[[Wire], None]] = {
    "nulls": _nulls,
    "content absent": _absent,
    "content empty": _empty,
    "parts": _parts,
    "indices": _indices,
    "ascii": _ascii,
    "foreign keys": _foreign,
    "ids renamed": _renamed,
}


# ---------------------------------------------------------------------------------------------------- responses


class ResponsesClient:
    """OpenAI's Responses."""

    dialect: Dialect = ResponsesDialect(honours_store=True)
    styles = ("items", "without ids", "ids without status", "thoughts emptied", "calls alone")

    def body(self, system: Sequence[str], entries: Sequence[Entry], tools: Sequence[Wire], limit: int) -> Wire:
        """See ``Client``."""
        items: list[Wire] = []
        for entry in entries:
            items += entry.wire
        body: Wire = {"model": "policy", "input": items, "max_output_tokens": limit}
        if system:
            body["instructions"] = "\n".join(system)
        if tools:
            body["tools"] = [{"type": "function", **tool} for tool in tools]
        return body

    def read(self, document: Any) -> list[Reply]:
        """See ``Client``."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for item in document["output"]:
            if item["type"] == "function_call":
                calls.append(ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"]))
            else:
                parts = texts if item["type"] == "message" else thoughts
                parts += [part["text"] for part in item["content"]]
        message = ChatMessage(
            role="assistant",
            content="".join(texts) or None,
            tool_calls=tuple(calls),
            reasoning="".join(thoughts) or None,
        )
        return [Reply(interaction=document["id"], message=message, raw=document["output"])]

    def read_stream(self, events: bytes) -> list[Reply]:
        """See ``Client``."""
        payloads = _payloads(events)
        done = [event["item"] for event in payloads if event["type"] == "response.output_item.done"]
        return self.read({"id": payloads[-1]["response"]["id"], "output": done})

    def echo(self, reply: Reply, message: ChatMessage, style: str) -> list[Wire]:
        """See ``Client``."""
        if message is reply.message and style == "items":
            return list(reply.raw)
        items: list[Wire] = []
        if style == "calls alone" and message.tool_calls:
            message = evolve(message, content=None, reasoning=None)
        if message.reasoning:
            content = [] if style == "thoughts emptied" else [{"type": "reasoning_text", "text": message.reasoning}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if message.content or not message.tool_calls:
            items.append({"role": "assistant", "content": message.content or ""})
        items += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
        if style in ("ids without status", "items"):
            _name_items(items, reply.raw)
        return items

    def result(self, call: ToolCall, text: str) -> Wire:
        """See ``Client``."""
        return {"type": "function_call_output", "call_id": call.id, "output": text}


def _name_items(items: Sequence[Wire], raw: Sequence[Wire]) -> None:
    """Give items the ids of those that came, kind by kind."""
    ids: dict[str, list[str]] = {}
    for item in raw:
        ids.setdefault(item["type"], []).append(item["id"])
    for item in items:
        names = ids.get(item.get("type", "message"))
        if names:
            item["id"] = names.pop(0)


# ----------------------------------------------------------------------------------------------------- messages


class MessagesClient:
    """Anthropic's Messages."""

    dialect: Dialect = MessagesDialect()
    styles = ("blocks", "text as string", "cached", "signed anew", "citations")

    def body(self, system: Sequence[str], entries: Sequence[Entry], tools: Sequence[Wire], limit: int) -> Wire:
        """See ``Client``."""
        messages: list[Wire] = []
        for entry in entries:
            messages += entry.wire
        body: Wire = {"model": "policy", "messages": messages, "max_tokens": limit}
        if system:
            body["system"] = [{"type": "text", "text": text} for text in system] if len(system) > 1 else system[0]
        if tools:
            body["tools"] = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in tools
            ]
        return body

    def read(self, document: Any) -> list[Reply]:
        """See ``Client``."""
        blocks = document["content"]
        calls = tuple(
            ToolCall(id=block["id"], name=block["name"], arguments=_arguments(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        )
        message = ChatMessage(
            role="assistant",
            content="".join(block["text"] for block in blocks if block["type"] == "text") or None,
            tool_calls=calls,
            reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking") or None,
        )
        return [Reply(interaction=document["id"], message=message, raw=blocks)]

    def read_stream(self, events: bytes) -> list[Reply]:
        """See ``Client``."""
        name, blocks = "", []
        for event in _payloads(events):
            if event["type"] == "message_start":
                name = event["message"]["id"]
            elif event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                self._grow(blocks[event["index"]], event["delta"])
            elif event["type"] == "content_block_stop" and isinstance(blocks[event["index"]].get("input"), str):
                # Strictly, as clients do that read an input at its end.
                blocks[event["index"]]["input"] = json.loads(blocks[event["index"]]["input"])
        return self.read({"id": name, "content": blocks})

    def _grow(self, block: Wire, delta: Wire) -> None:
        if delta["type"] == "input_json_delta":
            block["input"] = (block["input"] or "") + delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]

    def echo(self, reply: Reply, message: ChatMessage, style: str) -> list[Wire]:
        """See ``Client``."""
        if message is reply.message and style == "blocks":
            return [{"role": "assistant", "content": reply.raw}]
        blocks: list[Wire] = []
        if message.reasoning:
            signature = "other" if style == "signed anew" else "own"
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
        if message.content or not message.tool_calls:
            blocks.append({"type": "text", "text": message.content or ""})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in message.tool_calls
        ]
        if style == "text as string" and len(blocks) == 1 and "text" in blocks[0]:
            return [{"role": "assistant", "content": blocks[0]["text"]}]
        if style in ("cached", "citations"):
            blocks[-1] |= {"cache_control": {"type": "ephemeral"}} if style == "cached" else {"citations": None}
        return [{"role": "assistant", "content": blocks}]

    def result(self, call: ToolCall, text: str) -> Wire:
        """See ``Client``."""
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": text}]}


def _arguments(value: Wire) -> str:
    """The text of an input; what was not an object stands under one name."""
    if "unparsed_arguments" in value:
        return str(value["unparsed_arguments"])
    return json.dumps(value, ensure_ascii=False)


def _input(arguments: str) -> Wire:
    try:
        value = json.loads(arguments or "{}", parse_constant=refuse_number)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unparsed_arguments": arguments}


CLIENTS: Mapping[str, Client] = {
    "chat": ChatClient(),
    "responses": ResponsesClient(),
    "messages": MessagesClient(),
}
