"""Extension of a prompt by the next messages alone, where that gives the ids of the whole conversation.

::

    <|im_start|>user           ─┐
    question<|im_end|>          │ stand-in
    <|im_start|>assistant       │
    answer 7c1e5fd2            ─┘ <|im_end|>             ─┐
                                  <|im_start|>tool        │ the tail
                                  12<|im_end|>            │
                                  <|im_start|>assistant  ─┘

``SuffixRenderer`` renders a stand-in conversation (a question, an answer that contains a mark, the new messages), and
cuts it at the token that ends the marked answer. In some families (GLM) this is the token that opens the next turn, and
the tail fits only if the model has sampled the same one.

A template may depend on earlier messages: it may drop earlier reasoning when a new question comes, move the system
prompt or the tools to the last question, or merge results into one turn. Therefore ``judge`` renders short synthetic
conversations, once per *shape* of extension that occurs, both as a whole and as prompt + answer + tail, and compares
them as text and as ids. If they differ, the template rewrites history, and such turns become branches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from itertools import takewhile

from attrs import Factory, evolve, field, frozen

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import RenderError
from areal_actors.rendering.template import Options, PromptFormatter
from areal_actors.rendering.tokens import Vocabulary

_MARK = "answer 7c1e5fd2"
_QUESTION = ChatMessage(role="user", content="question")
_ANSWER = ChatMessage(role="assistant", content=_MARK)
_MARKED_ARGUMENTS = json.dumps({"mark": _MARK})


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

    ``marks`` must be found in the answer's text, in this order, and ``new_marks`` in the tail.
    """

    trait: Trait
    answer: ChatMessage
    marks: tuple[str, ...]
    new: tuple[ChatMessage, ...]
    new_marks: tuple[str, ...]
    tools: tuple[Tool, ...]
    options: Options


