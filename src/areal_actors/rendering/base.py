"""The ``Renderer`` protocol, which converts messages to token ids and back, its stream, and the deltas of an answer.

``TemplateRenderer`` (``renderer.py``) supports any Hugging Face chat template; a hand-written renderer for one model
can implement the same protocol. ``cache`` decides which turn extends which, and ``proxy`` formats responses for
clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from areal_actors.domain import (
    ChatMessage,
    Delta,
    ForkReason,
    Grammar,
    Ints,
    Tool,
    ToolChoice,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StreamParser(Protocol):
    """Incremental parser of one answer, from ids to deltas.

    The deltas join to the same message however the ids are chunked.
    """

    def begin(self, token_ids: Ints | Sequence[int]) -> tuple[Delta, ...]:
        """Return the deltas of a beginning that the client has written, in which stop strings are not searched."""
        ...

    def feed(self, token_ids: Ints | Sequence[int]) -> tuple[Delta, ...]:
        """Return the deltas that are certain after these ids.

        Text that may become a tag, and partial characters, are held back.
        """
        ...

    def finish(self) -> tuple[Delta, ...]:
        """Return what was held back, at the end of the answer. Call it once."""
        ...

    @property
    def stop_sequence(self) -> str | None:
        """The stop string at which the text ended; ``None`` if none has occurred."""
        ...


@runtime_checkable
class HasTokenizer(Protocol):
    """A renderer that provides its tokenizer to an engine for constrained sampling."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that defines the ids."""
        ...


class Renderer(Protocol):
    """Conversion of messages to ids and back, for one model.

    Independent of any conversation, and fast enough to call in an event loop.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the template's end of turn first, then the model's other end tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id of the tokenizer plus one."""
        ...

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may contain thinking, in which stop strings do not count."""
        ...

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Ints:
        """Return the ids of the whole conversation and of the header that asks for an answer, int32 [T].

        Raises:
            RenderError: the template refuses the conversation.
        """
        ...

    def begin_answer(
        self,
        messages: Sequence[ChatMessage],
        begun: ChatMessage,
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Ints:
        """Return the ids of the beginning of an answer, which the model continues, after the prompt of ``messages``.

        Only requests whose client begins the answer need it.

        Returns:
            int32 [n], up to the end of the text of ``begun``.

        Raises:
            RenderError: the template does not write that text, unchanged, after its own prompt.
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
        """Return the ids that follow the parent's exact ids (prompt and sampled answer) to ask for an answer.

        Only ``new`` is rendered and tokenised. If the result would differ from the template's rendering of the whole
        conversation, a ``ForkReason`` is returned instead: call ``render`` then (which also shows why, if the template
        refuses the conversation).

        Args:
            history: the parent's messages, followed by its answer.
            new: the messages after the answer.
            is_closed: the sampled ids end with one of ``stop_token_ids``; otherwise the returned ids start by closing
                the turn.
            tools: the tools that are offered.
            template_kwargs: further variables of the template.
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
        """Return the assistant's message that these sampled ids represent. Never raises: malformed text stays content.

        Args:
            token_ids: the sampled ids.
            tools: the tools that were offered; without any, the answer is not searched for tool calls.
            stop: stop strings; the text ends before the first of them that is outside of the thinking.
            template_kwargs: those of the prompt.
            call_ids: creates the ids of tool calls; random ones by default.
            is_plain: everything is content, including reasoning and calls, as after a raw prompt.
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
        is_eager: bool = False,
    ) -> StreamParser:
        """Return a parser for one answer as it arrives; its deltas join to the message that ``parse`` returns.

        With ``is_eager``, calls are emitted while they are read. A call that turns out to be malformed after its
        arguments have begun is then a call with incomplete arguments, where ``parse`` returns its text as content.
        """
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
        """Return the grammar that an answer must match, including its reasoning.

        It enforces calls as ``tool_choice`` demands, or ``response_format``. With a ``response_format`` and ``tools``
        that may be called, the answer is either. Returns ``None`` if nothing is required.

        Raises:
            UnsupportedParameter: the model's tool format has no grammar.
        """
        ...

    def encode(self, text: str, *, is_start: bool) -> Ints:
        """Return the ids of a raw text, int32 [T]; special tokens that it spells out are recognised.

        With ``is_start``, the tokens that the tokenizer puts at the beginning of every text come first, once.
        """
        ...

    def decode(self, token_ids: Ints | Sequence[int]) -> str:
        """Return the plain text of ids, special tokens included.

        Never raises; ids outside the vocabulary are skipped.
        """
        ...

    def token_bytes(self, token_ids: Ints | Sequence[int], *, is_start: bool = True) -> Sequence[bytes]:
        """Return the bytes that each of these sampled tokens adds to the text of an answer.

        A token may begin or end within a character, and joined bytes are UTF-8. Special tokens are spelled out; ids
        outside the vocabulary have no bytes. With ``is_start``, the first token begins the answer, which matters to
        tokenizers that drop the white space there.
        """
        ...
