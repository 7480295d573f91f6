"""The body of an OpenAI chat completion, checked field by field. Pure; never raises anything but ``RequestError``.

Which fields exist at all is decided in ``parameters``; messages and tools are read in ``chat_messages``, what
the answer must look like in ``structured``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import CompletionRequest, Grammar, Sampling
from areal_actors.errors import InvalidRequest
from areal_actors.proxy.chat_messages import parse_messages, parse_tools
from areal_actors.proxy.fields import read_flag, read_integer, read_mapping, read_number, read_text, wrong
from areal_actors.proxy.parameters import CHAT_PARAMETERS
from areal_actors.proxy.structured import parse_extensions, parse_response_format, parse_tool_choice

__all__ = ["DEFAULT_MAX_TOKENS", "ParsedChat", "parse_chat_request"]

DEFAULT_MAX_TOKENS = 512
_MAX_TOKENS = 2**31 - 1
_MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_TOP_LOGPROBS = 20


@frozen(kw_only=True)
class ParsedChat:
    """A chat completion as asked for: what is sampled (``request``), and how it is worded.

    ``model`` is the name that the client used, ``None`` if it used none.
    """

    request: CompletionRequest
    model: str | None = None
    is_stream: bool = False
    include_usage: bool = False
    has_logprobs: bool = False


def parse_chat_request(
    body: Mapping[str, Any],
    *,
    tag: str | None = None,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    inert: Collection[str] = (),
) -> ParsedChat:
    """Read the body of a request.

    Args:
        body: the JSON object.
        tag: the agent that asks, where a header names it; otherwise ``metadata.agent`` may.
        default_max_tokens: new tokens where the client names no bound.
        inert: further parameter names to accept and ignore.

    Raises:
        UnsupportedParameter: a parameter that cannot be honoured.
        InvalidRequest: a value that makes no sense; ``param`` names the field.
    """
    CHAT_PARAMETERS.check(body, inert=inert)
    has_logprobs = read_flag(body, "logprobs", default=False)
    selection = parse_tool_choice(body.get("tool_choice"), parse_tools(body.get("tools")))
    metadata = _read_metadata(body)
    request = CompletionRequest(
        messages=parse_messages(body.get("messages")),
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
        response_format=_read_form(body),
        sampling=_read_sampling(body, default_max_tokens, has_logprobs=has_logprobs),
        num_choices=read_integer(body, "n", 1, low=1, high=_MAX_CHOICES),
        seed=read_integer(body, "seed", None, low=-(2**63), high=2**63 - 1),
        store=read_flag(body, "store", default=True),
        template_kwargs=read_mapping(body, "chat_template_kwargs"),
        metadata=metadata,
        tag=tag or metadata.get("agent"),
    )
    return ParsedChat(
        request=request,
        model=read_text(body, "model"),
        is_stream=read_flag(body, "stream", default=False),
        include_usage=read_flag(read_mapping(body, "stream_options"), "include_usage", default=False),
        has_logprobs=has_logprobs,
    )


def _read_sampling(body: Mapping[str, Any], default_max_tokens: int, *, has_logprobs: bool) -> Sampling:
    return Sampling(
        temperature=read_number(body, "temperature", 1.0, low=0, high=2),
        top_p=read_number(body, "top_p", 1.0, low=0, high=1, is_open=True),
        top_k=max(read_integer(body, "top_k", 0, low=-1, high=_MAX_TOKENS), 0),
        min_p=read_number(body, "min_p", 0.0, low=0, high=1),
        max_new_tokens=_read_max_tokens(body, default_max_tokens),
        stop=_read_stop(body),
        stop_token_ids=_read_stop_token_ids(body),
        frequency_penalty=read_number(body, "frequency_penalty", 0.0, low=-2, high=2),
        presence_penalty=read_number(body, "presence_penalty", 0.0, low=-2, high=2),
        repetition_penalty=read_number(body, "repetition_penalty", 1.0, low=0, high=10, is_open=True),
        logit_bias=_read_logit_bias(body),
        top_logprobs=_read_top_logprobs(body, has_logprobs=has_logprobs),
    )


def _read_max_tokens(body: Mapping[str, Any], default: int) -> int:
    old = read_integer(body, "max_tokens", None, low=1, high=_MAX_TOKENS)
    new = read_integer(body, "max_completion_tokens", None, low=1, high=_MAX_TOKENS)
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, so give one of them.",
            param="max_completion_tokens",
        )
    return new or old or default


def _read_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else value or []
    is_valid = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not is_valid or len(stops) > _MAX_STOPS:
        raise wrong("stop", f"a string or up to {_MAX_STOPS} strings, none of them empty", value)
    return tuple(stops)


def _read_stop_token_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    value = body.get("stop_token_ids") or []
    is_valid = isinstance(value, list) and all(type(token) is int and 0 <= token <= _MAX_TOKENS for token in value)
    if not is_valid:
        raise wrong("stop_token_ids", "a list of token ids", value)
    return tuple(value)


def _read_logit_bias(body: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    biases = read_mapping(body, "logit_bias")
    pairs: list[tuple[int, float]] = []
    for name in biases:
        if not (name.isascii() and name.isdigit()) or int(name[:12]) > _MAX_TOKENS:
            raise wrong("logit_bias", "an object whose keys are token ids", name)
        pairs.append((int(name), read_number(biases, name, 0.0, low=-100, high=100)))
    return tuple(sorted(pairs))


def _read_top_logprobs(body: Mapping[str, Any], *, has_logprobs: bool) -> int:
    number = read_integer(body, "top_logprobs", 0, low=0, high=_MAX_TOP_LOGPROBS)
    if number and not has_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return number


def _read_form(body: Mapping[str, Any]) -> Grammar | None:
    """What the text must match, in OpenAI's word for it or in those of other servers."""
    form, extension = parse_response_format(body.get("response_format")), parse_extensions(body)
    if form is not None and extension is not None:
        raise InvalidRequest(
            "response_format and another field both say what the answer must match; give one of them.",
            param="response_format",
        )
    return form or extension


def _read_metadata(body: Mapping[str, Any]) -> Mapping[str, str]:
    metadata = read_mapping(body, "metadata")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise wrong("metadata", "an object of strings", {name: value})
    return metadata
