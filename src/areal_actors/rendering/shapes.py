"""The features of a conversation that a chat template may depend on, without its text: the key of parity verdicts.

Also contains the synthetic conversations for each shape, which the parity probe renders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from attrs import frozen

from areal_actors.domain import ChatMessage, Tool, ToolCall

__all__ = [
    "PROBE_TOOLS",
    "Reasoning",
    "Shape",
    "ThoughtAt",
    "Trait",
    "canonical_json",
    "create_contexts",
    "find_thought",
    "shape_of",
]

_MAX_OPENING = 3
_MAX_RUN = 2
PROBE_TOOLS = (
    Tool(
        name="probe_tool",
        description="A probe.",
        parameters={"type": "object", "properties": {"probe": {"type": "string"}}},
    ),
)
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
        thought = f"probe thought {index}" if self.reasoning in {Reasoning.PRESENT, Reasoning.TAGGED} else ""
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
    history: Sequence[ChatMessage], new: Sequence[ChatMessage], *, tools: Sequence[Tool], options: Mapping[str, Any]
) -> Shape:
    """Return the shape of an extension, in time that does not depend on the length of the history."""
    return Shape(
        _opening(history),
        len(history) > 1 and history[-2].role == "tool",
        Trait.of(history[-1]),
        _shorten(new),
        bool(tools),
        canonical_json(options),
    )


def canonical_json(options: Mapping[str, Any]) -> str:
    """Return template options as a cache key: equal options have equal texts."""
    return json.dumps(dict(options), sort_keys=True, default=repr) if options else ""


def _opening(history: Sequence[ChatMessage]) -> tuple[str, ...]:
    roles: list[str] = []
    for index in range(min(len(history) - 1, _MAX_OPENING)):
        roles.append(history[index].role)
        if roles[-1] not in {"system", "developer"}:
            break
    return tuple(roles)


def _shorten(messages: Sequence[ChatMessage]) -> tuple[Trait, ...]:
    traits: list[Trait] = []
    for trait in map(Trait.of, messages):
        # Longer runs count as two, so that the number of shapes stays small.
        if len(traits) < _MAX_RUN or any(earlier != trait for earlier in traits[-_MAX_RUN:]):
            traits.append(trait)
    return tuple(traits)


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
