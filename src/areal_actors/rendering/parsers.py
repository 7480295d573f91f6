"""The formats of calls and of reasoning that are known by name, and the parser of an answer.

The package ``formats`` contains the families; ``AnswerStream`` connects their parsers to a detokenizer.
To support another family, add an object to the two tables below.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import filterfalse
from typing import TypeVar

from areal_actors.domain import (
    ChatMessage,
    Delta,
    Ints,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
)
from areal_actors.errors import ConfigError
from areal_actors.rendering.formats.base import AnswerParser, Format, ReasoningFormat, ToolFormat
from areal_actors.rendering.formats.harmony import HARMONY_CALLS, HarmonyChannels
from areal_actors.rendering.formats.json_families import (
    APRIEL,
    COMMAND,
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    GRANITE,
    HERMES,
    KIMI_K2,
    LLAMA_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON_2,
)
from areal_actors.rendering.formats.pythonic import Gemma, Pythonic
from areal_actors.rendering.formats.reading import num_held_back
from areal_actors.rendering.formats.tagged import DEEPSEEK_V3_2, DEEPSEEK_V4, GLM, MINIMAX, QWEN_CODER, SEED
from areal_actors.rendering.formats.think import ThinkTags
from areal_actors.rendering.tokens import Detokenizer, as_list


class PlainText:
    """A parser for models without a format: all text is content."""

    def feed(self, text: str) -> tuple[Delta, ...]:
        """Return the text as a delta."""
        return (TextDelta(text=text),) if text else ()

    def finish(self) -> tuple[Delta, ...]:
        """Return nothing, because nothing is held back."""
        return ()


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen-coder": QWEN_CODER,
    "llama-json": LLAMA_JSON,
    "pythonic": Pythonic(),
    "glm": GLM,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V3_1,
    "deepseek-v3.2": DEEPSEEK_V3_2,
    "deepseek-v4": DEEPSEEK_V4,
    "harmony": HARMONY_CALLS,
    "gemma": Gemma(),
    "kimi-k2": KIMI_K2,
    "minimax-m2": MINIMAX,
    "seed": SEED,
    "command": COMMAND,
    "granite": GRANITE,
    "nemotron-2": NEMOTRON_2,
    "apriel": APRIEL,
}
"""Tool formats by name. The first one is used for models whose template does not support tools."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "harmony": HarmonyChannels(),
    "think": ThinkTags(),
    "mistral-think": ThinkTags(markers=("[THINK]", "[/THINK]"), signs=("[/THINK]",)),
    "seed-think": ThinkTags(markers=("<seed:think>", "</seed:think>"), signs=("</seed:think>",)),
    "command-think": ThinkTags(markers=("<|START_THINKING|>", "<|END_THINKING|>"), signs=("<|START_THINKING|>",)),
    # A call ends the answer with the token that begins its result.
    "gemma-think": ThinkTags(
        markers=("<|channel>", "<channel|>"),
        channel="thought",
        signs=("<|channel>thought",),
        stops=("<|tool_response>",),
    ),
}
"""Reasoning formats by name."""


FormatT = TypeVar("FormatT", bound=Format)


def choose_format(name: str, formats: Mapping[str, FormatT], *, template: str, path: str) -> FormatT | None:
    """Return the format called ``name``; ``auto`` recognises it by the template, ``none`` returns ``None``.

    ``path`` is the name of the setting, for the error message.

    Raises:
        ConfigError: there is no format of this name.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((known for known in formats.values() if known.matches_template(template)), None)
    if name in formats:
        return formats[name]
    names = ["auto", "none", *formats]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{path}: no format is called {name!r} (there are {', '.join(names)}){hint}")


class AnswerStream:
    """Incremental parser of one answer, from ids to deltas, in stages: text, thinking, stop strings, calls.

    The deltas join to the same message however the ids are chunked.

    ``hidden`` are ids that clients do not see: end tokens and other special tokens. Stop strings count outside of the
    thinking, which is no text that the client asked for; in a call they count, because engines cannot tell it apart.
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

    def begin(self, token_ids: Ints | Sequence[int]) -> tuple[Delta, ...]:
        """Return the deltas of a beginning that the client has written, in which stop strings are not searched."""
        wanted, self._stop = self._stop, _StopStrings(())
        deltas = self.feed(token_ids)
        self._stop = wanted
        return deltas

    def feed(self, token_ids: Ints | Sequence[int]) -> tuple[Delta, ...]:
        """Return the deltas that are certain after these ids.

        Text that may become a tag, and partial characters, are held back.
        """
        shown = as_list(token_ids)
        # Most chunks contain no hidden id, and then the list is used as it is.
        if not self._hidden.isdisjoint(shown):
            shown = [*filterfalse(self._hidden.__contains__, shown)]
        text = self._detokenizer.feed(shown)
        return self._read(self._reasoning.feed(text)) if text else ()

    def finish(self) -> tuple[Delta, ...]:
        """Return what was held back, at the end of the answer. Call it once."""
        text = self._detokenizer.finish()
        said = self._read((*self._reasoning.feed(text), *self._reasoning.finish()))
        return (*said, *self._tools.feed(self._stop.finish()), *self._tools.finish())

    @property
    def stop_sequence(self) -> str | None:
        """The stop string at which the text ended, or ``None``."""
        return self._stop.found

    def _read(self, deltas: Iterable[Delta]) -> tuple[Delta, ...]:
        said: list[Delta] = []
        for delta in deltas:
            if self._stop.found is not None:
                break
            if isinstance(delta, TextDelta):
                said += self._tools.feed(self._stop.feed(delta.text))
            else:
                # No stop string begins before the thinking and ends behind it.
                said += (*self._tools.feed(self._stop.finish()), delta)
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
        rest, self._buffer = self._buffer, ""
        return rest


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
