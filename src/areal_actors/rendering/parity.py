"""Is a rendered suffix what the template makes of the whole conversation? Found out once per shape, by rendering both.

A template is free to look back: to drop earlier thinking when a new question comes, to move the system prompt or the
tools to the last question, to merge results into one turn. For each shape of extension that occurs, short synthetic
conversations are rendered whole and as prompt + answer + tail, and compared as text and as ids. Where they differ the
template rewrites history, and such turns are branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from areal_actors.domain import ChatMessage, Tool
from areal_actors.errors import RenderError
from areal_actors.rendering.shapes import PROBE_TOOLS, Reasoning, Shape, ThoughtAt, Trait, create_contexts
from areal_actors.rendering.suffix import SuffixRenderer
from areal_actors.rendering.tokens import Vocabulary
from areal_actors.rendering.typesetter import Typesetter

__all__ = ["ParityProbe", "Verdict"]


@frozen(kw_only=True)
class Verdict:
    """Behind which histories a shape's suffix is faithful, and whether it has to be rendered with the tools."""

    faithful: frozenset[ThoughtAt]
    needs_tools: bool = False

    @property
    def depends_on_history(self) -> bool:
        """Whether it matters where the history thinks."""
        return 0 < len(self.faithful) < len(ThoughtAt)


@frozen(kw_only=True)
class _Case:
    """An extension to be rendered both ways.

    ``marks`` must be found in the answer's text, in this order; ``new_marks`` are those of the new messages.
    """

    trait: Trait
    answer: ChatMessage
    marks: tuple[str, ...]
    new: tuple[ChatMessage, ...]
    new_marks: tuple[str, ...]
    tools: tuple[Tool, ...]
    options: Mapping[str, Any]


@frozen(kw_only=True)
class ParityProbe:
    """Judges shapes for one template and tokenizer."""

    typesetter: Typesetter
    suffix: SuffixRenderer
    vocabulary: Vocabulary
    stop_token_ids: tuple[int, ...]

    def judge(self, shape: Shape, options: Mapping[str, Any]) -> Verdict:
        """The verdict on ``shape``; ``options`` are those that the shape was made with. Takes milliseconds: keep it."""
        case = _create_case(shape, options)
        try:
            tail = self.suffix.render(case.answer, case.new, tools=case.tools, options=options)
            tail_without_tools = self.suffix.render(case.answer, case.new, tools=(), options=options)
        except RenderError:
            return Verdict(faithful=frozenset())
        if self.vocabulary.encode(tail)[0] not in self.stop_token_ids:
            return Verdict(faithful=frozenset())
        return Verdict(faithful=self._faithful(shape, case, tail), needs_tools=tail != tail_without_tools)

    def _faithful(self, shape: Shape, case: _Case, tail: str) -> frozenset[ThoughtAt]:
        """Thinking far back is judged on top of a history without any, thinking close by on top of both."""
        contexts = create_contexts(shape.opening, is_after_result=shape.is_after_result)
        faithful: set[ThoughtAt] = set()
        for place in (ThoughtAt.NOWHERE, ThoughtAt.BEFORE, ThoughtAt.SINCE):
            verdicts = [self._agrees(context, case, tail) for context in contexts[place]]
            if not any(verdicts) or False in verdicts:
                break
            faithful.add(place)
        return frozenset(faithful)

    def _agrees(self, context: Sequence[ChatMessage], case: _Case, tail: str) -> bool | None:
        """Whether both ways agree behind ``context``; ``None`` where the template refuses the context itself."""
        if not context:
            return None
        try:
            prompt = self.typesetter.set(context, tools=case.tools, options=case.options)
        except RenderError:
            return None
        try:
            whole = self.typesetter.set([*context, case.answer, *case.new], tools=case.tools, options=case.options)
        except RenderError:
            return False
        return whole.startswith(prompt) and self._continues(whole, len(prompt), case, tail)

    def _continues(self, whole: str, start: int, case: _Case, tail: str) -> bool:
        end = _find_answer(whole, start, case)
        closing = None if end is None else self.suffix.find_closing(whole, end)
        if end is None or closing is None or whole[closing:] != tail:
            return False
        rest = whole[end:closing]
        is_clean = not any(mark in rest for mark in case.new_marks) if case.answer.tool_calls else not rest.strip()
        encode = self.vocabulary.encode
        return is_clean and encode(whole) == encode(whole[:closing]) + encode(tail)


def _create_case(shape: Shape, options: Mapping[str, Any]) -> _Case:
    answer, marks = shape.answer.create(5)
    created = [trait.create(index) for index, trait in enumerate(shape.new, start=100)]
    return _Case(
        trait=shape.answer,
        answer=answer,
        marks=marks,
        new=tuple(message for message, _ in created),
        new_marks=tuple(mark for _, marks in created for mark in marks),
        tools=PROBE_TOOLS if shape.has_tools else (),
        options=options,
    )


def _find_answer(whole: str, start: int, case: _Case) -> int | None:
    """Where the answer's text, which begins at ``start``, has said all that it must; ``None`` if something is amiss.

    What the model sampled is in front of the tail as it is, so only the template's additions and omissions count:
    nothing but white space may precede content that was not thought about, and a block must, where the thinking was
    empty.
    """
    end = start
    for mark in case.marks:
        at = whole.find(mark, end)
        if at < 0:
            return None
        end = at + len(mark)
    if case.trait.reasoning in {Reasoning.PRESENT, Reasoning.TAGGED}:
        return end
    if not case.trait.has_content:
        return end if case.trait.reasoning is Reasoning.ABSENT else None
    is_bare = not whole[start : whole.find(case.marks[0], start)].strip()
    return end if is_bare == (case.trait.reasoning is Reasoning.ABSENT) else None