@frozen(kw_only=True)
class SuffixRenderer:
    """Renders tails for one template and tokenizer, and judges for which shapes of extensions they are right."""

    formatter: PromptFormatter
    vocabulary: Vocabulary
    stop_token_ids: tuple[int, ...]
    end_of_turn: int | None
    """See ``find_end_of_turn``; any other stop id may open the next turn, and depend on its role."""
    _closing: re.Pattern[str] = field(
        init=False,
        default=Factory(lambda self: _find_closing_tokens(self.vocabulary, self.stop_token_ids), takes_self=True),
    )
    """Matches the end-of-turn tokens of this model."""

    def judge(self, shape: Shape, options: Options) -> Verdict:
        """Return the verdict on ``shape``, which was made with ``options``.

        Takes milliseconds, so callers should cache it.
        """
        answer, marks = shape.answer.create(5)
        created = [trait.create(index) for index, trait in enumerate(shape.new, start=100)]
        case = _Case(
            trait=shape.answer,
            answer=answer,
            marks=marks,
            new=tuple(message for message, _ in created),
            # Templates may leave out thoughts.
            new_marks=tuple(mark for _, marks in created for mark in marks if not mark.startswith(_THOUGHT)),
            tools=PROBE_TOOLS if shape.has_tools else (),
            options=options,
        )
        try:
            tail = self.render(case.answer, case.new, tools=case.tools, options=options)
            # Only a template that repeats the tools in the tail needs them there.
            tail_without_tools = self.render(case.answer, case.new, tools=(), options=options)
        except RenderError:
            return Verdict(faithful=frozenset())
        # The sampled answer ends with this token, so a tail that begins with any other does not continue it.
        if self.vocabulary.encode(tail)[0] not in self.stop_token_ids:
            return Verdict(faithful=frozenset())
        # A template that cannot show several calls in one message has results between them, which a tail lacks.
        if not all(mark in tail for mark in case.new_marks):
            return Verdict(faithful=frozenset())
        # Each place of earlier reasoning is judged only if the weaker one passed: first a history without reasoning,
        # then with reasoning before the last question, then since.
        contexts = create_contexts(shape.opening, is_after_result=shape.is_after_result)
        faithful: set[ThoughtAt] = set()
        for place in (ThoughtAt.NOWHERE, ThoughtAt.BEFORE, ThoughtAt.SINCE):
            verdicts = [self._agrees(context, case, tail) for context in contexts[place]]
            # A context that the template refuses (``None``) does not count, but at least one must have been rendered.
            if not any(verdicts) or False in verdicts:
                break
            faithful.add(place)
        return Verdict(faithful=frozenset(faithful), needs_tools=tail != tail_without_tools)

    def render(
        self, answer: ChatMessage, new: Sequence[ChatMessage], *, tools: Sequence[Tool], options: Options
    ) -> str:
        """Return the text that begins with the end-of-turn token of ``answer``.

        Raises:
            RenderError: the template refuses the stand-in, or does not close it with an end-of-turn token.
        """
        stand_in = _ANSWER
        if answer.tool_calls:
            # An answer of the same kind. Calls keep ids and names, which templates look up; the last has the mark, and
            # the arguments of the others are not needed.
            *others, last = answer.tool_calls
            calls = [ToolCall(id=call.id, name=call.name, arguments="{}") for call in others]
            calls.append(ToolCall(id=last.id, name=last.name, arguments=_MARKED_ARGUMENTS))
            content = "text" if answer.content else None
            stand_in = ChatMessage(role=answer.role, content=content, tool_calls=tuple(calls))
        text = self.formatter.format([_QUESTION, stand_in, *new], tools=tools, options=options)
        closing = self._find_closing(text, text.find(_MARK))
        if closing is None:
            raise RenderError("The chat template does not end the assistant's turn with an end-of-turn token.")
        return text[closing:]

    def _find_closing(self, text: str, start: int) -> int | None:
        """Return the position of the first end-of-turn token at or after ``start``.

        ``None`` if there is none, or if ``start`` is -1.
        """
        found = self._closing.search(text, start) if start >= 0 else None
        return found.start() if found else None

    def _agrees(self, context: Sequence[ChatMessage], case: _Case, tail: str) -> bool | None:
        """Return whether both renderings agree after ``context``; ``None`` if the template refuses ``context``."""
        if not context:
            return None
        try:
            prompt = self.formatter.format(context, tools=case.tools, options=case.options)
        except RenderError:
            return None
        given, alone = [*context, case.answer], ""
        try:
            whole = self.formatter.format([*given, *case.new], tools=case.tools, options=case.options)
            if case.answer.tool_calls:
                alone = self.formatter.format(
                    given, tools=case.tools, options=case.options, has_generation_prompt=False
                )
        except RenderError:
            return False
        if not whole.startswith(prompt):
            return False
        end = _find_answer(whole, len(prompt), case)
        closing = None if end is None else self._find_closing(whole, end)
        if end is None or closing is None or whole[closing:] != tail:
            return False
        # After a call's last argument its closing syntax is allowed, but no part of the new messages: a template that
        # does not close an answer with calls has its next end of turn only after the tool's result.
        rest = whole[end:closing]
        is_clean = alone.rpartition(case.marks[-1])[2].startswith(rest) if alone else not rest.strip()
        encode = self.vocabulary.encode
        # Equal text is not enough: the tokenizer might merge characters across the cut.
        return is_clean and encode(whole) == encode(whole[:closing]) + encode(tail)


def _find_answer(whole: str, start: int, case: _Case) -> int | None:
    """Return where the answer's text, which begins at ``start``, ends; ``None`` if it is not as expected."""
    end = start
    for mark in case.marks:
        at = whole.find(mark, end)
        if at < 0:
            return None
        end = at + len(mark)
    # The sampled text precedes the tail unchanged, so only additions and omissions of the template matter: no block may
    # precede an answer without reasoning, whereas one must precede it if the reasoning was empty.
    if case.trait.reasoning in {Reasoning.PRESENT, Reasoning.TAGGED}:
        return end
    before = whole[start : whole.find(case.marks[0], start)] if case.marks else ""
    # A call's syntax precedes its first argument, so that only the common end of a block can be told from it.
    is_bare = not before.strip() if case.trait.has_content else "</think>" not in before
    return end if is_bare == (case.trait.reasoning is Reasoning.ABSENT) else None


def find_left_out(
    formatter: PromptFormatter, messages: Sequence[ChatMessage], *, has_tools: bool, options: Options
) -> int | None:
    """Return the index of the first message whose text, or calls, the template leaves out; ``None`` if there is none.

    The messages are rendered with other texts, which occur nowhere else.
    """
    marked: list[ChatMessage] = []
    for index, message in enumerate(messages):
        calls = tuple(
            evolve(call, arguments=json.dumps({"probe": f"probe argument {index}.{n}."}))
            for n, call in enumerate(message.tool_calls)
        )
        content = f"probe content {index}." if (message.content or "").strip() else message.content
        thought = message.reasoning and _THOUGHT
        marked.append(evolve(message, content=content, tool_calls=calls, reasoning=thought))
    text = formatter.format(marked, tools=PROBE_TOOLS if has_tools else (), options=options)
    for index, message in enumerate(marked):
        marks = [f"probe argument {index}.{n}." for n in range(len(message.tool_calls))]
        marks += [message.content] if message.content and message.content.strip() else []
        if not all(mark in text for mark in marks):
            return index
    return None


