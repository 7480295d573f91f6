"""What turns messages into token ids and back: the ``Renderer`` protocol, its stream, and the deltas of an answer.

``TemplateRenderer`` (``renderer.py``) speaks any Hugging Face chat template; a hand-written renderer of one model plugs
in at the same protocol. Which turn extends which is decided elsewhere (``cache``); what a client reads is formatted
elsewhere (``proxy``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from areal_actors.domain import (
    ChatMessage,
    Delta,
    ForkReason,
    Grammar,
    Ints,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolArgumentsDelta,
    ToolCallStarted,
    ToolChoice,
)

__all__ = ["Delta", "ReasoningDelta", "Renderer", "StreamParser", "TextDelta", "ToolArgumentsDelta", "ToolCallStarted"]


class StreamParser(Protocol):
    """Ids of one answer in, deltas out. However the ids are cut into chunks, the deltas join to one message."""

    def feed(self, token_ids: Ints | Sequence[int]) -> tuple[Delta, ...]:
        """What is certain after these ids: text that may yet become a tag, and half characters, are held back."""
        ...

    def finish(self) -> tuple[Delta, ...]:
        """What was held back, now that nothing follows. Call it once."""
        ...

    @property
    def stop_sequence(self) -> str | None:
        """The stop string at which the text has ended, ``None`` while none has occurred."""
        ...


class Renderer(Protocol):
    """Messages to ids, ids to messages, for one model. Knows no conversation; quick enough for an event loop."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the template's end of turn first, then the model's other end tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id of the tokenizer."""
        ...

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Ints:
        """Ids of the whole conversation and of the header that asks for an answer, int32 [T].

        Raises ``RenderError`` if the template refuses the conversation.
        """
        ...

    def extend(
        self,
        *,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        is_closed: bool,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Ints | ForkReason:
        """Ids that follow the parent's exact ids (its prompt and what was sampled) to ask for the answer to ``new``.

        ``history`` holds the parent's messages and its answer, which comes last. ``is_closed`` says that the sampled
        ids end with one of ``stop_token_ids``; otherwise the returned ids start by closing the turn. Only ``new`` is
        rendered and tokenised. Returns a ``ForkReason`` where these ids would not be what the template makes of the
        conversation: render it anew then (and learn why, if the template refuses it).
        """
        ...

    def parse(
        self,
        token_ids: Ints | Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        call_ids: Callable[[], str] | None = None,
        is_plain: bool = False,
    ) -> ChatMessage:
        """The assistant's message that these sampled ids say. Never raises: what makes no sense stays text.

        Tool calls are looked for only where ``tools`` were offered. The text ends before the first of the ``stop``
        strings. ``template_kwargs`` are those of the prompt. ``call_ids`` makes the ids of tool calls (random ones by
        default). With ``is_plain`` all is text, thinking and calls included, as it is after a raw prompt.
        """
        ...

    def open_stream(
        self,
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        call_ids: Callable[[], str] | None = None,
        is_plain: bool = False,
    ) -> StreamParser:
        """A parser for one answer as it arrives; its deltas join to what ``parse`` returns."""
        ...

    def constrain(
        self,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | str = ToolChoice.AUTO,
        parallel_tool_calls: bool = True,
        response_format: Grammar | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Grammar | None:
        """What an answer must match, thinking included: calls as ``tool_choice`` demands, or ``response_format``.

        ``None`` where nothing is demanded. Raises ``UnsupportedParameter`` where the model's format has no grammar.
        """
        ...

    def encode(self, text: str, *, is_start: bool) -> Ints:
        """Ids of a raw text, int32 [T]; special tokens that it spells out are read as such.

        With ``is_start`` what the tokenizer puts at the beginning of every text comes first, once.
        """
        ...

    def decode(self, token_ids: Ints | Sequence[int]) -> str:
        """The plain text of ids, special tokens included. Never raises; ids outside the vocabulary are left out."""
        ...
