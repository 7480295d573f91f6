"""Checks that a rendered suffix equals the template's rendering of the whole conversation, once per shape.

A template may depend on earlier messages: it may drop earlier reasoning when a new question comes, move the system
prompt or the tools to the last question, or merge results into one turn. For each shape of extension that occurs, short
synthetic conversations are rendered both as a whole and as prompt + answer + tail, and compared as text and as ids. If
they differ, the template rewrites history, and such turns become branches.
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
    """The histories for which a shape's suffix is faithful, and whether it has to be rendered with the tools."""

    faithful: frozenset[ThoughtAt]
    needs_tools: bool = False

    @property
    def depends_on_history(self) -> bool:
        """True if the result depends on where the history contains reasoning."""
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
        """Return the verdict on ``shape``, which was made with ``options``.

        Takes milliseconds, so callers should cache it.
        """
        case = _create_case(shape, options)
        try:
            tail = self.suffix.render(case.answer, case.new, tools=case.tools, options=options)
            # Only a template that repeats the tools in the tail needs them there.
            tail_without_tools = self.suffix.render(case.answer, case.new, tools=(), options=options)
        except RenderError:
            return Verdict(faithful=frozenset())
        # The sampled answer ends with this token, so a tail that begins with any other does not continue it.
        if self.vocabulary.encode(tail)[0] not in self.stop_token_ids:
            return Verdict(faithful=frozenset())
        return Verdict(faithful=self._faithful(shape, case, tail), needs_tools=tail != tail_without_tools)

    def _faithful(self, shape: Shape, case: _Case, tail: str) -> frozenset[ThoughtAt]:
        """Return the places of earlier reasoning for which the tail is faithful.

        Each place is judged only if the weaker one passed: first a history without reasoning, then with reasoning
        before the last question, then since.
        """
        contexts = create_contexts(shape.opening, is_after_result=shape.is_after_result)
        faithful: set[ThoughtAt] = set()
        for place in (ThoughtAt.NOWHERE, ThoughtAt.BEFORE, ThoughtAt.SINCE):
            verdicts = [self._agrees(context, case, tail) for context in contexts[place]]
            # A context that the template refuses (``None``) does not count, but at least one must have been rendered.
            if not any(verdicts) or False in verdicts:
                break
            faithful.add(place)
        return frozenset(faithful)

    def _agrees(self, context: Sequence[ChatMessage], case: _Case, tail: str) -> bool | None:
        """Return whether both renderings agree after ``context``; ``None`` if the template refuses ``context``."""
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
        # After a call's last argument its closing syntax is allowed, but no part of the new messages: a template that
        # does not close an answer with calls has its next end of turn only after the tool's result.
        rest = whole[end:closing]
        is_clean = not any(mark in rest for mark in case.new_marks) if case.answer.tool_calls else not rest.strip()
        encode = self.vocabulary.encode
        # Equal text is not enough: the tokenizer might merge characters across the cut.
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
    """Return the position where the answer's text, which begins at ``start``, ends; ``None`` if it is not as expected.

    The sampled text precedes the tail unchanged, so only additions and omissions of the template matter: only white
    space may precede content without reasoning, whereas a block must precede it if the reasoning was empty.
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
