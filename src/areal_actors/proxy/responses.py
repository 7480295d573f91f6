"""OpenAI's Responses API as a dialect: one answer per request, as an object or as a stream of events.

``responses_request`` reads requests, ``responses_answer`` formats answers, and ``responses_stream`` formats streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from attrs import evolve, field, frozen

from areal_actors.domain import Answer
from areal_actors.proxy.failures import Failure, format_openai_failure
from areal_actors.proxy.logprobs import Decode
from areal_actors.proxy.responses_answer import Envelope, format_output
from areal_actors.proxy.responses_request import ParsedResponse, parse_response_request
from areal_actors.proxy.responses_stream import ResponseStream
from areal_actors.proxy.sampling_fields import DEFAULT_MAX_TOKENS

__all__ = ["ParsedResponse", "ResponsesDialect"]


@frozen(kw_only=True)
class ResponsesDialect:
    """The Responses dialect. ``honours_store`` says whether ``store: false`` keeps an answer from training.

    The other attributes are those of ``ChatDialect``.
    """

    model: str = "policy"
    decode: Decode | None = None
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    inert: Collection[str] = ()
    honours_store: bool = False
    clock: Callable[[], float] = field(default=time.time)

    def parse(self, body: Mapping[str, Any], *, tag: str | None = None) -> ParsedResponse:
        """Parse a request body; see ``parse_response_request``."""
        return parse_response_request(
            body,
            tag=tag,
            default_max_tokens=self.default_max_tokens,
            inert=self.inert,
            honours_store=self.honours_store,
        )

    def format_answers(self, parsed: ParsedResponse, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the ``response`` object of the one answer, whose id is that of the interaction.

        Raises:
            Unavailable: the engine aborted it.
        """
        (answer,) = answers
        output = format_output(answer, has_logprobs=parsed.has_logprobs, decode=self.decode)
        return self._envelope(parsed).end(answer, output, completed=int(self.clock()))

    def open_stream(self, parsed: ParsedResponse) -> ResponseStream:
        """Return the formatter of one streamed answer."""
        return ResponseStream(self._envelope(parsed), clock=self.clock)

    def decoding_with(self, decode: Decode) -> Self:
        """Return a copy of the dialect for a model with another tokenizer."""
        return evolve(self, decode=decode)

    def format_failure(self, failure: Failure) -> dict[str, Any]:
        """Return OpenAI's error body."""
        return format_openai_failure(failure)

    def _envelope(self, parsed: ParsedResponse) -> Envelope:
        model = parsed.model or self.model
        return Envelope(parsed=parsed, created=int(self.clock()), model=model, decode=self.decode)
