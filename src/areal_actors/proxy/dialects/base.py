"""A dialect: one vendor's format of requests, answers, streams and errors.

``app`` answers requests of any dialect. Dialects are pure: they convert between JSON objects and domain values, do no
I/O and know nothing of HTTP. The end of this module has what the answers of several dialects share.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Protocol, Self

from attrs import evolve, field, frozen

from areal_actors.domain import (
    Answer,
    ChatMessage,
    Chunk,
    Completion,
    CompletionRequest,
    FinishReason,
    Sampling,
    StreamItem,
)
from areal_actors.errors import InvalidRequest, Unavailable
from areal_actors.lib.json_prefix import JsonPrefix
from areal_actors.proxy.dialects.client_tools import CallForm
from areal_actors.proxy.dialects.fields import (
    CHAT_TEMPLATE_KWARGS,
    DEFAULT_MAX_TOKENS,
    ENABLE_THINKING,
    REASONING,
    REASONING_EFFORT,
    THINKING,
    FieldTable,
    JsonObject,
)
from areal_actors.proxy.failures import Failure, format_openai_failure
from areal_actors.proxy.sse import KEEP_ALIVE


class TokenBytes(Protocol):
    """A function that returns the bytes of each token of an answer, such as a renderer's ``token_bytes``."""

    def __call__(self, token_ids: Sequence[int], *, is_start: bool = True) -> Sequence[bytes]:
        """Return the bytes of each token; with ``is_start``, the first one begins the answer."""
        ...


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


@frozen(kw_only=True)
class Parsed:
    """A parsed request: the completion to sample, and how to format the answer."""

    request: CompletionRequest
    model: str | None = None
    """The name that the client sent."""
    is_stream: bool = False
    """Whether the client wants the answer streamed while it is sampled."""
    has_logprobs: bool = False
    include_usage: bool = False
    """Whether a stream of chunks ends with token counts."""
    forms: Mapping[str, CallForm] = field(factory=dict)
    """How calls are written that are not written as those of functions, by the name that the model knows."""
    echo: JsonObject = field(factory=dict)
    """The parameters that an answer of Responses repeats."""


