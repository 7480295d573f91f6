"""The interface of a dialect: one vendor's format of requests, answers, streams and errors.

``completions`` answers requests of any dialect; ``chat`` is OpenAI's chat completions. Dialects are pure: they convert
between JSON objects and domain values, do no I/O and know nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from areal_actors.domain import Answer, AnswerStarted, CompletionRequest, Delta
from areal_actors.proxy.failures import Failure
from areal_actors.proxy.logprobs import Decode

__all__ = ["AnswerStream", "Dialect", "Parsed"]


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

    def feed(self, item: AnswerStarted | Delta | Answer) -> bytes:
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
