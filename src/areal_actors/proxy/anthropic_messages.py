"""Parsing of Anthropic messages and tools into domain values.

One Anthropic turn may become several domain messages: tool results are blocks next to text in a user turn there, and
separate messages here, in the same order. Accepts the harmless differences between clients: a string or text blocks,
``cache_control`` anywhere, additional keys. Content that would otherwise be dropped silently (an image, a document, a
tool that Anthropic's servers run) is rejected by name.

Text blocks of an answer are joined without a separator, because the model wrote them as one text; text blocks that a
client composed are joined by newlines, as the parts of a chat message are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy.fields import shown, wrong

__all__ = [
    "format_input",
    "parse_anthropic_conversation",
    "parse_anthropic_messages",
    "parse_anthropic_tools",
    "sign_thought",
]

_UNPARSED = "unparsed_arguments"
"""The only key of a tool input whose text is not a JSON object, so that nothing that the model wrote is lost."""
_BILLING = "x-anthropic-billing-header:"
"""Start of a line that Claude Code adds for Anthropic's billing.

It changes with each request and is not meant for the model.
"""


def format_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as the object that clients expect. ``parse_anthropic_messages`` reads it back."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: arguments}


def sign_thought(thought: str) -> str:
    """Return the ``signature`` of a thinking block: a digest of its text, so that an echo can be checked by eye."""
    # Nothing relies on the signature, because some clients encode it anew; altered thinking is detected by its text.
    return blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------------------------- messages


def parse_anthropic_messages(system: Any, messages: Any) -> tuple[ChatMessage, ...]:
    """Parse the conversation of a request, with the system messages first.

    Raises:
        InvalidRequest: a message is malformed; the error names its index and the problem.
        UnsupportedParameter: a block that is not text, thinking, a tool call or a tool result.
    """
    parsed = parse_anthropic_conversation(system, messages)
    if parsed and parsed[-1].role == "assistant":
        raise InvalidRequest(
            "The last message is an answer; an answer is a turn of its own here and cannot be begun by the client.",
            param="messages",
        )
    if all(message.role == "system" for message in parsed):
        raise InvalidRequest("messages has instructions only; say something as the user.", param="messages")
    return parsed


def parse_anthropic_conversation(system: Any, messages: Any) -> tuple[ChatMessage, ...]:
    """Parse a conversation that may end with an answer, with the system messages first.

    Raises as ``parse_anthropic_messages`` for malformed messages.
    """
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a list of at least one message", messages)
    parsed = [*_parse_system(system, "system")] if system else []
    for index, raw in enumerate(messages):
        parsed.extend(_parse_turn(raw, f"messages[{index}]"))
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
    """Yield tool results as separate messages, and the text before, between and after them."""
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
        content = f"Error: {content}"  # ``is_error`` must be said in the text, because the model reads nothing else
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
                pass  # encrypted; only Anthropic can read it
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
    """Yield the blocks of a content list, each with its path for error messages."""
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
    """Parse the offered functions.

    Raises:
        InvalidRequest: a tool is malformed; the error names its index and the problem.
        UnsupportedParameter: a tool that Anthropic's servers run or define.
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