@frozen(kw_only=True)
class Dialect(ABC):
    """One vendor's API format. Its class variables are its row in the routing table and in the OpenAPI document.

    ``token_bytes`` converts token ids for ``logprobs`` and counts; without it, ids are shown as numbers. ``model`` is
    the model name in an answer if the client named none. ``inert`` names further parameters to accept and ignore.
    ``default_max_tokens`` limits the new tokens if the client does not. ``honours_store`` says whether ``store: false``
    keeps an answer from being trained.
    """

    operation: ClassVar[str]
    """The end of its path, behind ``/v1``."""
    summary: ClassVar[str]
    fields: ClassVar[FieldTable]
    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    """What is sent to the client of a silent stream."""

    model: str = "policy"
    token_bytes: TokenBytes | None = None
    inert: Collection[str] = ()
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    honours_store: bool = True
    clock: Callable[[], float] = field(default=time.time)

    @abstractmethod
    def parse(self, body: JsonObject, *, tag: str | None = None) -> Parsed:
        """Parse the body of a request. ``tag`` is the agent that asks, if a header names it.

        Raises:
            UnsupportedParameter: a parameter that cannot be honoured.
            InvalidRequest: an invalid value; ``param`` names the field.
        """

    @abstractmethod
    def format_answers(self, parsed: Parsed, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the JSON document of a finished request, which has one answer per choice.

        Raises:
            Unavailable: the engine aborted an answer.
        """

    @abstractmethod
    def open_stream(self, parsed: Parsed) -> AnswerStream:
        """Return the formatter of a streamed answer."""

    def decoding_with(self, token_bytes: TokenBytes) -> Self:
        """Return a copy of the dialect for a model with another tokenizer."""
        return evolve(self, token_bytes=token_bytes)

    def format_failure(self, failure: Failure) -> dict[str, object]:
        """Return the JSON document of a failed request; by default, OpenAI's."""
        return format_openai_failure(failure)

    def create_request(
        self,
        values: JsonObject,
        *,
        tag: str | None,
        max_new_tokens: int | None,
        has_logprobs: bool = False,
        top_logprobs: int = 0,
        **conversation: Any,
    ) -> CompletionRequest:
        """Return the request of a ``conversation``, with the fields that all dialects have alike."""
        metadata = values["metadata"]
        # The smallest nucleus is the most probable token. Engines refuse a ``top_p`` of 0, which OpenAI's endpoint
        # accepts.
        is_smallest = values["top_p"] == 0
        sampling = Sampling(
            temperature=values["temperature"],
            top_p=1.0 if is_smallest else values["top_p"],
            # Both 0 and -1 turn it off.
            top_k=1 if is_smallest else max(values["top_k"], 0),
            min_p=values["min_p"],
            max_new_tokens=max_new_tokens or self.default_max_tokens,
            stop=values.get("stop") or values.get("stop_sequences") or (),
            stop_token_ids=values["stop_token_ids"],
            frequency_penalty=values["frequency_penalty"],
            presence_penalty=values["presence_penalty"],
            repetition_penalty=values["repetition_penalty"],
            logit_bias=values["logit_bias"],
            top_logprobs=top_logprobs,
        )
        return CompletionRequest(
            sampling=sampling,
            seed=values["seed"],
            store=values["store"] or not self.honours_store,
            metadata=metadata,
            tag=tag or metadata.get("agent"),
            streams_tokens=has_logprobs and values["stream"],
            **conversation,
        )


def thinking_options(values: JsonObject) -> JsonObject:
    """Return the options of the chat template in all of these fields. The most particular field takes precedence."""
    fields = (REASONING_EFFORT, REASONING, THINKING, ENABLE_THINKING, CHAT_TEMPLATE_KWARGS)
    return {name: each for field in fields for name, each in (values.get(field.name) or {}).items()}


def is_cut(answer: Answer) -> bool:
    """Return whether the answer ended because it reached its maximum length.

    Raises:
        Unavailable: the engine aborted it.
    """
    # The engine's own finish reason never reaches a client: several clients stop silently on an unknown one.
    if answer.completion.finish is FinishReason.ABORT:
        raise Unavailable("The generation was aborted before it was complete; the request may be repeated.")
    return answer.completion.finish is FinishReason.LENGTH


def has_cut_call(answer: Answer) -> bool:
    """Return whether a stop string ended the answer within a tool call, whose arguments then break off."""
    if answer.stop_sequence is None or not answer.message.tool_calls:
        return False
    # A stop string may also end the text after a call. That call is whole, and agents should run it.
    arguments = JsonPrefix()
    arguments.feed(answer.message.tool_calls[-1].arguments)
    return not (arguments.is_complete or arguments.is_broken)


def format_logprobs(
    sampled: Completion | Chunk, token_bytes: TokenBytes | None, *, start: int = 0, num_earlier: int = 0
) -> list[dict[str, Any]]:
    """Return one entry per sampled token from the ``start``-th on, of which ``num_earlier`` came in earlier chunks.

    A token may be a part of a character: its text then has U+FFFD, and its bytes are that part. The bytes of all tokens
    join to the text. Without ``token_bytes``, ids are shown as numbers.
    """
    tokens = sampled.token_ids.tolist()
    texts = token_bytes(tokens, is_start=not num_earlier) if token_bytes is not None else (None,) * len(tokens)
    tops = sampled.top_logprobs or ((),) * len(tokens)
    content = []
    for index, (token, text, logprob, top) in enumerate(
        zip(tokens, texts, sampled.logprobs.tolist(), tops, strict=True)
    ):
        if index < start:
            continue
        entry = _format_token(token, text, logprob)
        is_first = not (num_earlier or index)
        entry["top_logprobs"] = [
            _format_token(
                other.token_id,
                None if token_bytes is None else token_bytes((other.token_id,), is_start=is_first)[0],
                other.logprob,
            )
            for other in top
        ]
        content.append(entry)
    return content


def _format_token(token: int, text: bytes | None, logprob: float) -> dict[str, Any]:
    if text is None:
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
    return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text)}


def count_reasoning(answer: Answer, token_bytes: TokenBytes | None) -> int:
    """Return how many of the sampled tokens there are up to the end of the thinking.

    The tokens that open the thinking count, those that close it do not. Returns 0 if there is none, or if the number
    cannot be known.
    """
    if not answer.message.reasoning or token_bytes is None:
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces = [decoder.decode(piece) for piece in token_bytes(answer.completion.token_ids.tolist())]
    text, end = "".join(pieces), 0
    # A model may think several times; the texts are separated by an empty line, and by more in what was sampled.
    for thought in answer.message.reasoning.split("\n\n"):
        begin = text.find(thought, end)
        if begin < 0:
            return 0
        end = begin + len(thought)
    return bisect_left(list(accumulate(map(len, pieces))), end) + 1
