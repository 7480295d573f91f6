"""OpenAI's plain completions: the request's text is continued, and the answer is text. There are no messages here."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Chunk,
    Completion,
    SampledTokens,
    StreamItem,
    TextDelta,
)
from areal_actors.errors import UnsupportedParameter
from areal_actors.proxy.dialects.base import Dialect, Parsed, TokenBytes, format_logprobs
from areal_actors.proxy.dialects.chat.answer import OpenAIStream, format_choices, format_finish
from areal_actors.proxy.dialects.fields import (
    ALL_ROUTES,
    MAX_TOKENS,
    OPENAI,
    OPENAI_CHUNKS,
    FieldTable,
    JsonObject,
    Kind,
    honoured,
    integer,
    is_token_id,
    refused,
    wrong,
)
from areal_actors.proxy.sse import format_event

ID_PREFIX = "cmpl-"
_DEFAULT_MAX_TOKENS = 16
_NO_GRAMMAR = "the form of chat completions can be held, that of raw text not"


# ------------------------------------------------------------------------------------------------------ requests


def _read_prompt(value: Any, name: str) -> str | tuple[int, ...]:
    """Return a text or token ids; either may be the only element of a list."""
    if isinstance(value, list) and value and not is_token_id(value[0]):
        if len(value) > 1:
            raise UnsupportedParameter(
                f"{name} is a list of {len(value)} prompts; send a request for each.", param=name
            )
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(is_token_id, value)):
        return tuple(map(int, value))
    raise wrong(name, "a string that is not empty, or a list of token ids", value)


COMPLETIONS_FIELDS = FieldTable(
    "completions",
    (
        honoured(
            "prompt",
            Kind(
                {
                    "anyOf": [
                        {"type": "string", "minLength": 1},
                        {
                            "type": "array",
                            "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS},
                            "minItems": 1,
                        },
                    ]
                },
                _read_prompt,
                is_raw=True,
            ),
            "a string, or token ids; several prompts are refused: send a request for each",
            is_required=True,
        ),
        *ALL_ROUTES,
        *OPENAI,
        *OPENAI_CHUNKS,
        honoured(
            "max_tokens",
            integer(1, MAX_TOKENS),
            "16 without it, as OpenAI has it; bounded by the context length",
            default=_DEFAULT_MAX_TOKENS,
        ),
        honoured(
            "logprobs",
            integer(0, 5),
            "0 to 5 alternatives for each token that was sampled, end token included; "
            "in a stream, for the tokens of each chunk",
        ),
        refused("suffix", "text is continued, not filled in", ""),
        refused("add_special_tokens", "texts begin as the tokenizer begins them; send ids for anything else", True),
        refused("truncate_prompt_tokens", "the prompt is read as it is sent"),
        refused("response_format", _NO_GRAMMAR),
        refused("structured_outputs", _NO_GRAMMAR),
        refused("guided_json", _NO_GRAMMAR),
        refused("guided_regex", _NO_GRAMMAR),
        refused("guided_choice", _NO_GRAMMAR),
        refused("guided_grammar", _NO_GRAMMAR),
    ),
)


@frozen(kw_only=True)
class CompletionsDialect(Dialect):
    """The dialect of plain completions."""

    operation: ClassVar[str] = "completions"
    summary: ClassVar[str] = "OpenAI's plain completions"
    fields: ClassVar[FieldTable] = COMPLETIONS_FIELDS

    def parse(self, body: JsonObject, *, tag: str | None = None) -> Parsed:
        """Parse a request body."""
        values = COMPLETIONS_FIELDS.read(body, inert=self.inert)
        prompt, num_tops = values["prompt"], values["logprobs"]
        request = self.create_request(
            values,
            tag=tag,
            max_new_tokens=values["max_tokens"],
            has_logprobs=num_tops is not None,
            top_logprobs=num_tops or 0,
            messages=(),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=() if isinstance(prompt, str) else prompt,
            num_choices=values["n"],
            id_prefix=ID_PREFIX,
        )
        return Parsed(
            request=request,
            model=values["model"],
            is_stream=values["stream"],
            include_usage=values["stream_options"],
            has_logprobs=num_tops is not None,
        )

    def format_answers(self, parsed: Parsed, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a ``text_completion`` object; see ``format_choices``."""
        contents = []
        for answer in answers:
            logprobs = None
            if parsed.has_logprobs:
                logprobs = _format_logprobs(answer.completion, self.token_bytes, _Offsets())
            contents.append({"text": answer.message.content or "", "logprobs": logprobs})
        return format_choices(self, parsed, answers, "text_completion", contents)

    def open_stream(self, parsed: Parsed) -> CompletionsStream:
        """Return the formatter of one streamed answer."""
        return CompletionsStream(self, parsed)


