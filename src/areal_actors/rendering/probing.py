"""Detection of the features that a chat template lacks, once per template, by rendering synthetic conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product

from attrs import evolve, frozen

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import RenderError
from areal_actors.rendering.adaptation import Adaptation
from areal_actors.rendering.parsers import ToolFormat
from areal_actors.rendering.plain import Spelling, to_plain_message, to_plain_tool
from areal_actors.rendering.template import ChatTemplate

__all__ = ["probe_adaptation"]

_ARGUMENT = "probe argument"
# Nine letters and digits, because Mistral's templates refuse other ids.
_CALL = ToolCall(id="probe0000", name="probe_name", arguments=json.dumps({"probe": _ARGUMENT}))
_PYTHON_OBJECT = "{'probe'"
"""The beginning of an object that a template printed as text, in Python syntax."""
_TOOL = Tool(name="probe_tool", description="A probe.", parameters={"type": "object", "properties": {}})
_USER = ChatMessage(role="user", content="probe question")
_ANSWER = ChatMessage(role="assistant", content="probe answer")
_SYSTEM_TEXT = "probe system"
_MORE_TEXT = "probe more of it"
_SYSTEM = ChatMessage(role="system", content=_SYSTEM_TEXT)
_RESULT_TEXT = "probe result"


def probe_adaptation(template: ChatTemplate, form: ToolFormat) -> Adaptation:
    """Return the adaptation for ``template``, with ``form`` as the substitute for features that it lacks."""
    probe = _Probe(template=template, spelling=_find_thought_keys(template))
    has_tools, spelling = probe.has_tools(), probe.find_spelling()
    probe = evolve(probe, spelling=spelling or probe.spelling)
    default_system = probe.find_default_system()
    return Adaptation(
        format=None if has_tools and spelling else form,
        has_tools=has_tools,
        has_calls=spelling is not None,
        has_tool_role=spelling is not None or probe.shows_result(),
        has_system_role=default_system is not None,
        has_developer_role=probe.has_developer_role(),
        has_system_runs=probe.has_system_runs(),
        has_late_system=probe.has_late_system(),
        has_long_ids=spelling is None or probe.has_long_ids(),
        has_text_beside_thoughtful_calls=spelling is None or probe.has_text_beside_thoughtful_calls(),
        default_system=default_system or "",
        spelling=probe.spelling,
    )


def _find_thought_keys(template: ChatTemplate) -> Spelling:
    keys = ("reasoning_content", "thinking")
    is_common = "reasoning_content" in template.source or "thinking" not in template.source
    return Spelling(thought_keys=keys[:1] if is_common else keys)


@frozen(kw_only=True)
class _Probe:
    template: ChatTemplate
    spelling: Spelling

    def render(self, *messages: ChatMessage, tools: Sequence[Tool] = ()) -> str:
        """Return the rendered probe; empty if the template refuses it."""
        plain = [to_plain_message(message, guard=str, spelling=self.spelling) for message in messages]
        try:
            return self.template.render(plain, tools=[to_plain_tool(tool, guard=str) for tool in tools], options={})
        except RenderError:
            return ""

    def has_tools(self) -> bool:
        return any(_TOOL.name in self.render(*messages, tools=[_TOOL]) for messages in ((_USER,), (_SYSTEM, _USER)))

    def find_spelling(self) -> Spelling | None:
        """Return the first variant in which calls are rendered, preferably as JSON; ``None`` if they never are."""
        shown = []
        for has_text_arguments, empty_content in product((False, True), ("", None)):
            spelling = evolve(self.spelling, empty_content=empty_content, has_text_arguments=has_text_arguments)
            text = evolve(self, spelling=spelling).render_call()
            if _ARGUMENT in text:
                shown.append((_PYTHON_OBJECT in text, spelling))
        # ``min`` is stable: the first variant that is rendered as JSON, otherwise the first one.
        return min(shown, key=lambda pair: pair[0])[1] if shown else None

    def render_call(self, call: ToolCall = _CALL, content: str | None = None, reasoning: str | None = None) -> str:
        """Render a call, alone and then with its result, because some templates require one and some the other."""
        answer = ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=(call,))
        result = ChatMessage(role="tool", content=_RESULT_TEXT, tool_call_id=call.id, name=call.name)
        texts = (self.render(_USER, answer), self.render(_USER, answer, result))
        return next((text for text in texts if _ARGUMENT in text), "")

    def has_long_ids(self) -> bool:
        return (
            self.render_call(ToolCall(id="call_0f1e2d3c4b5a69788796a5b4", name=_CALL.name, arguments=_CALL.arguments))
            != ""
        )

    def has_text_beside_thoughtful_calls(self) -> bool:
        return (
            self.render_call(content="text", reasoning="thought") != "" or self.render_call(reasoning="thought") == ""
        )

    def shows_result(self) -> bool:
        return _RESULT_TEXT in self.render(_USER, _ANSWER, ChatMessage(role="tool", content=_RESULT_TEXT))

    def has_developer_role(self) -> bool:
        """Return whether the template knows the role.

        A template that prints any role must also mention it in its source.
        """
        developer = ChatMessage(role="developer", content=_SYSTEM_TEXT)
        return "developer" in self.template.source and _SYSTEM_TEXT in self.render(developer, _USER)

    def has_system_runs(self) -> bool:
        text = self.render(_SYSTEM, ChatMessage(role="system", content=_MORE_TEXT), _USER)
        return _SYSTEM_TEXT in text and _MORE_TEXT in text

    def has_late_system(self) -> bool:
        text = self.render(_USER, _ANSWER, _SYSTEM, _USER)
        # A refusal is acceptable: the client gets an error instead of a silent omission.
        return not text or _SYSTEM_TEXT in text

    def find_default_system(self) -> str | None:
        """Return the system prompt that the template adds if there is none; ``None`` if it has no system role."""
        given = self.render(_SYSTEM, _USER)
        before, found, after = given.partition(_SYSTEM_TEXT)
        if not found:
            return None
        absent = self.render(_USER)
        # The default prompt is the difference between both renderings, provided that they agree around it.
        is_added = absent.startswith(before) and absent.endswith(after) and len(absent) >= len(before) + len(after)
        return absent[len(before) : len(absent) - len(after)] if is_added else ""
