"""Conversion of messages and tools to the plain data that chat templates read, in the variant they expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from attrs import frozen

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import RenderError
from areal_actors.rendering.template import PlainMessage

__all__ = ["Guard", "Spelling", "guard_all", "to_plain_message", "to_plain_tool"]

_COMMON_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
Guard: TypeAlias = Callable[[str], str]


@frozen(kw_only=True)
class Spelling:
    """The variant of message data that a template expects where conventions differ."""

    empty_content: str | None = ""
    """The content of a message that has only calls."""
    has_text_arguments: bool = False
    """Pass arguments as JSON text instead of as an object."""
    thought_keys: tuple[str, ...] = ("reasoning_content",)


def to_plain_message(message: ChatMessage, *, guard: Guard, spelling: Spelling) -> PlainMessage:
    """Return the data of a message for templates, with every string guarded.

    Raises:
        RenderError: the role is not a plain word. Many templates put the role in their own markup, so it must not
            contain markup.
    """
    if message.role not in _COMMON_ROLES and not message.role.replace("_", "").replace("-", "").isalnum():
        raise RenderError(
            f"A message has the role {message.role!r}, which is no word; use system, user, assistant or tool."
        )
    content = spelling.empty_content if not message.content and message.tool_calls else message.content or ""
    plain: PlainMessage = {"role": message.role, "content": guard(content) if content is not None else None}
    if message.tool_calls:
        plain["tool_calls"] = [_to_plain_call(call, guard, spelling) for call in message.tool_calls]
    # Templates differ in the name of this key, so all names that the template may read are set.
    if message.reasoning is not None:
        plain |= dict.fromkeys(spelling.thought_keys, guard(message.reasoning))
    if message.tool_call_id is not None:
        plain["tool_call_id"] = guard(message.tool_call_id)
    if message.name is not None:
        plain["name"] = guard(message.name)
    return plain


def _to_plain_call(call: ToolCall, guard: Guard, spelling: Spelling) -> dict[str, Any]:
    """Return the data of a call.

    Arguments are an object, which most templates print as JSON, or text if they are not an object.
    """
    arguments: object = call.arguments
    if not spelling.has_text_arguments:
        try:
            arguments = json.loads(call.arguments)
        # A client can send JSON that is nested deeply enough to exceed the recursion limit.
        except (ValueError, RecursionError):
            arguments = call.arguments
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"id": guard(call.id), "type": "function", "function": guard_all(function, guard)}


def to_plain_tool(tool: Tool, *, guard: Guard) -> dict[str, Any]:
    """Return a tool in the structure of OpenAI's API, which templates expect, with every string guarded."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": guard_all(function, guard)}


def guard_all(value: Any, guard: Guard) -> Any:
    """Return JSON-like ``value`` with every string guarded, including keys; other objects are converted to text."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {guard(str(key)): guard_all(item, guard) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guard_all(item, guard) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else guard(str(value))