class CompletionsStream(OpenAIStream):
    """The chunks of one request: text as it is sampled, and a last chunk per choice with its finish reason.

    If log-probabilities were requested, a chunk carries those of all tokens since the chunk before.
    """

    kind = "text_completion"

    def __init__(self, dialect: Dialect, parsed: Parsed) -> None:
        super().__init__(dialect, parsed)
        self._unsent: dict[str, Any] | None = None
        """Log-probabilities that wait for a chunk. Choices are streamed one after another, so they share the field."""
        self._offsets = _Offsets()

    def feed(self, item: StreamItem) -> bytes:
        """Return the events of one item."""
        if isinstance(item, AnswerStarted):
            self._envelope["id"] = self._envelope["id"] or item.interaction
            self._choices[item.interaction] = item.choice
            self._unsent, self._num_sent, self._offsets = None, 0, _Offsets()
            return b""
        if isinstance(item, SampledTokens):
            if not len(item.chunk.token_ids):
                return b""
            waiting, new = self._unsent, _format_logprobs(item.chunk, self._token_bytes, self._offsets)
            # A chunk of the engine may end within a character or a stop string; its tokens wait for the next text.
            self._unsent = (
                new if waiting is None else {name: waiting[name] and waiting[name] + new[name] for name in new}
            )
            return b""
        if isinstance(item, TextDelta):
            logprobs, self._unsent = self._unsent, None
            self._num_sent += len(logprobs["tokens"]) if logprobs else 0
            return self._chunk(item.choice, item.text, logprobs)
        # An answer without messages has no other deltas.
        if not isinstance(item, Answer):
            return b""
        self._answers.append(item)
        logprobs = None
        if self._parsed.has_logprobs:
            # The answer has every token: those of a repeated answer, which has no ``SampledTokens``, as well.
            whole = _format_logprobs(item.completion, self._token_bytes, _Offsets())
            logprobs = {name: values and values[self._num_sent :] for name, values in whole.items()}
        extra = {"interaction_id": item.interaction} if self._parsed.request.num_choices > 1 else {}
        return self._chunk(self._choices[item.interaction], "", logprobs, format_finish(item), **extra)

    def _chunk(
        self, choice: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None = None, **extra: Any
    ) -> bytes:
        body = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **extra}
        return format_event(self._envelope | {"choices": [body]})


class _Offsets:
    """Where each token begins in the text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_tokens = 0
        self._num_characters = 0

    def add(self, token: bytes) -> int:
        """Return the offset of the next token. Tokens that share a character begin where it begins."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(token))
        self.num_tokens += 1
        return offset


def _format_logprobs(sampled: Completion | Chunk, token_bytes: TokenBytes | None, offsets: _Offsets) -> dict[str, Any]:
    """Return four lists with one entry per sampled token, after those that ``offsets`` has counted."""
    entries = format_logprobs(sampled, token_bytes, num_earlier=offsets.num_tokens)
    # As in OpenAI's endpoint, the sampled token is always listed, in addition to the most probable ones.
    alternatives = [{_name(it): it["logprob"] for it in (*entry["top_logprobs"], entry)} for entry in entries]
    return {
        "tokens": [_name(entry) for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": alternatives if sampled.top_logprobs else None,
        "text_offset": [
            offsets.add(entry["token"].encode() if entry["bytes"] is None else bytes(entry["bytes"]))
            for entry in entries
        ],
    }


def _name(entry: Mapping[str, Any]) -> str:
    r"""Return the text of a token, or its bytes as ``bytes:\xf0\x9f`` if it is a part of a character."""
    raw, text = entry["bytes"], str(entry["token"])
    if raw is None or text.encode() == bytes(raw):
        return text
    # As OpenAI's endpoint writes them. Their texts would be equal, and each has an entry of its own.
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
