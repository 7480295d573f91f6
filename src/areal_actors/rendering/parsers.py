"""How answers are read: the protocols of tool-call and reasoning formats, and the formats that are known by name.

A *format* belongs to a family of models: how its tools, calls and results look as text, and how to recognise it in a
chat template. A *parser* reads one answer as it arrives. Parsers never raise and never lose text: what looks like a
call and is none stays text. The package ``formats`` holds the families; ``stream.py`` joins parsers behind a
detokenizer.

Another family is another object in the two tables below.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from areal_actors.domain import Grammar, Tool, ToolCall
from areal_actors.errors import ConfigError
from areal_actors.rendering.base import Delta, TextDelta
from areal_actors.rendering.formats.deepseek import DeepSeek
from areal_actors.rendering.formats.glm import Glm
from areal_actors.rendering.formats.harmony import HarmonyCalls, HarmonyChannels
from areal_actors.rendering.formats.hermes import Hermes
from areal_actors.rendering.formats.llama_json import LlamaJson
from areal_actors.rendering.formats.mistral import Mistral
from areal_actors.rendering.formats.pythonic import Pythonic
from areal_actors.rendering.formats.qwen_coder import QwenCoder
from areal_actors.rendering.formats.think import ThinkTags

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "AnswerParser",
    "PlainText",
    "ReasoningFormat",
    "ToolFormat",
    "choose_format",
]


class AnswerParser(Protocol):
    """Text of one answer in, deltas out; the deltas do not depend on how the text is cut."""

    def feed(self, text: str) -> tuple[Delta, ...]:
        """What is certain after this text."""
        ...

    def finish(self) -> tuple[Delta, ...]:
        """What was held back."""
        ...


class PlainText:
    """The parser of those who have no format: all is content."""

    def feed(self, text: str) -> tuple[Delta, ...]:
        """The text itself."""
        return (TextDelta(text=text),) if text else ()

    def finish(self) -> tuple[Delta, ...]:
        """Nothing: nothing is held back."""
        return ()


class ToolFormat(Protocol):
    """How one family of models writes tools, calls and results."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that the parser must see, even where they are special tokens."""
        ...

    def is_spoken_by(self, template: str) -> bool:
        """Whether a chat template (its source) is of this family."""
        ...

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> AnswerParser:
        """A parser for one answer; ``call_ids`` makes the ids of its calls, ``tools`` are those that were offered.

        A format that writes arguments without their types takes these from the tools' schemas. A call of a tool that
        was not offered is a call all the same.
        """
        ...

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar | None:
        """The text of one call of one of ``tools``, or of several if ``is_parallel``; ``None`` if it has no grammar."""
        ...

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """The block of a system message that offers ``tools`` and says how to call them."""
        ...

    def format_call(self, call: ToolCall) -> str:
        """A call as the model writes it."""
        ...

    def format_result(self, content: str) -> str:
        """The result of a call as the model reads it."""
        ...


class ReasoningFormat(Protocol):
    """How one family of models sets its thinking apart."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that the parser must see, even where they are special tokens."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Special tokens that end an answer beside the template's own end of turn."""
        ...

    def is_spoken_by(self, template: str) -> bool:
        """Whether a chat template (its source) is of this family."""
        ...

    def is_opened_by(self, prompt: str) -> bool:
        """Whether this rendered prompt ends inside the thinking."""
        ...

    def constrain(self, *, is_open: bool, has_calls: bool) -> Grammar:
        """The text of the thinking, up to where the answer proper begins; it may be empty unless ``is_open``.

        ``has_calls`` tells that calls follow rather than content, which some families announce differently.
        """
        ...

    def open_parser(self, *, is_open: bool) -> AnswerParser:
        """A parser for one answer, which begins inside the thinking if ``is_open``."""
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
"""Tool formats by name; the first one is spoken with models whose template knows no tools."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "harmony": HarmonyChannels(),
    "think": ThinkTags(),
    "mistral-think": ThinkTags(opening="[THINK]", closing="[/THINK]"),
}
"""Reasoning formats by name."""


class _Recognised(Protocol):
    def is_spoken_by(self, template: str) -> bool: ...


FormatT = TypeVar("FormatT", bound=_Recognised)


def choose_format(name: str, formats: Mapping[str, FormatT], *, template: str, path: str) -> FormatT | None:
    """The format called ``name``; ``auto`` recognises it by the template, ``none`` is no format.

    ``path`` names the setting in the ``ConfigError`` that an unknown name raises.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((known for known in formats.values() if known.is_spoken_by(template)), None)
    if name in formats:
        return formats[name]
    names = ["auto", "none", *formats]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{path}: no format is called {name!r} (there are {', '.join(names)}){hint}")
