"""The interface of a dialect: one vendor's format of requests, answers, streams and errors.

``app`` answers requests of any dialect; ``chat`` is OpenAI's chat completions. Dialects are pure: they convert
between JSON objects and domain values, do no I/O and know nothing of HTTP. The end of this module has what the answers
of several dialects share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeGuard, TypeVar, cast

from attrs import evolve, field, frozen

from areal_actors.domain import (
    Answer,
    ChatMessage,
    Chunk,
    Completion,
    CompletionRequest,
    ReasoningDelta,
    SampledTokens,
    StreamItem,
    TextDelta,
    ToolArgumentsDelta,
)
from areal_actors.errors import InvalidRequest, Unavailable
from areal_actors.lib.json_prefix import JsonPrefix
from areal_actors.proxy.dialects.fields import Schema, one_object
from areal_actors.proxy.failures import Failure, format_openai_failure

__all__ = [
    "COUNT_SCHEMA",
    "ENVELOPE_SCHEMA",
    "FINISH_SCHEMA",
    "MAYBE_TEXT_SCHEMA",
    "OBJECT_SCHEMA",
    "TEXT_SCHEMA",
    "USAGE_SCHEMA",
    "AnswerStream",
    "Decode",
    "Dialect",
    "OpenAIDialect",
    "Parsed",
    "create_abort_error",
    "format_logprobs",
    "has_cut_call",
    "join_items",
    "split_begun",
]

Decode = Callable[[Sequence[int]], str]
"""A function that returns the text of token ids."""


def split_begun(messages: tuple[ChatMessage, ...]) -> tuple[tuple[ChatMessage, ...], ChatMessage | None]:
    """Return the messages to be answered, and the beginning of the answer if the last one is an answer with text.

    Raises:
        InvalidRequest: the last message has calls, behind which an answer cannot go on.
    """
    if not messages or messages[-1].role != "assistant":
        return messages, None
    begun = messages[-1]
    if begun.tool_calls:
        raise InvalidRequest("The last message has calls; send their results.", param="messages")
    return messages[:-1], begun if begun.content else None


class Parsed(Protocol):
    """A parsed request."""

    @property
    def request(self) -> CompletionRequest:
        """The completion to sample."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether the client wants the answer streamed while it is sampled."""
        ...


class AnswerStream(Protocol):
    """The formatter of one streamed answer: items in, server-sent events out (zero, one or several per item)."""

    def feed(self, item: StreamItem) -> bytes:
        """Return the events of one item."""
        ...

    def finish(self) -> bytes:
        """Return the events that end a successful stream."""
        ...

    def fail(self, failure: Failure) -> bytes:
        """Return the events that end a failed stream."""
        ...


P = TypeVar("P", bound=Parsed)


class Dialect(Protocol[P]):
    """One vendor's API format."""

    def parse(self, body: Mapping[str, Any], *, tag: str | None) -> P:
        """Parse the body of a request. Raises only ``RequestError``."""
        ...

    def format_answers(self, parsed: P, answers: Sequence[Answer]) -> Any:
        """Return the JSON document of a finished request, which has one answer per choice."""
        ...

    def open_stream(self, parsed: P) -> AnswerStream:
        """Return the formatter of a streamed answer."""
        ...

    def decoding_with(self, decode: Decode) -> Self:
        """Return a copy of the dialect for a model with another tokenizer."""
        ...

    def format_failure(self, failure: Failure) -> Any:
        """Return the JSON document of a failed request."""
        ...


def join_items(items: Iterable[StreamItem]) -> list[StreamItem]:
    """Return the items of a stream with deltas joined that continue each other.

    Tokens that were sampled between them come before the joined delta, as they come before the delta with their text.
    """
    joined: list[StreamItem] = []
    place, texts = -1, [""]  # of the delta that may be continued
    for item in items:
        if isinstance(item, SampledTokens):
            joined.append(item)
            continue
        if place >= 0 and _continues(item, joined[place]):
            joined.append(joined.pop(place))
            texts.append(item.text)
        else:
            _join_texts(joined, place, texts)
            joined.append(item)
            texts = [getattr(item, "text", "")]
        place = len(joined) - 1
    _join_texts(joined, place, texts)
    return joined