def _find_closing_tokens(vocabulary: Vocabulary, stop_token_ids: tuple[int, ...]) -> re.Pattern[str]:
    """Return a pattern of the texts of the special tokens among ``stop_token_ids``."""
    special = vocabulary.special
    # Longest first, because the alternatives of a regular expression are tried in order.
    texts = sorted((special[token] for token in stop_token_ids if token in special), key=len, reverse=True)
    # Without any, the pattern matches nowhere.
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def find_end_of_turn(formatter: PromptFormatter, vocabulary: Vocabulary, *, ends: AbstractSet[int]) -> int | None:
    """Return the special token that the template puts after an answer, whatever follows; ``None`` if there is none.

    A token that opens the next turn does not count: it is absent if nothing follows. Of several, the first of ``ends``
    counts, which end the model's answers: a token that ends the text alone may be followed by calls.
    """
    alone = _specials_after(formatter, vocabulary, [_QUESTION, _ANSWER], has_generation_prompt=False)
    followed = _specials_after(formatter, vocabulary, [_QUESTION, _ANSWER, _QUESTION], has_generation_prompt=True)
    both = [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, followed, strict=False))]
    return next((token_id for token_id in both if token_id in ends), both[0] if both else None)


def _specials_after(
    formatter: PromptFormatter, vocabulary: Vocabulary, messages: Sequence[ChatMessage], *, has_generation_prompt: bool
) -> list[int]:
    """Return the special tokens that directly follow the marked answer."""
    try:
        text = formatter.format(messages, options={}, has_generation_prompt=has_generation_prompt)
    except RenderError:
        return []
    _, found, behind = text.partition(_MARK)
    ids = vocabulary.encode(behind.lstrip()) if found else []
    return [*takewhile(vocabulary.special.__contains__, ids)]


_MAX_OPENING = 3
_MAX_RUN = 2
PROBE_TOOLS = (
    Tool(
        name="probe_tool",
        description="A probe.",
        parameters={"type": "object", "properties": {"probe": {"type": "string"}}},
    ),
)
_THOUGHT = "probe thought"
_CALL_IDS = ("probe0000", "probe0001")
"""Nine letters and digits, as Mistral's templates require."""


class Reasoning(StrEnum):
    """The reasoning of an assistant's message; ``TAGGED``: it is in the content, because no parser has separated it."""

    ABSENT = "absent"
    EMPTY = "empty"
    PRESENT = "present"
    TAGGED = "tagged"


class ThoughtAt(StrEnum):
    """The position of reasoning in a history, relative to its last question."""

    NOWHERE = "nowhere"
    BEFORE = "before"
    SINCE = "since"


@frozen
class Trait:
    """One message without its text. More than two calls count as two."""

    role: str
    has_content: bool
    num_calls: int
    reasoning: Reasoning

    @staticmethod
    def of(message: ChatMessage) -> Trait:
        """Return the trait of ``message``."""
        return Trait(message.role, bool(message.content), min(len(message.tool_calls), _MAX_RUN), _reasoning(message))

    def create(self, index: int) -> tuple[ChatMessage, tuple[str, ...]]:
        """Return a message of this trait, and the marks that must be found in its text, in this order."""
        content = f"probe content {index}" if self.has_content else ""
        thought = f"{_THOUGHT} {index}" if self.reasoning in {Reasoning.PRESENT, Reasoning.TAGGED} else ""
        is_tagged = self.reasoning is Reasoning.TAGGED
        arguments = tuple(f"probe argument {index}.{n}" for n in range(self.num_calls))
        calls = tuple(
            ToolCall(id=_CALL_IDS[n], name="probe_tool", arguments=json.dumps({"probe": text}))
            for n, text in enumerate(arguments)
        )
        is_result = self.role == "tool"
        message = ChatMessage(
            role=self.role,
            content=f"<think>\n{thought}\n</think>\n\n{content}" if is_tagged else content,
            tool_calls=calls,
            reasoning=None if is_tagged or self.reasoning is Reasoning.ABSENT else thought,
            tool_call_id=_CALL_IDS[index % _MAX_RUN] if is_result else None,
            name="probe_tool" if is_result else None,
        )
        return message, tuple(mark for mark in (thought, content, *arguments) if mark)


