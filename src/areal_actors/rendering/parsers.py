"""Protocols of tool-call and reasoning formats, and the tables of the formats that are known by name.

A *format* belongs to a family of models: it defines how tools, calls and results look as text, and how to recognise the
family by its chat template. A *parser* reads one answer as it arrives. Parsers never raise and never lose text: text
that looks like a call but is not one stays content. The package ``formats`` contains the families;
``AnswerStream`` connects parsers to a detokenizer.

To support another family, add an object to the two tables below.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import filterfalse
from typing import Protocol, TypeVar

from areal_actors.domain import (
    ChatMessage,
    Delta,
    Grammar,
    Ints,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
)
from areal_actors.errors import ConfigError
from areal_actors.rendering.formats.deepseek import DeepSeek
from areal_actors.rendering.formats.glm import Glm
from areal_actors.rendering.formats.harmony import HarmonyCalls, HarmonyChannels
from areal_actors.rendering.formats.hermes import Hermes
from areal_actors.rendering.formats.llama_json import LlamaJson
from areal_actors.rendering.formats.mistral import Mistral
from areal_actors.rendering.formats.pythonic import Pythonic
from areal_actors.rendering.formats.qwen_coder import QwenCoder
from areal_actors.rendering.formats.reading import num_held_back
from areal_actors.rendering.formats.think import ThinkTags
from areal_actors.rendering.tokens import Detokenizer, as_list


class AnswerParser(Protocol):
    """Incremental parser from the text of one answer to deltas, which do not depend on how the text is chunked."""

    def feed(self, text: str) -> tuple[Delta, ...]:
        """Return the deltas that are certain after this text."""
        ...

    def finish(self) -> tuple[Delta, ...]:
        """Return what was held back."""
        ...


class PlainText:
    """A parser for models without a format: all text is content."""

    def feed(self, text: str) -> tuple[Delta, ...]:
        """Return the text as a delta."""
        return (TextDelta(text=text),) if text else ()

    def finish(self) -> tuple[Delta, ...]:
        """Return nothing, because nothing is held back."""
        return ()


class ToolFormat(Protocol):
    """The syntax in which one family of models writes tools, calls and results."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that the parser needs to see, even if they are special tokens."""
        ...

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template (its source) belongs to this family."""
        ...

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for one answer.

        ``call_ids`` creates the ids of its calls, ``tools`` are those that were offered. A format that writes arguments
        without types takes the types from the schemas of the tools. A call of a tool that was not offered is still a
        call.
        """
        ...

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar | None:
        """Return the grammar of a call of ``tools``, or of several if ``is_parallel``; ``None`` if there is none."""
        ...

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the block of a system message that offers ``tools`` and explains how to call them."""
        ...

    def format_call(self, call: ToolCall) -> str:
        """Return a call as the model writes it."""
        ...

    def format_result(self, content: str) -> str:
        """Return the result of a call as the model reads it."""
        ...


class ReasoningFormat(Protocol):
    """The syntax in which one family of models separates reasoning from content."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that the parser needs to see, even if they are special tokens."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Special tokens that end an answer, in addition to the template's own end of turn."""
        ...

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template (its source) belongs to this family."""
        ...

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether this rendered prompt ends inside the reasoning."""
        ...

    def constrain(self, *, is_open: bool, has_calls: bool) -> Grammar:
        """Return the grammar of the reasoning, up to the beginning of the actual answer.

        The reasoning may be empty unless ``is_open``. ``has_calls`` says that calls follow rather than content, which
        some families announce differently.
        """
        ...

    def open_parser(self, *, is_open: bool) -> AnswerParser:
        """Return a parser for one answer, which begins inside the reasoning if ``is_open``."""
        ...


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": Hermes(),
    "qwen-coder": QwenCoder(),
    "llama-json": LlamaJson(),
    "pythonic": Pythonic(),
    "glm": Glm(),
    "mistral": Mistral(),
    "mistral-args": Mistral(has_names=True),
    "deepseek-v3": DeepSeek(has_fences=True),
    "deepseek-v3.1": DeepSeek(has_fences=False),
    "harmony": HarmonyCalls(),
}
"""Tool formats by name. The first one is used for models whose template does not support tools."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "harmony": HarmonyChannels(),
    "think": ThinkTags(),
    "mistral-think": ThinkTags(opening="[THINK]", closing="[/THINK]"),
}
"""Reasoning formats by name."""


class _Recognised(Protocol):
    def matches_template(self, template: str) -> bool: ...


FormatT = TypeVar("FormatT", bound=_Recognised)


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
