"""Workarounds for chat templates that lack a feature: tools, calls and results, roles, and the ids of calls.

``probing`` finds out what a template lacks. If a template ignores ``tools``, the block of the model family goes into
the system message (after the default prompt that the template would have added). Calls that it drops are written in the
content of their message. Results use the role ``tool`` if the template knows that role, otherwise the role ``user``. A
developer message becomes a system message if the template does not know the role ``developer``, and without a system
role the system prompt is put before the first question. Everything that the template can do itself is left to it.
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
    """The features of a template, and the substitutes for those it lacks.

    The defaults suit a template that lacks nothing.
    """

    format: ToolFormat | None = None
    """The format of the model family; ``None`` if no substitute is needed."""
    has_tools: bool = True
    has_calls: bool = True
    has_tool_role: bool = True
    has_system_role: bool = True
    has_developer_role: bool = True
    has_system_runs: bool = True
    """True if several system messages may come first."""
    has_late_system: bool = True
    """True if system messages after the first message are rendered or refused; false if they are silently dropped."""
    has_long_ids: bool = True
    """True if call ids may be any text; otherwise they must be nine letters and digits."""
    has_text_beside_thoughtful_calls: bool = True
    """True if a message with calls may have both content and reasoning."""
    default_system: str = ""
    spelling: Spelling = field(factory=Spelling)

    def adapt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Sequence[ChatMessage]:
        """Return the conversation in a form that the template can render.

        If the template does not support ``tools``, their block is added.

        Raises:
            RenderError: the template would silently drop a message.
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
        # A system message replaces the template's default prompt, so that prompt is repeated in it.
        text = f"{self.default_system}\n\n{block}" if self.default_system else block
        return [ChatMessage(role="system", content=text), *messages]


def _spell_out(form: ToolFormat, message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        content = form.format_result(message.content or "")
        return ChatMessage(role="tool", content=content, tool_call_id=message.tool_call_id, name=message.name)
    if not message.tool_calls:
        return message
    # The calls move to the content, because the template would drop ``tool_calls``.
    parts = [message.content] if message.content else []
    parts += [form.format_call(call) for call in message.tool_calls]
    return ChatMessage(role=message.role, content="\n".join(parts), name=message.name, reasoning=message.reasoning)


def _put_behind(block: str, message: ChatMessage) -> ChatMessage:
    return evolve(message, content=f"{message.content}\n\n{block}" if message.content else block)


def _join_results(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Turn results into user messages, and join adjacent ones, because such templates require alternating roles."""
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
    """Return the system messages at the beginning, and all other messages."""
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
    """Join the system messages at the beginning into one."""
    leading, rest = _split_system(messages)
    return [evolve(leading[0], content=_join_contents(leading)), *rest] if len(leading) > 1 else messages


def _put_before_question(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Put the content of the system messages at the beginning of the first question."""
    leading, rest = _split_system(messages)
    if not leading:
        return messages
    # Joined with the question instead of sent as a separate message, because such templates require alternating roles.
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
    """Return nine letters and digits that depend only on the id; an id of this form is returned unchanged."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    # A hash, so that a call and its result get the same short id without any state.
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8])
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9))


def _with_text_as_thought(message: ChatMessage) -> ChatMessage:
    if not (message.tool_calls and message.content and message.reasoning):
        return message
    # As reasoning, the text keeps its place before the calls.
    return evolve(message, content=None, reasoning=f"{message.reasoning}\n\n{message.content}")
