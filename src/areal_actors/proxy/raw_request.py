"""Parsing of the body of an OpenAI plain completion, field by field. Pure; raises only ``RequestError``.

``raw_parameters`` decides which fields exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import CompletionRequest
from areal_actors.errors import UnsupportedParameter
from areal_actors.proxy.fields import read_flag, read_integer, read_mapping, read_text, read_texts, wrong
from areal_actors.proxy.raw_parameters import RAW_PARAMETERS
from areal_actors.proxy.sampling_fields import MAX_TOKENS, read_sampling, read_seed, read_stop

__all__ = ["ParsedRaw", "parse_raw_request"]

ID_PREFIX = "cmpl-"
_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 5


@frozen(kw_only=True)
class ParsedRaw:
    """A parsed plain completion request: the ``CompletionRequest`` to sample, and how to format the answer.

    ``model`` is the name that the client sent, or ``None``.
    """

    request: CompletionRequest
    model: str | None = None
    is_stream: bool = False
    include_usage: bool = False
    has_logprobs: bool = False


def parse_raw_request(body: Mapping[str, Any], *, tag: str | None = None, inert: Collection[str] = ()) -> ParsedRaw:
    """Parse the body of a request; ``tag`` and ``inert`` are those of ``parse_chat_request``.

    Raises:
        UnsupportedParameter: a parameter that cannot be honoured.
        InvalidRequest: an invalid value; ``param`` names the field.
    """
    RAW_PARAMETERS.check(body, inert=inert)
    prompt = _read_prompt(body.get("prompt"))
    num_tops = read_integer(body, "logprobs", None, low=0, high=_MAX_TOP_LOGPROBS)
    metadata = read_texts(body, "metadata")
    request = CompletionRequest(
        messages=(),
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=() if isinstance(prompt, str) else prompt,
        sampling=read_sampling(
            body,
            max_new_tokens=read_integer(body, "max_tokens", _DEFAULT_MAX_TOKENS, low=1, high=MAX_TOKENS),
            stop=read_stop(body),
            top_logprobs=num_tops or 0,
        ),
        num_choices=read_integer(body, "n", 1, low=1, high=_MAX_CHOICES),
        seed=read_seed(body),
        store=read_flag(body, "store", default=True),
        metadata=metadata,
        tag=tag or metadata.get("agent"),
        id_prefix=ID_PREFIX,
    )
    return ParsedRaw(
        request=request,
        model=read_text(body, "model"),
        is_stream=read_flag(body, "stream", default=False),
        include_usage=read_flag(read_mapping(body, "stream_options"), "include_usage", default=False),
        has_logprobs=num_tops is not None,
    )


def _read_prompt(value: Any) -> str | tuple[int, ...]:
    """Return a text or token ids; either may be the only element of a list."""
    if isinstance(value, list) and value and not _is_id(value[0]):
        if len(value) > 1:
            raise UnsupportedParameter(
                f"prompt is a list of {len(value)} prompts; send a request for each.", param="prompt"
            )
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(_is_id, value)):
        return tuple(value)
    raise wrong("prompt", "a string that is not empty, or a list of token ids", value)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS
