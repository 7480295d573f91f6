"""Anthropic's Messages API: formatting of finished answers, streams of events and errors.

``anthropic_request`` reads the request, ``anthropic_answer`` has the parts of an answer, and ``anthropic_stream`` its
events while it is sampled. Blocks are in the order thinking, text, calls. If a model continues with text after a call,
a stream has a second text block after the call, while an unstreamed answer has a single text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from attrs import frozen

from areal_actors.domain import Answer
from areal_actors.proxy.anthropic_answer import format_blocks, format_end, format_usage
from areal_actors.proxy.anthropic_request import ParsedAnthropic, parse_anthropic_request
from areal_actors.proxy.anthropic_stream import AnthropicStream
from areal_actors.proxy.failures import Failure, format_anthropic_failure
from areal_actors.proxy.logprobs import Decode
from areal_actors.proxy.sampling_fields import DEFAULT_MAX_TOKENS

__all__ = ["AnthropicDialect", "format_anthropic_answer"]


@frozen(kw_only=True)
class AnthropicDialect:
    """The Messages dialect. ``model`` is the model name in an answer if the client named none."""

    model: str = "policy"
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    inert: Collection[str] = ()

    def parse(self, body: Mapping[str, Any], *, tag: str | None = None) -> ParsedAnthropic:
        """Parse a request body; see ``parse_anthropic_request``."""
        return parse_anthropic_request(body, tag=tag, default_max_tokens=self.default_max_tokens, inert=self.inert)

    def format_answers(self, parsed: ParsedAnthropic, answers: Sequence[Answer]) -> dict[str, Any]:
        """Format the one answer; see ``format_anthropic_answer``."""
        return format_anthropic_answer(answers[0], model=parsed.model or self.model)

    def open_stream(self, parsed: ParsedAnthropic) -> AnthropicStream:
        """Return the formatter of one streamed answer."""
        return AnthropicStream(model=parsed.model or self.model)

    def decoding_with(self, decode: Decode) -> Self:  # noqa: ARG002
        """Return ``self``: Messages never shows the text of single tokens."""
        return self

    def format_failure(self, failure: Failure) -> dict[str, Any]:
        """Return Anthropic's error body."""
        return format_anthropic_failure(failure)


def format_anthropic_answer(answer: Answer, *, model: str) -> dict[str, Any]:
    """Return a ``message`` object, whose id is that of the interaction.

    Raises:
        Unavailable: the engine aborted it.
    """
    return {
        "id": answer.interaction,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": format_blocks(answer.message),
        **format_end(answer),
        "usage": format_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens),
    }
