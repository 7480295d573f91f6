"""Protocols of tool-call and reasoning formats, and the tables of the formats that are known by name.

A *format* belongs to a family of models: it defines how tools, calls and results look as text, and how to recognise the
family by its chat template. A *parser* reads one answer as it arrives. Parsers never raise and never lose text: text
that looks like a call but is not one stays content. The package ``formats`` contains the families; ``stream.py``
connects parsers to a detokenizer.

To support another family, add an object to the two tables below.
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

    def is_spoken_by(self, template: str) -> bool:
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

    def is_spoken_by(self, template: str) -> bool:
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
    def is_spoken_by(self, template: str) -> bool: ...


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
        return next((known for known in formats.values() if known.is_spoken_by(template)), None)
    if name in formats:
        return formats[name]
    names = ["auto", "none", *formats]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{path}: no format is called {name!r} (there are {', '.join(names)}){hint}")
