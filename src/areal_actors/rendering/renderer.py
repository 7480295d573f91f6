"""``TemplateRenderer``: any Hugging Face chat template behind the ``Renderer`` protocol.

The parts: ``template`` (Jinja), ``tokens`` (tokenizer), ``adaptation`` (what the template lacks), ``typesetter``
(messages to text), ``suffix`` and ``parity`` (extension), ``parsers`` and ``stream`` (answers). ``loading`` puts them
together.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from attrs import field, frozen

from areal_actors.domain import ChatMessage, ForkReason, Grammar, InOrder, Ints, Tool, ToolChoice, as_ints
from areal_actors.errors import RenderError, UnsupportedParameter
from areal_actors.rendering.base import StreamParser
from areal_actors.rendering.parity import ParityProbe, Verdict
from areal_actors.rendering.parsers import AnswerParser, PlainText, ReasoningFormat, ToolFormat
from areal_actors.rendering.shapes import Shape, canonical_json, find_thought, shape_of
from areal_actors.rendering.stream import AnswerStream, join_deltas
from areal_actors.rendering.tokens import Vocabulary
from areal_actors.rendering.typesetter import Typesetter

__all__ = ["TemplateRenderer"]

_NO_OPTIONS: Mapping[str, Any] = {}
_MAX_KEPT = 4096
"""Verdicts that are kept; a stranger may send any number of shapes."""
_QUESTION = ChatMessage(role="user", content="question")


@frozen(kw_only=True, eq=False)
class TemplateRenderer:
    """A chat template and a tokenizer at work. Made by ``load_renderer`` or ``create_renderer``.

    ``probe`` is ``None`` for a template without an end of turn: nothing can be extended then, every turn is rendered
    anew.
    """

    vocabulary: Vocabulary
    typesetter: Typesetter
    stop_token_ids: tuple[int, ...]
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    probe: ParityProbe | None
    _verdicts: dict[Shape, Verdict] = field(factory=dict, init=False)
    _openings: dict[str, bool] = field(factory=dict, init=False)
    _hidden: AbstractSet[int] = field(init=False)
    _hidden_with_tools: AbstractSet[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Find the ids that no client sees: end tokens, and special tokens that no parser looks for."""
        reasoning = self.reasoning_format.markers if self.reasoning_format else ()
        tools = self.tool_format.markers if self.tool_format else ()
        object.__setattr__(self, "_hidden", self._without(reasoning))
        object.__setattr__(self, "_hidden_with_tools", self._without((*reasoning, *tools)))

    def _without(self, markers: Sequence[str]) -> AbstractSet[int]:
        special = {token_id for token_id, text in self.vocabulary.special.items() if text not in markers}
        return frozenset(special | {*self.stop_token_ids})

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id of the tokenizer."""
        return self.vocabulary.size

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Ints:
        """See ``Renderer.render``."""
        text = self.typesetter.set(messages, tools=tools, options=template_kwargs or _NO_OPTIONS)
        return as_ints(self.vocabulary.encode(text))

    def extend(
        self,
        *,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        is_closed: bool,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Ints | ForkReason:
        """See ``Renderer.extend``."""
        if not history or history[-1].role != "assistant":
            raise ValueError("history must end with the assistant's answer that the new messages follow")
        options = template_kwargs or _NO_OPTIONS
        tail = self._tail(history, new, tools=tools, options=options)
        if tail is None:
            return ForkReason.TEMPLATE_REWROTE_HISTORY
        return as_ints(self.vocabulary.encode(tail)[1 if is_closed else 0 :])

    def _tail(
        self,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool],
        options: Mapping[str, Any],
    ) -> str | None:
        """The text from the answer's end-of-turn token on; ``None`` where the template rewrites what precedes it."""
        if self.probe is None:
            return None
        verdict = self._judge(self.probe, shape_of(history, new, tools=tools, options=options), options)
        if not verdict.faithful or (verdict.depends_on_history and find_thought(history) not in verdict.faithful):
            return None
        try:
            return self.probe.suffix.render(
                history[-1], new, tools=tools if verdict.needs_tools else (), options=options
            )
        except RenderError:
            return None

    def _judge(self, probe: ParityProbe, shape: Shape, options: Mapping[str, Any]) -> Verdict:
        verdict = self._verdicts.get(shape)
        if verdict is None:
            if len(self._verdicts) >= _MAX_KEPT:
                self._verdicts.clear()
            verdict = self._verdicts[shape] = probe.judge(shape, options)
        return verdict

    def parse(
        self,
        token_ids: Ints | Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        call_ids: Callable[[], str] | None = None,
        is_plain: bool = False,
    ) -> ChatMessage:
        """See ``Renderer.parse``."""
        stream = self.open_stream(
            tools=tools, stop=stop, template_kwargs=template_kwargs, call_ids=call_ids, is_plain=is_plain
        )
        return join_deltas((*stream.feed(token_ids), *stream.finish()))

    def open_stream(
        self,
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        call_ids: Callable[[], str] | None = None,
        is_plain: bool = False,
    ) -> StreamParser:
        """See ``Renderer.open_stream``."""
        if is_plain:
            return self._open_plain(stop)
        tool_format = self.tool_format if tools else None
        return AnswerStream(
            detokenizer=self.vocabulary.open_detokenizer(),
            hidden=self._hidden_with_tools if tool_format else self._hidden,
            stop=stop,
            reasoning=self._open_reasoning(template_kwargs or _NO_OPTIONS),
            tools=tool_format.open_parser(call_ids or _create_call_id) if tool_format else PlainText(),
        )

    def _open_plain(self, stop: Sequence[str]) -> StreamParser:
        return AnswerStream(
            detokenizer=self.vocabulary.open_detokenizer(),
            hidden=self._hidden_with_tools,
            stop=stop,
            reasoning=PlainText(),
            tools=PlainText(),
        )

    def constrain(
        self,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | str = ToolChoice.AUTO,
        parallel_tool_calls: bool = True,
        response_format: Grammar | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Grammar | None:
        """See ``Renderer.constrain``."""
        if tool_choice in (ToolChoice.AUTO, ToolChoice.NONE):
            answer = response_format
        else:
            answer = self._constrain_calls(tools, tool_choice, is_parallel=parallel_tool_calls)
        if answer is None or self.reasoning_format is None:
            return answer
        is_open = self._is_open(self.reasoning_format, template_kwargs or _NO_OPTIONS)
        return InOrder(parts=(self.reasoning_format.constrain(is_open=is_open), answer))

    def _constrain_calls(self, tools: Sequence[Tool], choice: ToolChoice | str, *, is_parallel: bool) -> Grammar:
        wanted = tools if choice is ToolChoice.REQUIRED else [tool for tool in tools if tool.name == choice]
        form = self.tool_format.constrain(wanted, is_parallel=is_parallel) if self.tool_format and wanted else None
        if form is None:
            raise UnsupportedParameter(
                "tool_choice cannot be enforced: the way in which this model writes calls has no grammar. Use auto.",
                param="tool_choice",
            )
        return form

    def encode(self, text: str, *, is_start: bool) -> Ints:
        """See ``Renderer.encode``."""
        return as_ints(self.vocabulary.encode_raw(text, is_start=is_start))

    def decode(self, token_ids: Ints | Sequence[int]) -> str:
        """See ``Renderer.decode``."""
        return self.vocabulary.decode(token_ids)

    def _open_reasoning(self, options: Mapping[str, Any]) -> AnswerParser:
        if self.reasoning_format is None:
            return PlainText()
        return self.reasoning_format.open_parser(is_open=self._is_open(self.reasoning_format, options))

    def _is_open(self, form: ReasoningFormat, options: Mapping[str, Any]) -> bool:
        """``_is_opened``, remembered."""
        key = canonical_json(options)
        if key not in self._openings:
            if len(self._openings) >= _MAX_KEPT:
                self._openings.clear()
            self._openings[key] = self._is_opened(form, options)
        return self._openings[key]

    def _is_opened(self, form: ReasoningFormat, options: Mapping[str, Any]) -> bool:
        """Whether prompts with these options end inside the thinking."""
        try:
            return form.is_opened_by(self.typesetter.set([_QUESTION], options=options))
        except RenderError:
            return False


def _create_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
