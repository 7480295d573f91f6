"""The body of an OpenAI chat completion, checked field by field. Pure; never raises anything but ``RequestError``.

Which fields exist at all is decided in ``parameters``; messages and tools are read in ``chat_messages``, and
what all dialects share of sampling in ``sampling_fields``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import CompletionRequest, ToolChoice
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy.chat_messages import parse_messages, parse_tools
from areal_actors.proxy.fields import read_flag, read_integer, read_mapping, read_text, read_texts, shown, wrong
from areal_actors.proxy.parameters import CHAT_PARAMETERS
from areal_actors.proxy.sampling_fields import (
    DEFAULT_MAX_TOKENS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    read_sampling,
    read_seed,
    read_stop,
)

__all__ = ["ParsedChat", "parse_chat_request"]

_MAX_CHOICES = 128
_NO_GRAMMAR = "the engine does not constrain what it samples"


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
    _check_response_format(body)
    tools = parse_tools(body.get("tools"))
    metadata = read_texts(body, "metadata")
    request = CompletionRequest(
        messages=parse_messages(body.get("messages")),
        tools=tools,
        tool_choice=_read_tool_choice(body),
        parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
        sampling=read_sampling(
            body,
            max_new_tokens=_read_max_tokens(body, default_max_tokens),
            stop=read_stop(body),
            top_logprobs=_read_top_logprobs(body, has_logprobs=has_logprobs),
        ),
        num_choices=read_integer(body, "n", 1, low=1, high=_MAX_CHOICES),
        seed=read_seed(body),
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


def _read_tool_choice(body: Mapping[str, Any]) -> ToolChoice:
    value = body.get("tool_choice")
    if value is None:
        return ToolChoice.AUTO
    if isinstance(value, str) and value in ("auto", "none"):
        return ToolChoice(value)
    if value == "required" or isinstance(value, dict):
        raise UnsupportedParameter(
            f"tool_choice can be auto or none: {_NO_GRAMMAR}, so that no call can be enforced.", param="tool_choice"
        )
    raise wrong("tool_choice", "auto or none", value)


def _check_response_format(body: Mapping[str, Any]) -> None:
    kind = read_mapping(body, "response_format").get("type", "text")
    if kind != "text":
        raise UnsupportedParameter(
            f"response_format.type can be text only, not {shown(kind)}: {_NO_GRAMMAR}.", param="response_format"
        )
