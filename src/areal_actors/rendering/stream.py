"""Conversion of the ids of one answer to deltas, and of deltas to a message.

The stages are detokenizer, stop strings, reasoning and tool calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from areal_actors.domain import ChatMessage, Ints, ToolCall
from areal_actors.rendering.base import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.rendering.parsers import AnswerParser
from areal_actors.rendering.tags import num_held_back
from areal_actors.rendering.tokens import Detokenizer, as_list

__all__ = ["AnswerStream", "join_deltas"]


class AnswerStream:
    """A ``StreamParser`` made of stages.

    ``hidden`` are ids that clients do not see: end tokens and other special tokens.
    """

    def __init__(
        self,
        *,
        detokenizer: Detokenizer,
        hidden: AbstractSet[int],
        stop: Sequence[str],
        reasoning: AnswerParser,
        tools: AnswerParser,
    ) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden
        self._stop = _StopStrings(stop)
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, token_ids: Ints | Sequence[int]) -> tuple[Delta, ...]:
        """Return the deltas that are certain after these ids."""
        shown = as_list(token_ids)
        # Most chunks contain no hidden id, and then the list is used as it is.
        if not self._hidden.isdisjoint(shown):
            shown = [token_id for token_id in shown if token_id not in self._hidden]
        text = self._stop.feed(self._detokenizer.feed(shown))
        return self._call_tools(self._reasoning.feed(text)) if text else ()

    def finish(self) -> tuple[Delta, ...]:
        """Return what was held back."""
        text = self._stop.feed(self._detokenizer.finish()) + self._stop.finish()
        rest = (*self._reasoning.feed(text), *self._reasoning.finish())
        return (*self._call_tools(rest), *self._tools.finish())

    @property
    def stop_sequence(self) -> str | None:
        """The stop string at which the text ended, or ``None``."""
        return self._stop.found

    def _call_tools(self, deltas: Iterable[Delta]) -> tuple[Delta, ...]:
        said: list[Delta] = []
        for delta in deltas:
            said += self._tools.feed(delta.text) if isinstance(delta, TextDelta) else (delta,)
        return tuple(said)


class _StopStrings:
    """Passes on the text before the first complete stop string; if several end at one place, before the longest."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._buffer = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if not self._stop or self.found is not None:
            return text if self.found is None else ""
        self._buffer += text
        # Ordered by their end, then by their start: the first to be complete wins, of several the longest.
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := self._buffer.find(stop)) >= 0]
        if ends:
            _, end, self.found = min(ends)
        else:
            end = len(self._buffer) - num_held_back(self._buffer, self._stop)
        certain, self._buffer = self._buffer[:end], self._buffer[end:] if self.found is None else ""
        return certain

    def finish(self) -> str:
        return self._buffer


def join_deltas(deltas: Iterable[Delta]) -> ChatMessage:
    """Return the message that the deltas add up to.

    Its content is ``None`` if there are only calls, ``""`` if it is empty.
    """
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[ToolCallStarted] = []
    arguments: dict[int, str] = {}
    for delta in deltas:
        match delta:
            case TextDelta():
                content.append(delta.text)
            case ReasoningDelta():
                reasoning.append(delta.text)
            case ToolCallStarted():
                starts.append(delta)
            case ToolArgumentsDelta():  # pragma: no branch - there are no others
                arguments[delta.index] = arguments.get(delta.index, "") + delta.text
    return ChatMessage(
        role="assistant",
        content="".join(content) if content or not starts else None,
        tool_calls=tuple(ToolCall(id=s.id, name=s.name, arguments=arguments.get(s.index, "")) for s in starts),
        reasoning="".join(reasoning) if reasoning else None,
    )
