"""The text between an answer and the next one, rendered without the preceding conversation.

::

    <|im_start|>user           ─┐
    question<|im_end|>          │ stand-in
    <|im_start|>assistant       │
    answer 7c1e5fd2            ─┘ <|im_end|>             ─┐
                                  <|im_start|>tool        │ the tail
                                  12<|im_end|>            │
                                  <|im_start|>assistant  ─┘

A stand-in conversation is rendered (a question, an answer that contains a mark, the new messages), and cut at the token
that ends the marked answer. ``parity.py`` checks that this tail equals the template's output after the real
conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import RenderError
from areal_actors.rendering.tokens import Vocabulary
from areal_actors.rendering.typesetter import Typesetter

__all__ = ["SuffixRenderer", "find_end_of_turn"]

_MARK = "answer 7c1e5fd2"
_QUESTION = ChatMessage(role="user", content="question")
_ANSWER = ChatMessage(role="assistant", content=_MARK)
_MARKED_ARGUMENTS = json.dumps({"mark": _MARK})


@frozen(kw_only=True)
class SuffixRenderer:
    """Renders tails. ``closing`` matches the end-of-turn tokens of this model."""

    typesetter: Typesetter
    closing: re.Pattern[str]

    def render(
        self, answer: ChatMessage, new: Sequence[ChatMessage], *, tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> str:
        """Return the text that begins with the end-of-turn token of ``answer``.

        Raises:
            RenderError: the template refuses the stand-in, or does not close it with an end-of-turn token.
        """
        text = self.typesetter.set([_QUESTION, _stand_in(answer), *new], tools=tools, options=options)
        closing = self.find_closing(text, text.find(_MARK))
        if closing is None:
            raise RenderError("The chat template does not end the assistant's turn with an end-of-turn token.")
        return text[closing:]

    def find_closing(self, text: str, start: int) -> int | None:
        """Return the position of the first end-of-turn token at or after ``start``.

        ``None`` if there is none, or if ``start`` is -1.
        """
        found = self.closing.search(text, start) if start >= 0 else None
        return found.start() if found else None


def _stand_in(answer: ChatMessage) -> ChatMessage:
    """Return an answer of the same kind.

    Calls keep ids and names, which templates look up; the last contains the mark.
    """
    if not answer.tool_calls:
        return _ANSWER
    *others, last = answer.tool_calls
    # Only ids and names of the other calls matter, so their arguments are not rendered.
    calls = [ToolCall(id=call.id, name=call.name, arguments="{}") for call in others]
    calls.append(ToolCall(id=last.id, name=last.name, arguments=_MARKED_ARGUMENTS))
    return ChatMessage(role=answer.role, content="text" if answer.content else None, tool_calls=tuple(calls))


def find_end_of_turn(typesetter: Typesetter, vocabulary: Vocabulary) -> int | None:
    """Return the special token that the template puts after an answer, whatever follows; ``None`` if there is none.

    A token that opens the next turn does not count: it is absent if nothing follows.
    """
    alone = _first_special(typesetter, vocabulary, [_QUESTION, _ANSWER], has_generation_prompt=False)
    followed = _first_special(typesetter, vocabulary, [_QUESTION, _ANSWER, _QUESTION], has_generation_prompt=True)
    return alone if alone == followed else None


def _first_special(
    typesetter: Typesetter, vocabulary: Vocabulary, messages: Sequence[ChatMessage], *, has_generation_prompt: bool
) -> int | None:
    try:
        text = typesetter.set(messages, options={}, has_generation_prompt=has_generation_prompt)
    except RenderError:
        return None
    _, found, behind = text.partition(_MARK)
    ids = vocabulary.encode(behind.lstrip()) if found else []
    return ids[0] if ids and ids[0] in vocabulary.special else None
