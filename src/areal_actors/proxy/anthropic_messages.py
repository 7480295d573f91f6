"""Anthropic messages and tools, as clients send them, into the words of the house.

One of their turns may be several of our messages: results of tools stand beside text in a user's turn there, and are
messages of their own here, in the same order. Tolerant where clients differ without meaning to: a string or text
blocks, ``cache_control`` anywhere, keys that clients add. What would be lost in silence (an image, a document, a tool
of Anthropic's servers) is refused by name.

Text blocks of an answer are one text (the model wrote them so); those that a client composed stand on lines of their
own, as the parts of a chat message do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy.fields import shown, wrong

__all__ = ["format_input", "parse_anthropic_messages", "parse_anthropic_tools", "sign_thought"]

_UNPARSED = "unparsed_arguments"
"""The one key of an input whose text is no JSON object; nothing that the model wrote is lost."""
_BILLING = "x-anthropic-billing-header:"
"""A line of Claude Code for Anthropic's accounts. It changes from request to request and was never the model's."""


def format_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that clients expect. ``parse_anthropic_messages`` reads it back."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: arguments}


def sign_thought(thought: str) -> str:
    """What stands in the place of Anthropic's signature: a digest, by which a client's echo can be checked by eye.

    Some clients encode it anew, so that nothing relies on it; altered thinking is recognised by its text.
    """
    return blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------------------------- messages


def parse_anthropic_messages(system: Any, messages: Any) -> tuple[ChatMessage, ...]:
    """The conversation of a request, instructions first.

    Raises:
        InvalidRequest: names the message, by its index, and what is wrong with it.
        UnsupportedParameter: a block that is no text, thinking, call or result.
    """
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a list of at least one message", messages)
    parsed = [*_parse_system(system, "system")] if system else []
    for index, raw in enumerate(messages):
        parsed.extend(_parse_turn(raw, f"messages[{index}]"))
    if parsed and parsed[-1].role == "assistant":
        raise InvalidRequest(
            "The last message is an answer; an answer is a turn of its own here and cannot be begun by the client.",
            param="messages",
        )
    if all(message.role == "system" for message in parsed):
        raise InvalidRequest("messages has instructions only; say something as the user.", param="messages")
    return tuple(parsed)


def _parse_system(value: Any, where: str) -> Iterator[ChatMessage]:
    texts = [value] if isinstance(value, str) else [_text_of(block, at) for block, at in _blocks(value, where)]
    texts = [text for text in texts if not text.startswith(_BILLING)]
    if texts:
        yield ChatMessage(role="system", content="\n".join(texts))


def _parse_turn(raw: Any, where: str) -> Iterator[ChatMessage]:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    role, content = raw.get("role"), raw.get("content")
    match role:
        case "user":
            return _parse_user(content, f"{where}.content")
        case "assistant":
            return iter((_parse_answer(content, f"{where}.content"),))
        case "system":
            return _parse_system(content, f"{where}.content")
        case _:
            raise wrong(f"{where}.role", "user, assistant or system", role)


def _parse_user(content: Any, where: str) -> Iterator[ChatMessage]:
    """Results one by one, and what is said before, between and after them."""
    if isinstance(content, str):
        yield ChatMessage(role="user", content=content)
        return
    texts: list[str] = []
    is_empty = True
    for block, at in _blocks(content, where):
        is_empty = False
        if block.get("type") != "tool_result":
            texts.append(_text_of(block, at))
            continue
        if texts:
            yield ChatMessage(role="user", content="\n".join(texts))
            texts = []
        yield _parse_result(block, at)
    if texts or is_empty:
        yield ChatMessage(role="user", content="\n".join(texts))


def _parse_result(block: Mapping[str, Any], where: str) -> ChatMessage:
    call_id, content, is_error = block.get("tool_use_id"), block.get("content"), block.get("is_error")
    if not isinstance(call_id, str) or not call_id:
        raise wrong(f"{where}.tool_use_id", "a string that is not empty", call_id)
    if not isinstance(is_error, bool | None):
        raise wrong(f"{where}.is_error", "true or false", is_error)
    if not isinstance(content, str):
        blocks = _blocks(content or [], f"{where}.content")
        content = "\n".join(_text_of(part, at) for part, at in blocks)
    if is_error and "error" not in content.lower():
        content = f"Error: {content}"  # the model reads text only
    return ChatMessage(role="tool", content=content, tool_call_id=call_id)


def _parse_answer(content: Any, where: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, at in _blocks(content, where):
        match block.get("type"):
            case "tool_use":
                calls.append(_parse_call(block, at))
            case "thinking":
                thoughts.append(_string(block, "thinking", at))
            case "redacted_thinking":
                pass  # nobody but Anthropic can read it
            case _:
                texts.append(_text_of(block, at))
    return ChatMessage(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        tool_calls=tuple(calls),
        reasoning="".join(thoughts) or None,
    )


def _parse_call(block: Mapping[str, Any], where: str) -> ToolCall:
    arguments, call_id = block.get("input"), block.get("id")
    if not isinstance(arguments, dict):
        raise wrong(f"{where}.input", "an object", arguments)
    unparsed = arguments.get(_UNPARSED)
    is_unparsed = len(arguments) == 1 and isinstance(unparsed, str)
    text = str(unparsed) if is_unparsed else orjson.dumps(arguments).decode()
    name = _string(block, "name", where)
    if not name:
        raise wrong(f"{where}.name", "a string that is not empty", name)
    return ToolCall(id=call_id if isinstance(call_id, str) else "", name=name, arguments=text)


def _blocks(value: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The blocks of a content list, each with its place."""
    if not isinstance(value, list):
        raise wrong(where, "a string or a list of blocks", value)
    for index, block in enumerate(value):
        at = f"{where}[{index}]"
        if not isinstance(block, dict):
            raise wrong(at, "an object with a type", block)
        yield block, at


def _text_of(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", "the type of a block", kind)
    if kind != "text":
        raise UnsupportedParameter(f"{where} is of type {shown(kind)}; this model reads text only.", param=where)
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "a string", value)
    return value


# ---------------------------------------------------------------------------------------------------------- tools


def parse_anthropic_tools(value: Any) -> tuple[Tool, ...]:
    """The functions that are offered.

    Raises:
        InvalidRequest: names the tool, by its index, and what is wrong with it.
        UnsupportedParameter: a tool that Anthropic's servers run, or bring the description of.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("tools", "a list", value)
    tools = tuple(_parse_tool(raw, f"tools[{index}]") for index, raw in enumerate(value))
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("tools has two tools of one name; the model could not tell them apart.", param="tools")
    return tools


def _parse_tool(raw: Any, where: str) -> Tool:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    kind = raw.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedParameter(
            f"{where} is of type {shown(kind)}, which Anthropic's servers define; only custom tools are known. "
            "Describe it with a name and an input_schema.",
            param=where,
        )
    name, description = raw.get("name"), raw.get("description")
    schema, strict = raw.get("input_schema"), raw.get("strict")
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.name", "a string that is not empty", name)
    if not isinstance(description, str | None):
        raise wrong(f"{where}.description", "a string", description)
    if not isinstance(schema, dict):
        raise wrong(f"{where}.input_schema", "a JSON schema", schema)
    if not isinstance(strict, bool | None):
        raise wrong(f"{where}.strict", "true or false", strict)
    return Tool(name=name, description=description or "", parameters=schema, is_strict=bool(strict))
