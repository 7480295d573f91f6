"""Rendering of conversations to text: adaptation, guarding, template. Tokenisation is separate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from areal_actors.domain import ChatMessage, Tool
from areal_actors.errors import RenderError
from areal_actors.rendering.adaptation import Adaptation
from areal_actors.rendering.plain import guard_all, to_plain_message, to_plain_tool
from areal_actors.rendering.template import ChatTemplate, PlainMessage
from areal_actors.rendering.tokens import Vocabulary

__all__ = ["Typesetter"]


@frozen(kw_only=True)
class Typesetter:
    """Renders conversations to text with one template."""

    template: ChatTemplate
    adaptation: Adaptation
    vocabulary: Vocabulary

    def set(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any],
        has_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the conversation, in which foreign special tokens are broken.

        Raises:
            RenderError: the template refuses the conversation, it is empty, or it is nested too deeply.
        """
        if not messages:
            raise RenderError("There are no messages to render; send at least one.")
        try:
            plain_messages = self._to_plain(self.adaptation.adapt(messages, tools))
            plain_tools = self._to_plain_tools(tools) if self.adaptation.has_tools else ()
            plain_options = guard_all(options, self.vocabulary.guard)
        except RecursionError as error:
            raise RenderError("Tools, arguments or template options are nested too deeply to be rendered.") from error
        return self.template.render(
            plain_messages,
            tools=plain_tools,
            options=plain_options,
            has_generation_prompt=has_generation_prompt,
        )

    def _to_plain(self, messages: Iterable[ChatMessage]) -> list[PlainMessage]:
        guard, spelling = self.vocabulary.guard, self.adaptation.spelling
        return [to_plain_message(message, guard=guard, spelling=spelling) for message in messages]

    def _to_plain_tools(self, tools: Iterable[Tool]) -> list[dict[str, Any]]:
        return [to_plain_tool(tool, guard=self.vocabulary.guard) for tool in tools]
