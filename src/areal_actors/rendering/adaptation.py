"""What a chat template cannot say, said in other words: tools, calls and results, roles, and the ids of calls.

What a template lacks is found out by ``probing.py``. A template that ignores ``tools`` gets the family's block in its
system message (behind the default prompt that the template would have put there); calls that it drops are written out
in the content of their message; results come in the role ``tool`` if the template knows that role, in the user's
otherwise. A developer is a system where nobody else is known, and a system prompt precedes the first question where
there is no role for it. What the template can do itself is left to it.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Sequence

from attrs import evolve, field, frozen

from areal_actors.domain import ChatMessage, Tool
from areal_actors.errors import RenderError
from areal_actors.rendering.parsers import ToolFormat
from areal_actors.rendering.plain import Spelling

__all__ = ["Adaptation"]

_SYSTEM_ROLES = ("system", "developer")
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ALPHABET = string.digits + string.ascii_letters


@frozen(kw_only=True)
class Adaptation:
    """What stands in for what a template lacks. The defaults suit a template that lacks nothing."""

    format: ToolFormat | None = None
    """The family's words; ``None`` where nothing stands in."""
    has_tools: bool = True
    has_calls: bool = True
    has_tool_role: bool = True
    has_system_role: bool = True
    has_developer_role: bool = True
    has_system_runs: bool = True
    """Whether there may be several system messages in front."""
    has_late_system: bool = True
    """Whether system messages that are not the first one are shown, or refused, rather than dropped."""
    has_long_ids: bool = True
    """Whether ids of calls may be anything; nine letters and digits otherwise."""
    has_text_beside_thoughtful_calls: bool = True
    """Whether a message with calls may have both content and thinking."""
    default_system: str = ""
    spelling: Spelling = field(factory=Spelling)

    def adapt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Sequence[ChatMessage]:
        """The same conversation in words that the template has. Adds the block of ``tools`` where it has none.

        Raises ``RenderError`` where the template would silently drop a message.
        """
        messages = self._adapt_calls(self._adapt_roles(messages))
        if tools and not self.has_tools and self.format is not None:
            messages = self._offer(self.format.format_tools(tools), messages)
        return messages if self.has_system_role else _put_before_question(messages)

    def _adapt_roles(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        if not self.has_developer_role and any(message.role == "developer" for message in messages):
            messages = [evolve(m, role="system") if m.role == "developer" else m for m in messages]
        if not self.has_late_system:
            _refuse_late_system(messages)
        return messages if self.has_system_runs else _join_system(messages)

    def _adapt_calls(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        if not self.has_long_ids:
            messages = [_with_short_ids(message) for message in messages]
        if not self.has_text_beside_thoughtful_calls:
            messages = [_with_text_as_thought(message) for message in messages]
        if self.format is not None and not self.has_calls:
            messages = [_spell_out(self.format, message) for message in messages]
        return messages if self.has_tool_role else _join_results(messages)

    def _offer(self, block: str, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        first, *rest = messages
        if first.role in _SYSTEM_ROLES:
            return [_put_behind(block, first), *rest]
        text = f"{self.default_system}\n\n{block}" if self.default_system else block
        return [ChatMessage(role="system", content=text), *messages]


def _spell_out(form: ToolFormat, message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        content = form.format_result(message.content or "")
        return ChatMessage(role="tool", content=content, tool_call_id=message.tool_call_id, name=message.name)
    if not message.tool_calls:
        return message
    parts = [message.content] if message.content else []
    parts += [form.format_call(call) for call in message.tool_calls]
    return ChatMessage(role=message.role, content="\n".join(parts), name=message.name, reasoning=message.reasoning)


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


# -------------------------------------------------------------------------------------------- system messages


def _split_system(messages: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage]]:
    """The system messages that come first, and all others."""
    count = next((n for n, message in enumerate(messages) if message.role not in _SYSTEM_ROLES), len(messages))
    return messages[:count], messages[count:]


def _join_contents(messages: Iterable[ChatMessage]) -> str:
    return "\n\n".join(message.content for message in messages if message.content)


def _refuse_late_system(messages: Sequence[ChatMessage]) -> None:
    _, rest = _split_system(messages)
    if any(message.role in _SYSTEM_ROLES for message in rest):
        raise RenderError(
            "The model's chat template drops system and developer messages behind the first question. "
            "Send them first, or as the user's."
        )


def _join_system(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """One system message, the first."""
    leading, rest = _split_system(messages)
    return [evolve(leading[0], content=_join_contents(leading)), *rest] if len(leading) > 1 else messages


def _put_before_question(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """What the system says first becomes the beginning of the first question."""
    leading, rest = _split_system(messages)
    if not leading:
        return messages
    if rest and rest[0].role == "user":
        return [evolve(rest[0], content=_join_contents([*leading, rest[0]])), *rest[1:]]
    return [ChatMessage(role="user", content=_join_contents(leading)), *rest]


# -------------------------------------------------------------------------------------------------------- calls


def _with_short_ids(message: ChatMessage) -> ChatMessage:
    if message.tool_call_id is not None:
        message = evolve(message, tool_call_id=_shorten_id(message.tool_call_id))
    calls = tuple(evolve(call, id=_shorten_id(call.id)) for call in message.tool_calls)
    return evolve(message, tool_calls=calls) if calls else message


def _shorten_id(call_id: str) -> str:
    """Nine letters and digits, always the same ones for the same id; an id that is such is left alone."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8])
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9))


def _with_text_as_thought(message: ChatMessage) -> ChatMessage:
    if not (message.tool_calls and message.content and message.reasoning):
        return message
    return evolve(message, content=None, reasoning=f"{message.reasoning}\n\n{message.content}")
