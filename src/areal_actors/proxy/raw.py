"""OpenAI's plain completions: formatting of finished answers, streams of chunks and errors.

``raw_request`` reads the request. There are no messages here: the request's text is continued, and the answer is text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from attrs import evolve, field, frozen

from areal_actors.domain import Answer, AnswerStarted, Completion, Delta, InteractionId, TextDelta
from areal_actors.proxy.chat import format_finish, format_usage
from areal_actors.proxy.failures import Failure, format_openai_failure
from areal_actors.proxy.logprobs import Decode
from areal_actors.proxy.raw_request import ParsedRaw, parse_raw_request
from areal_actors.proxy.sse import DONE, format_event

__all__ = ["RawDialect", "RawStream", "format_raw_answer"]


@frozen(kw_only=True)
class RawDialect:
    """The dialect of plain completions; the fields are those of ``ChatDialect``."""

    model: str = "policy"
    decode: Decode | None = None
    inert: Collection[str] = ()
    clock: Callable[[], float] = field(default=time.time)

    def parse(self, body: Mapping[str, Any], *, tag: str | None = None) -> ParsedRaw:
        """Parse a request body; see ``parse_raw_request``."""
        return parse_raw_request(body, tag=tag, inert=self.inert)

    def format_answers(self, parsed: ParsedRaw, answers: Sequence[Answer]) -> dict[str, Any]:
        """Format the finished answers; see ``format_raw_answer``."""
        return format_raw_answer(
            parsed, answers, created=int(self.clock()), model=parsed.model or self.model, decode=self.decode
        )

    def open_stream(self, parsed: ParsedRaw) -> RawStream:
        """Return the formatter of one streamed answer."""
        return RawStream(parsed, created=int(self.clock()), model=parsed.model or self.model, decode=self.decode)

    def decoding_with(self, decode: Decode) -> Self:
        """Return a copy of the dialect for a model with another tokenizer."""
        return evolve(self, decode=decode)

    def format_failure(self, failure: Failure) -> dict[str, Any]:
        """Return OpenAI's error body."""
        return format_openai_failure(failure)


def format_raw_answer(
    parsed: ParsedRaw, answers: Sequence[Answer], *, created: int, model: str, decode: Decode | None = None
) -> dict[str, Any]:
    """Return a ``text_completion`` object, whose id is that of the first choice's interaction.

    If there are several choices, each also carries its own ``interaction_id``, by which it can be rewarded.

    Raises:
        Unavailable: the engine aborted a choice.
    """
    choices = [
        _format_choice(parsed, answer, index, text=answer.message.content or "", decode=decode)
        for index, answer in enumerate(answers)
    ]
    return {
        "id": answers[0].interaction,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": format_usage(answers),
    }


class RawStream:
    """The chunks of one request: text as it is sampled, and a last chunk per choice with its finish reason."""

    def __init__(self, parsed: ParsedRaw, *, created: int, model: str, decode: Decode | None = None) -> None:
        self._parsed = parsed
        self._decode = decode
        self._envelope: dict[str, Any] = {"id": "", "object": "text_completion", "created": created, "model": model}
        self._choices: dict[InteractionId, int] = {}
        self._answers: list[Answer] = []

    def feed(self, item: AnswerStarted | Delta | Answer) -> bytes:
        """Return the events of one item."""
        if isinstance(item, AnswerStarted):
            self._envelope["id"] = self._envelope["id"] or item.interaction
            self._choices[item.interaction] = item.choice
            return b""
        if isinstance(item, Answer):
            self._answers.append(item)
            index = self._choices[item.interaction]
            return self._chunk(_format_choice(self._parsed, item, index, text="", decode=self._decode))
        if not isinstance(item, TextDelta):  # a raw answer has no other deltas
            return b""
        return self._chunk({"index": item.choice, "text": item.text, "logprobs": None, "finish_reason": None})

    def finish(self) -> bytes:
        """Return the usage, if the client asked for it, and the end marker."""
        if not self._parsed.include_usage:
            return DONE
        return format_event(self._envelope | {"choices": [], "usage": format_usage(self._answers)}) + DONE

    def fail(self, failure: Failure) -> bytes:
        """Return an event that OpenAI's SDKs raise as an ``APIError``."""
        return format_event(format_openai_failure(failure))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return format_event(self._envelope | {"choices": [choice]})


def _format_choice(
    parsed: ParsedRaw, answer: Answer, index: int, *, text: str, decode: Decode | None
) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": text,
        "logprobs": _format_logprobs(answer.completion, decode) if parsed.has_logprobs else None,
        "finish_reason": format_finish(answer),
    }
    return choice | {"interaction_id": answer.interaction} if parsed.request.num_choices > 1 else choice


def _format_logprobs(completion: Completion, decode: Decode | None) -> dict[str, Any]:
    """Return four lists with one entry per sampled token. Offsets count characters from the start of the answer."""
    ids = completion.token_ids.tolist()
    tokens = [_token(token, decode) for token in ids]
    logprobs = completion.logprobs.tolist()
    tops = completion.top_logprobs or ((),) * len(ids)
    alternatives = []
    for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
        # As in OpenAI's endpoint, the sampled token is always listed, in addition to the most probable ones.
        alternatives.append({**{_token(other.token_id, decode): other.logprob for other in top}, token: logprob})
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": alternatives if completion.top_logprobs else None,
        "text_offset": offsets[:-1],
    }


def _token(token: int, decode: Decode | None) -> str:
    return f"token_id:{token}" if decode is None else decode((token,))