def _join_texts(items: list[StreamItem], place: int, texts: Sequence[str]) -> None:
    if len(texts) > 1:
        items[place] = evolve(cast("TextDelta", items[place]), text="".join(texts))


def _continues(later: StreamItem, earlier: StreamItem) -> TypeGuard[TextDelta | ReasoningDelta | ToolArgumentsDelta]:
    if isinstance(later, ToolArgumentsDelta):
        return isinstance(earlier, ToolArgumentsDelta) and (earlier.index, earlier.choice) == (
            later.index,
            later.choice,
        )
    is_same = isinstance(later, TextDelta | ReasoningDelta) and type(earlier) is type(later)
    return is_same and cast("TextDelta", earlier).choice == cast("TextDelta", later).choice


# ---------------------------------------------------------------------------------- common to several dialects


@frozen(kw_only=True)
class OpenAIDialect:
    """The settings and the errors of OpenAI's dialects.

    ``decode`` converts token ids to text for ``logprobs``; without it, ids are shown as numbers. ``model`` is the model
    name in an answer if the client named none. ``inert`` names further parameters to accept and ignore.
    """

    model: str = "policy"
    decode: Decode | None = None
    inert: Collection[str] = ()
    clock: Callable[[], float] = field(default=time.time)

    def decoding_with(self, decode: Decode) -> Self:
        """Return a copy of the dialect for a model with another tokenizer."""
        return evolve(self, decode=decode)

    def format_failure(self, failure: Failure) -> dict[str, Any]:
        """Return OpenAI's error body."""
        return format_openai_failure(failure)


def create_abort_error() -> Unavailable:
    """Return the error for an answer whose generation the engine aborted."""
    return Unavailable("The generation was aborted before it was complete; the request may be repeated.")


def has_cut_call(answer: Answer) -> bool:
    """Return whether a stop string ended the answer within a tool call, whose arguments then break off."""
    if answer.stop_sequence is None or not answer.message.tool_calls:
        return False
    # A stop string may also end the text after a call. That call is whole, and agents should run it.
    arguments = JsonPrefix()
    arguments.feed(answer.message.tool_calls[-1].arguments)
    return not (arguments.is_complete or arguments.is_broken)


def format_logprobs(sampled: Completion | Chunk, decode: Decode | None, *, start: int = 0) -> list[dict[str, Any]]:
    """Return one entry per sampled token from the ``start``-th on; without ``decode``, ids are shown as numbers."""
    tokens = sampled.token_ids.tolist()
    logprobs = sampled.logprobs.tolist()
    tops = sampled.top_logprobs or ((),) * len(tokens)
    content = []
    for token, logprob, top in zip(tokens[start:], logprobs[start:], tops[start:], strict=True):
        entry = _format_token(token, logprob, decode)
        entry["top_logprobs"] = [_format_token(other.token_id, other.logprob, decode) for other in top]
        content.append(entry)
    return content


def _format_token(token: int, logprob: float, decode: Decode | None) -> dict[str, Any]:
    """Return one token's entry; ``bytes`` is ``null`` for a part of a character."""
    if decode is None:
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
    text = decode((token,))
    # A token may end within a UTF-8 sequence; its decoded text then holds U+FFFD and its bytes are not known from it.
    is_whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}


TEXT_SCHEMA: Schema = {"type": "string"}
MAYBE_TEXT_SCHEMA: Schema = {"type": ["string", "null"]}
OBJECT_SCHEMA: Schema = {"type": ["object", "null"]}
COUNT_SCHEMA: Schema = {"type": "integer", "minimum": 0}
FINISH_SCHEMA: Schema = {"enum": ["stop", "length", "tool_calls"]}
USAGE_SCHEMA = one_object(
    {
        "prompt_tokens": COUNT_SCHEMA,
        "completion_tokens": COUNT_SCHEMA,
        "total_tokens": COUNT_SCHEMA,
        "prompt_tokens_details": one_object({"cached_tokens": COUNT_SCHEMA}),
    }
)
ENVELOPE_SCHEMA: Mapping[str, Schema] = {
    "id": {"type": "string", "minLength": 1},
    "created": {"type": "integer"},
    "model": TEXT_SCHEMA,
}
