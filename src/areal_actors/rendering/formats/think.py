"""Reasoning between two tags (``<think>`` and ``</think>`` in most families), at the beginning of an answer.

Some templates write the opening tag themselves, at the end of the prompt: the answer then begins inside the reasoning.
The line breaks around the tags belong to the format, neither to the reasoning nor to the content. Later tags in an
answer are content.
"""

from __future__ import annotations

from attrs import frozen

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, OneOf, ReasoningDelta, TextDelta
from areal_actors.rendering.formats.base import ReasoningFormat, StateParser
from areal_actors.rendering.formats.reading import num_held_back


@frozen(kw_only=True)
class ThinkTags(ReasoningFormat):
    """The format of Qwen3, DeepSeek-R1 and many others; with other tags, that of Mistral."""

    markers: tuple[str, str] = ("<think>", "</think>")
    signs: tuple[str, ...] = ("</think>",)
    foreign_signs: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    channel: str = ""
    """A word after the opening tag."""

    @property
    def opening(self) -> str:
        """The text with which reasoning begins."""
        return self.markers[0] + self.channel

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether the prompt ends with the opening tag."""
        return prompt.rstrip().endswith(self.opening)

    def constrain(self, *, is_open: bool, has_calls: bool) -> Grammar:  # noqa: ARG002 - all answers are alike
        """Return the grammar of reasoning, closed and separated as in the family's templates."""
        opening, (_, closing) = self.opening, self.markers
        rest = (FreeText(excluding=(closing,)), Exactly(text=f"{closing}\n\n"))
        thought = InOrder(parts=rest if is_open else (Exactly(text=opening), *rest))
        return thought if is_open else OneOf(parts=(Exactly(text=""), thought))

    def open_parser(self, *, is_open: bool) -> _ThinkParser:
        """Return a parser for one answer."""
        return _ThinkParser(self, is_open=is_open)


class _ThinkParser(StateParser):
    def __init__(self, tags: ThinkTags, *, is_open: bool) -> None:
        self._open, self._close = tags.opening, tags.markers[1]
        super().__init__()
        self._has_thought = False
        self._state = self._think if is_open else self._begin

    def _end(self) -> None:
        if self._state == self._think:
            self._say_thought(self._buffer.rstrip("\n"))
        elif self._state == self._begin:
            self._say_content(self._buffer)

    def _begin(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(self._open):
            self._buffer, self._state = text[len(self._open) :], self._think
            return True
        if self._open.startswith(text):
            return False
        self._state = self._speak
        return True

    def _think(self) -> bool:
        if not self._has_thought:
            self._buffer = self._buffer.lstrip("\n")
        thought, closing, rest = self._buffer.partition(self._close)
        if closing:
            self._say_thought(thought.rstrip("\n"), is_last=True)
            self._buffer, self._state = rest, self._skip_line_breaks
            return True
        # Trailing line breaks are held back, too: they belong to the format if the closing tag follows.
        held = num_held_back(self._buffer, (self._close,))
        certain = self._buffer[: len(self._buffer) - held].rstrip("\n")
        self._say_thought(certain)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _skip_line_breaks(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._speak
        return bool(self._buffer)

    def _speak(self) -> bool:
        self._say_content(self._buffer)
        self._buffer = ""
        return False

    def _say_thought(self, text: str, *, is_last: bool = False) -> None:
        # Empty reasoning is reported, because templates render it differently from no reasoning.
        if text or (is_last and not self._has_thought):
            self._deltas.append(ReasoningDelta(text=text))
            self._has_thought = True

    def _say_content(self, text: str) -> None:
        if text:
            self._deltas.append(TextDelta(text=text))
