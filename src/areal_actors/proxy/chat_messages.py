"""Parsing of OpenAI chat messages and tools into domain values.

Accepts the harmless differences between clients: content as a string or as text parts, ``null`` or absent keys, tool
results without a call id, arguments as an object, additional keys. Content that would otherwise be dropped silently (an
image, a custom tool) is rejected by name. ``cache`` decides which conversations continue which.

The Responses API, whose items are read in ``responses_items``, joins content parts and describes functions in nearly
the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy.fields import shown, wrong

__all__ = ["join_parts", "parse_messages", "parse_tools"]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PLAIN = ("role", "content")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


def parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Parse the conversation of a request.

    Raises:
        InvalidRequest: a message is malformed; the error names its index and the problem.
        UnsupportedParameter: a content part that is not text, or a call that is not a function call.
    """
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    return tuple(_parse_plain(raw) or _parse_message(raw, f"messages[{index}]") for index, raw in enumerate(value))


def _parse_plain(raw: Any) -> ChatMessage | None:
    """Parse a message that has only a role and a text, or return ``None`` for any other message.

    Most messages of a long conversation have this form, so they skip the full checks.
    """
    if type(raw) is not dict or len(raw) != len(_PLAIN):
        return None
    role, content = raw.get("role"), raw.get("content")
    if type(content) is not str or type(role) is not str or role not in _ROLES:
        return None
    return ChatMessage(role=role, content=content)


def _parse_message(raw: Any, where: str) -> ChatMessage:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", "system, developer, user, assistant or tool", role)
    content = raw.get("content")
    if content is not None and not isinstance(content, str):
        content = join_parts(content, f"{where}.content", _TEXT_PARTS)
    if role == "assistant":
        return _assistant(raw, content, where)
    if content is None and role != "tool":
        raise wrong(f"{where}.content", "text", None)
    return ChatMessage(
        role=role,
        content=content or "",
        tool_call_id=_optional_text(raw, "tool_call_id", where) if role == "tool" else None,
        name=_optional_text(raw, "name", where),
    )


def _assistant(raw: Mapping[str, Any], content: str | None, where: str) -> ChatMessage:
    if raw.get("function_call") is not None:
        raise UnsupportedParameter(f"{where}.function_call is deprecated; send tool_calls.", param=where)
    calls = raw.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", "a list", calls)
    # Servers, and the clients that echo their answers, disagree on the name of this field.
    reasoning = raw.get("reasoning_content")
    if reasoning is None:
        reasoning = raw.get("reasoning")
    return ChatMessage(
        role="assistant",
        content=content,
        tool_calls=tuple(_parse_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or ())),
        name=_optional_text(raw, "name", where),
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _parse_call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict):
        if isinstance(raw, dict) and raw.get("type", "function") != "function":
            raise UnsupportedParameter(
                f"{where} is of type {shown(raw['type'])}; only functions are known.", param=where
            )
        raise wrong(where, "an object with a function", raw)
    name, arguments, call_id = function.get("name"), function.get("arguments"), raw.get("id")
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.function.name", "a string that is not empty", name)
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    if not isinstance(arguments, str | None):
        raise wrong(f"{where}.function.arguments", "a JSON text", arguments)
    return ToolCall(id=call_id if isinstance(call_id, str) else "", name=name, arguments=arguments or "")


def join_parts(parts: Any, where: str, kinds: Mapping[str, str]) -> str:
    """Return the text of a content list, with one part per line. ``kinds`` maps part types to the keys of their text.

    Raises:
        InvalidRequest: a part is malformed; the error names its index and the problem.
        UnsupportedParameter: a part that is not text.
    """
    if not isinstance(parts, list):
        raise wrong(where, "a string or a list of text parts", parts)
    return "\n".join(_part_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(parts))


def _part_text(part: Any, where: str, kinds: Mapping[str, str]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong(where, "a text part", part)
    if kind not in kinds:
        raise UnsupportedParameter(f"{where} is of type {shown(kind)}; this model reads text only.", param=where)
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise wrong(f"{where}.{kind}", "a string", text)
    return text


def _optional_text(raw: Mapping[str, Any], name: str, where: str) -> str | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(f"{where}.{name}", "a string", value)
    return value or None


def parse_tools(value: Any, *, is_flat: bool = False) -> tuple[Tool, ...]:
    """Parse the offered functions. With ``is_flat``, names stand next to the type, as in the Responses API.

    Raises:
        InvalidRequest: a tool is malformed; the error names its index and the problem.
        UnsupportedParameter: a tool that is not a function.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("tools", "a list", value)
    tools = tuple(_parse_tool(raw, f"tools[{index}]", is_flat=is_flat) for index, raw in enumerate(value))
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("tools has two functions of one name; the model could not tell them apart.", param="tools")
    return tools


def _parse_tool(raw: Any, where: str, *, is_flat: bool) -> Tool:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    kind = raw.get("type", "function")
    if kind != "function":
        raise UnsupportedParameter(f"{where} is of type {shown(kind)}; only functions are known.", param=where)
    function, where = (raw, where) if is_flat else (raw.get("function"), f"{where}.function")
    if not isinstance(function, dict):
        raise wrong(where, "an object", function)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.name", "a string that is not empty", name)
    if not isinstance(description, str | None):
        raise wrong(f"{where}.description", "a string", description)
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(parameters, dict | None):
        raise wrong(f"{where}.parameters", "a JSON schema", parameters)
    if not isinstance(strict, bool | None):
        raise wrong(f"{where}.strict", "true or false", strict)
    return Tool(name=name, description=description or "", parameters=parameters or {}, is_strict=bool(strict))
