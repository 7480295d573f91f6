"""Parsing of the input items of OpenAI's Responses API into domain messages.

One answer is several items there (reasoning, a message, calls) and one message here. The items of one answer are
adjacent, and their ids, if a client repeats them, name the answer that they come from; ``format_item_id`` writes those
ids. Accepts the harmless differences between clients: items without type, id or status, and reasoning whose content was
emptied. Summaries of reasoning are ignored: a model is trained on the reasoning that it sampled itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
from attrs import define, field

from areal_actors.domain import ChatMessage, InteractionId, ToolCall
from areal_actors.errors import UnsupportedParameter
from areal_actors.proxy.chat_messages import join_parts
from areal_actors.proxy.fields import shown, wrong

__all__ = ["ID_PREFIX", "format_item_id", "parse_input"]

ID_PREFIX = "resp_"
_ROLES = frozenset({"system", "developer", "user"})
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ITEM_ID = re.compile(r"(?:msg|fc|rs)_\d+_(.+)", re.ASCII)


def format_item_id(kind: str, index: int, interaction: InteractionId) -> str:
    """Return the id of the ``index``-th item of its kind (``msg``, ``fc``, ``rs``) in an answer."""
    return f"{kind}_{index}_{interaction.removeprefix(ID_PREFIX)}"


def parse_input(value: Any) -> tuple[ChatMessage, ...]:
    """Parse the messages of a request: a text, or a list of items.

    Raises:
        InvalidRequest: an item is malformed; the error names its index and the problem.
        UnsupportedParameter: an item or a content part that is neither text nor a function.
    """
    if isinstance(value, str):
        return (ChatMessage(role="user", content=value),)
    if not isinstance(value, list) or not value:
        raise wrong("input", "a text or a list of at least one item", value)
    conversation = _Conversation()
    for index, raw in enumerate(value):
        _read_item(conversation, raw, f"input[{index}]")
    conversation.close_turn()
    return tuple(conversation.messages)


# --------------------------------------------------------------------------------------- putting items together


@define
class _Turn:
    """The items of one answer so far. ``origin`` is the answer that their ids name, or ``None``."""

    origin: str | None
    texts: list[str] = field(factory=list)
    thoughts: list[str] = field(factory=list)
    calls: list[ToolCall] = field(factory=list)

    def takes(self, kind: str, origin: str | None) -> bool:
        """Return whether the next item belongs to this answer."""
        if origin is not None and self.origin is not None:
            return origin == self.origin
        # Without ids, an item that follows a text and is not a call belongs to the next answer.
        return kind == "function_call" or not self.texts or bool(self.calls)

    def message(self) -> ChatMessage:
        """Return the whole answer as one message."""
        return ChatMessage(
            role="assistant",
            content="".join(self.texts) if self.texts else None,
            tool_calls=tuple(self.calls),
            reasoning="".join(self.thoughts) or None,
        )


@define
class _Conversation:
    """The messages so far, and the answer whose items are still being read."""

    messages: list[ChatMessage] = field(factory=list)
    turn: _Turn | None = None

    def add(self, message: ChatMessage) -> None:
        """Append a message that is not part of an answer."""
        self.close_turn()
        self.messages.append(message)

    def open_turn(self, kind: str, raw: Mapping[str, Any]) -> _Turn:
        """Return the answer that an item belongs to; start a new one if necessary."""
        found = _ITEM_ID.fullmatch(raw["id"]) if isinstance(raw.get("id"), str) else None
        origin = found[1] if found else None
        if self.turn is None or not self.turn.takes(kind, origin):
            self.close_turn()
            self.turn = _Turn(origin)
        self.turn.origin = self.turn.origin or origin
        return self.turn

    def close_turn(self) -> None:
        """Append the open answer, if there is one."""
        if self.turn is not None:
            self.messages.append(self.turn.message())
            self.turn = None


# ------------------------------------------------------------------------------------------------- single items


def _read_item(conversation: _Conversation, raw: Any, where: str) -> None:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    match _kind(raw, where):
        case "message" if raw.get("role") == "assistant":
            conversation.open_turn("message", raw).texts.append(_read_content(raw.get("content"), f"{where}.content"))
        case "message":
            conversation.add(_read_message(raw, where))
        case "reasoning":
            conversation.open_turn("reasoning", raw).thoughts.append(_read_reasoning(raw, where))
        case "function_call":
            conversation.open_turn("function_call", raw).calls.append(_read_call(raw, where))
        case "function_call_output":
            conversation.add(_read_result(raw, where))
        case "item_reference":
            raise UnsupportedParameter(
                f"{where} refers to an item by its id; send the item itself, or previous_response_id.", param=where
            )
        case kind:
            raise UnsupportedParameter(
                f"{where} is of type {shown(kind)}; only messages, functions and reasoning are known.", param=where
            )


def _kind(raw: Mapping[str, Any], where: str) -> str:
    """Return the type of an item; messages and references may omit it. A reference consists of only an id."""
    kind = raw.get("type")
    if kind is None:
        kind = "item_reference" if "id" in raw and "role" not in raw else "message"
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", "a string", kind)
    return kind


def _read_message(raw: Mapping[str, Any], where: str) -> ChatMessage:
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", "system, developer, user or assistant", role)
    return ChatMessage(role=role, content=_read_content(raw.get("content"), f"{where}.content"))


def _read_content(value: Any, where: str) -> str:
    return value if isinstance(value, str) else join_parts(value, where, _PARTS)


def _read_reasoning(raw: Mapping[str, Any], where: str) -> str:
    return join_parts(raw.get("content") or [], f"{where}.content", {"reasoning_text": "text", "text": "text"})


def _read_call(raw: Mapping[str, Any], where: str) -> ToolCall:
    name, arguments, call_id = raw.get("name"), raw.get("arguments"), raw.get("call_id")
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.name", "a string that is not empty", name)
    if not isinstance(call_id, str) or not call_id:
        raise wrong(f"{where}.call_id", "a string that is not empty", call_id)
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    if not isinstance(arguments, str | None):
        raise wrong(f"{where}.arguments", "a JSON text", arguments)
    return ToolCall(id=call_id, name=name, arguments=arguments or "")


def _read_result(raw: Mapping[str, Any], where: str) -> ChatMessage:
    call_id = raw.get("call_id")
    if not isinstance(call_id, str | None):
        raise wrong(f"{where}.call_id", "a string", call_id)
    return ChatMessage(
        role="tool", content=_read_content(raw.get("output"), f"{where}.output"), tool_call_id=call_id or None
    )
