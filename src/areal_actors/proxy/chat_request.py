"""Parsing of the body of an OpenAI chat completion, field by field. Pure; raises only ``RequestError``.

``parameters`` decides which fields exist; ``chat_messages`` reads messages and tools, ``structured`` the required
output format, and ``sampling_fields`` the sampling parameters that all dialects share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import CompletionRequest, Grammar
from areal_actors.errors import InvalidRequest
from areal_actors.proxy.chat_messages import parse_messages, parse_tools
from areal_actors.proxy.fields import read_flag, read_integer, read_mapping, read_text, read_texts
from areal_actors.proxy.parameters import CHAT_PARAMETERS
from areal_actors.proxy.sampling_fields import (
    DEFAULT_MAX_TOKENS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    read_sampling,
    read_seed,
    read_stop,
)
from areal_actors.proxy.structured import parse_extensions, parse_response_format, parse_tool_choice

__all__ = ["ParsedChat", "parse_chat_request"]

_MAX_CHOICES = 128


@frozen(kw_only=True)
class ParsedChat:
    """A parsed chat completion request: the ``CompletionRequest`` to sample, and how to format the answer.

    ``model`` is the name that the client sent, or ``None``.
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
    honours_store: bool = True,
) -> ParsedChat:
    """Parse the body of a request.

    Args:
        body: the JSON object.
        tag: the agent that asks, if a header names it; otherwise ``metadata.agent`` is used.
        default_max_tokens: the limit of new tokens if the client sets none.
        inert: names of further parameters to accept and ignore.
        honours_store: whether ``store: false`` keeps the answer from training.

    Raises:
        UnsupportedParameter: a parameter that cannot be honoured.
        InvalidRequest: an invalid value; ``param`` names the field.
    """
    CHAT_PARAMETERS.check(body, inert=inert)
    has_logprobs = read_flag(body, "logprobs", default=False)
    selection = parse_tool_choice(body.get("tool_choice"), parse_tools(body.get("tools")))
    metadata = read_texts(body, "metadata")
    request = CompletionRequest(
        messages=parse_messages(body.get("messages")),
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
        response_format=_read_form(body),
        sampling=read_sampling(
            body,
            max_new_tokens=_read_max_tokens(body, default_max_tokens),
            stop=read_stop(body),
            top_logprobs=_read_top_logprobs(body, has_logprobs=has_logprobs),
        ),
        num_choices=read_integer(body, "n", 1, low=1, high=_MAX_CHOICES),
        seed=read_seed(body),
        store=read_flag(body, "store", default=True) or not honours_store,
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


def _read_max_tokens(body: Mapping[str, Any], default: int) -> int:
    old = read_integer(body, "max_tokens", None, low=1, high=MAX_TOKENS)
    new = read_integer(body, "max_completion_tokens", None, low=1, high=MAX_TOKENS)
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, so give one of them.",
            param="max_completion_tokens",
        )
    return new or old or default


def _read_top_logprobs(body: Mapping[str, Any], *, has_logprobs: bool) -> int:
    number = read_integer(body, "top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS)
    if number and not has_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return number


def _read_form(body: Mapping[str, Any]) -> Grammar | None:
    """Return the required output format, from OpenAI's ``response_format`` or from other servers' fields."""
    form, extension = parse_response_format(body.get("response_format")), parse_extensions(body)
    if form is not None and extension is not None:
        raise InvalidRequest(
            "response_format and another field both say what the answer must match; give one of them.",
            param="response_format",
        )
    return form or extension
