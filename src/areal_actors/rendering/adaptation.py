"""What a chat template cannot say, said in text: tools, calls and results for models whose template knows none of them.

Found out once per template by rendering a few synthetic conversations. A template that ignores ``tools`` gets the
family's block in its system message (behind the default prompt that the template would have put there); calls that it
drops are written out in the content of their message; results come in the role ``tool`` if the template knows that
role, in the user's otherwise. What the template can do itself is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import evolve, frozen

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import RenderError
from areal_actors.rendering.parsers import ToolFormat
from areal_actors.rendering.template import ChatTemplate, PlainMessage

__all__ = ["Adaptation", "probe_adaptation", "to_plain_message", "to_plain_tool"]

_COMMON_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_SYSTEM_ROLES = ("system", "developer")
_ARGUMENT = "probe argument"
_CALL = ToolCall(id="probe0000", name="probe_name", arguments=json.dumps({"probe": _ARGUMENT}))
_TOOL = Tool(name="probe_tool", description="A probe.", parameters={"type": "object", "properties": {}})
_USER = ChatMessage(role="user", content="probe question")
_SYSTEM_TEXT = "probe system"
_RESULT_TEXT = "probe result"
Guard: TypeAlias = Callable[[str], str]


@frozen(kw_only=True)
class Adaptation:
    """The text that stands in for what a template lacks. The defaults suit a template that lacks nothing."""

    format: ToolFormat | None = None
    """The family's words; ``None`` where nothing stands in."""
    has_tools: bool = True
    has_calls: bool = True
    has_tool_role: bool = True
    has_system_role: bool = True
    default_system: str = ""
    empty_content: str | None = ""
    """What the template wants to find as the content of a message that has only calls."""

    def adapt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Sequence[ChatMessage]:
        """The same conversation in words that the template has. Adds the block of ``tools`` where it has none."""
        if self.format is None:
            return messages
        if not self.has_calls:
            messages = [self._spell_out(self.format, message) for message in messages]
        if not self.has_tool_role:
            messages = _join_results(messages)
        return self._offer(self.format.format_tools(tools), messages) if tools and not self.has_tools else messages

    def _spell_out(self, form: ToolFormat, message: ChatMessage) -> ChatMessage:
        if message.role == "tool":
            content = form.format_result(message.content or "")
            return ChatMessage(role="tool", content=content, tool_call_id=message.tool_call_id, name=message.name)
        if not message.tool_calls:
            return message
        parts = [message.content] if message.content else []
        parts += [form.format_call(call) for call in message.tool_calls]
        return ChatMessage(role=message.role, content="\n".join(parts), name=message.name, reasoning=message.reasoning)

    def _offer(self, block: str, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        first, *rest = messages
        if first.role in _SYSTEM_ROLES:
            return [_put_behind(block, first), *rest]
        if self.has_system_role:
            text = f"{self.default_system}\n\n{block}" if self.default_system else block
            return [ChatMessage(role="system", content=text), *messages]
        at = next((n for n, message in enumerate(messages) if message.role == "user"), 0)
        with_block = evolve(messages[at], content=f"{block}\n\n{messages[at].content or ''}")
        return [*messages[:at], with_block, *messages[at + 1 :]]


def _put_behind(block: str, message: ChatMessage) -> ChatMessage:
    return evolve(message, content=f"{message.content}\n\n{block}" if message.content else block)


def _join_results(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Results as the user's words; neighbours are joined, because such templates want roles to alternate."""
    joined: list[ChatMessage] = []
    is_open = False
    for message in messages:
        if message.role == "tool" and is_open:
            joined[-1] = evolve(joined[-1], content=f"{joined[-1].content}\n{message.content}")
        else:
            joined.append(ChatMessage(role="user", content=message.content) if message.role == "tool" else message)
        is_open = message.role == "tool"
    return joined


# ------------------------------------------------------------------------------------------- plain data


def to_plain_message(message: ChatMessage, *, guard: Guard, empty_content: str | None) -> PlainMessage:
    """What templates read, every string guarded. Raises ``RenderError`` for a role that is no plain word.

    A role becomes part of the template's own markup in many templates, so it may not bring any.
    """
    if message.role not in _COMMON_ROLES and not message.role.replace("_", "").replace("-", "").isalnum():
        raise RenderError(
            f"A message has the role {message.role!r}, which is no word; use system, user, assistant or tool."
        )
    content = empty_content if not message.content and message.tool_calls else message.content or ""
    plain: PlainMessage = {"role": message.role, "content": guard(content) if content is not None else None}
    if message.tool_calls:
        plain["tool_calls"] = [_to_plain_call(call, guard) for call in message.tool_calls]
    if message.reasoning is not None:
        plain["reasoning_content"] = guard(message.reasoning)
    if message.tool_call_id is not None:
        plain["tool_call_id"] = guard(message.tool_call_id)
    if message.name is not None:
        plain["name"] = guard(message.name)
    return plain


def _to_plain_call(call: ToolCall, guard: Guard) -> dict[str, Any]:
    """Arguments as an object, which is what templates print as JSON; as text if they are no object."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"id": guard(call.id), "type": "function", "function": guard_all(function, guard)}


def to_plain_tool(tool: Tool, *, guard: Guard) -> dict[str, Any]:
    """A tool in the shape of OpenAI's API, which templates expect, every string guarded."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": guard_all(function, guard)}


def guard_all(value: Any, guard: Guard) -> Any:
    """JSON-like ``value`` with every string guarded, keys too; what is not JSON becomes its text."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {guard(str(key)): guard_all(item, guard) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guard_all(item, guard) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else guard(str(value))


# ---------------------------------------------------------------------------------------------- probing


def probe_adaptation(template: ChatTemplate, form: ToolFormat) -> Adaptation:
    """Find out what ``template`` lacks; ``form`` is the family whose words stand in."""
    has_tools = _has_tools(template)
    empty_contents = [empty for empty in ("", None) if _shows_call(template, empty)]
    has_calls = bool(empty_contents)
    default_system = _default_system(template)
    return Adaptation(
        format=None if has_tools and has_calls else form,
        has_tools=has_tools,
        has_calls=has_calls,
        has_tool_role=has_calls or _shows_result(template),
        has_system_role=default_system is not None,
        default_system=default_system or "",
        empty_content=empty_contents[0] if has_calls else "",
    )


def _text(template: ChatTemplate, *messages: ChatMessage, tools: Sequence[Tool] = (), empty: str | None = "") -> str:
    """The rendered probe; nothing where the template refuses it."""
    plain = [to_plain_message(message, guard=str, empty_content=empty) for message in messages]
    try:
        return template.render(plain, tools=[to_plain_tool(tool, guard=str) for tool in tools], options={})
    except RenderError:
        return ""


def _has_tools(template: ChatTemplate) -> bool:
    system = ChatMessage(role="system", content=_SYSTEM_TEXT)
    return any(_TOOL.name in _text(template, *messages, tools=[_TOOL]) for messages in ((_USER,), (system, _USER)))


def _shows_call(template: ChatTemplate, empty: str | None) -> bool:
    call = ChatMessage(role="assistant", tool_calls=(_CALL,))
    result = ChatMessage(role="tool", content=_RESULT_TEXT, tool_call_id=_CALL.id, name=_CALL.name)
    conversations = ((_USER, call), (_USER, call, result))
    return any(_ARGUMENT in _text(template, *messages, empty=empty) for messages in conversations)


def _shows_result(template: ChatTemplate) -> bool:
    call = ChatMessage(role="assistant", content="probe call")
    result = ChatMessage(role="tool", content=_RESULT_TEXT)
    return _RESULT_TEXT in _text(template, _USER, call, result)


def _default_system(template: ChatTemplate) -> str | None:
    """The system prompt that the template adds where there is none; ``None`` if it has no system role at all."""
    given = _text(template, ChatMessage(role="system", content=_SYSTEM_TEXT), _USER)
    before, found, after = given.partition(_SYSTEM_TEXT)
    if not found:
        return None
    absent = _text(template, _USER)
    is_added = absent.startswith(before) and absent.endswith(after) and len(absent) >= len(before) + len(after)
    return absent[len(before) : len(absent) - len(after)] if is_added else ""