def _reasoning(message: ChatMessage) -> Reasoning:
    if message.reasoning is not None:
        return Reasoning.PRESENT if message.reasoning else Reasoning.EMPTY
    is_tagged = message.role == "assistant" and message.content is not None and "</think>" in message.content
    return Reasoning.TAGGED if is_tagged else Reasoning.ABSENT


@frozen
class Shape:
    """Everything about an extension that a verdict depends on, except for reasoning further back in the history.

    ``opening`` holds the roles up to the first message that is not a system prompt (three at most). Runs of equal
    traits in ``new`` count as two. ``options`` is canonical JSON.
    """

    opening: tuple[str, ...]
    is_after_result: bool
    """True if the answer follows the result of a tool; some templates render the last result differently."""
    answer: Trait
    new: tuple[Trait, ...]
    has_tools: bool
    options: str


def shape_of(
    history: Sequence[ChatMessage], new: Sequence[ChatMessage], *, tools: Sequence[Tool], options: Options
) -> Shape:
    """Return the shape of an extension, in time that does not depend on the length of the history."""
    opening: list[str] = []
    for index in range(min(len(history) - 1, _MAX_OPENING)):
        opening.append(history[index].role)
        if opening[-1] not in {"system", "developer"}:
            break
    traits: list[Trait] = []
    for trait in map(Trait.of, new):
        # Longer runs count as two, so that the number of shapes stays small.
        if len(traits) < _MAX_RUN or any(earlier != trait for earlier in traits[-_MAX_RUN:]):
            traits.append(trait)
    return Shape(
        tuple(opening),
        len(history) > 1 and history[-2].role == "tool",
        Trait.of(history[-1]),
        tuple(traits),
        bool(tools),
        canonical_json(options),
    )


def canonical_json(options: Options) -> str:
    """Return template options as a cache key: equal options have equal texts."""
    return json.dumps(dict(options), sort_keys=True, default=repr) if options else ""


def find_thought(history: Sequence[ChatMessage]) -> ThoughtAt:
    """Return where the messages before the answer contain reasoning.

    This iterates over all messages, so call it only if the result matters.
    """
    is_since = True
    # From the end, because the last reasoning decides.
    for message in reversed(history[:-1]):
        if message.role == "user":
            is_since = False
        elif _reasoning(message) is not Reasoning.ABSENT:
            return ThoughtAt.SINCE if is_since else ThoughtAt.BEFORE
    return ThoughtAt.NOWHERE


def create_contexts(
    opening: Sequence[str], *, is_after_result: bool
) -> dict[ThoughtAt, tuple[tuple[ChatMessage, ...], ...]]:
    """Return histories without the answer that begin with the roles ``opening``, by the position of their reasoning.

    They end with the result of a tool if ``is_after_result``, otherwise with a question. Those with reasoning since the
    last question always end with a result.
    """
    start = tuple(ChatMessage(role=role, content=f"probe opening {n}") for n, role in enumerate(opening))
    question = ChatMessage(role="user", content="probe question")
    result = ChatMessage(role="tool", content="probe result", tool_call_id=_CALL_IDS[0], name="probe_tool")

    def answer(num_calls: int, reasoning: Reasoning) -> ChatMessage:
        return Trait("assistant", num_calls == 0, num_calls, reasoning).create(9)[0]

    talk, act = answer(0, Reasoning.ABSENT), answer(1, Reasoning.ABSENT)
    end = (act, result) if is_after_result else ()
    thoughts = (Reasoning.PRESENT, Reasoning.TAGGED)
    return {
        ThoughtAt.NOWHERE: (
            (*start, *end),
            (*start, talk, question, *end),
            (*start, act, result, talk, question, *end),
        ),
        ThoughtAt.BEFORE: tuple((*start, answer(0, thought), question, *end) for thought in thoughts)
        + tuple((*start, answer(1, thought), result, talk, question, *end) for thought in thoughts),
        ThoughtAt.SINCE: tuple((*start, answer(1, thought), result) for thought in thoughts),
    }
