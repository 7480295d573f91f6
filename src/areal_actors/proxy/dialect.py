"""What a dialect is: one vendor's wording of requests, answers, streams and errors.

``completions`` answers requests of any dialect; ``chat`` is OpenAI's chat completions. Dialects are pure: they turn
JSON objects into the words of the house and back, and neither wait nor know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from areal_actors.domain import Answer, AnswerStarted, CompletionRequest, Delta
from areal_actors.proxy.failures import Failure
from areal_actors.proxy.logprobs import Decode

__all__ = ["AnswerStream", "Dialect", "Parsed"]


class Parsed(Protocol):
    """A request, read."""

    @property
    def request(self) -> CompletionRequest:
        """What is asked."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether the answer is wanted as it is sampled."""
        ...


class AnswerStream(Protocol):
    """The wording of one streamed answer: items in, server-sent events out (possibly none, possibly several)."""

    def feed(self, item: AnswerStarted | Delta | Answer) -> bytes:
        """What the client reads of ``item``."""
        ...

    def finish(self) -> bytes:
        """What ends a stream that went well."""
        ...

    def fail(self, failure: Failure) -> bytes:
        """What ends a stream that did not."""
        ...


P = TypeVar("P", bound=Parsed)


class Dialect(Protocol[P]):
    """One vendor's wording."""

    def parse(self, body: Mapping[str, Any], *, tag: str | None) -> P:
        """Read the body of a request. Raises ``RequestError`` and nothing else."""
        ...

    def format_answers(self, parsed: P, answers: Sequence[Answer]) -> Any:
        """The JSON document of a finished request: one answer per choice."""
        ...

    def open_stream(self, parsed: P) -> AnswerStream:
        """The wording of a stream."""
        ...

    def decoding_with(self, decode: Decode) -> Self:
        """The same wording for a model with another tokenizer."""
        ...

    def format_failure(self, failure: Failure) -> Any:
        """The JSON document of a failed request."""
        ...
