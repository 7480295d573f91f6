"""Parsing of the body of an Anthropic Messages request, field by field. Pure; raises only ``RequestError``.

``anthropic_parameters`` decides which fields exist; ``anthropic_messages`` reads messages and tools.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import CompletionRequest, Grammar, Sampling
from areal_actors.errors import InvalidRequest
from areal_actors.proxy.anthropic_messages import parse_anthropic_messages, parse_anthropic_tools
from areal_actors.proxy.anthropic_parameters import MESSAGES_PARAMETERS
from areal_actors.proxy.fields import read_flag, read_integer, read_mapping, read_text, read_texts, wrong
from areal_actors.proxy.sampling_fields import DEFAULT_MAX_TOKENS, MAX_TOKENS, read_sampling, read_seed, read_stop
from areal_actors.proxy.structured import parse_response_format, parse_tool_choice

__all__ = ["ID_PREFIX", "ParsedAnthropic", "parse_anthropic_request"]

ID_PREFIX = "msg_"
_THINKING_SWITCH = "enable_thinking"
"""The option with which the chat templates of several model families turn thinking on and off."""
_THINKING = {"enabled": {_THINKING_SWITCH: True}, "disabled": {_THINKING_SWITCH: False}}
_THINKING_BY_TEMPLATE = ("adaptive", "between_tools")


@frozen(kw_only=True)
class ParsedAnthropic:
    """A parsed Messages request. ``model`` is the name that the client sent, or ``None``."""

    request: CompletionRequest
    model: str | None = None
    is_stream: bool = False


def parse_anthropic_request(
    body: Mapping[str, Any],
    *,
    tag: str | None = None,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    inert: Collection[str] = (),
) -> ParsedAnthropic:
    """Parse the body of a request. The arguments are those of ``parse_chat_request``.

    ``max_tokens`` may be missing although Anthropic requires it, because requests to count tokens are parsed here as
    well.

    Raises:
        UnsupportedParameter: a parameter that cannot be honoured.
        InvalidRequest: an invalid value; ``param`` names the field.
    """
    MESSAGES_PARAMETERS.check(body, inert=inert)
    tools = parse_anthropic_tools(body.get("tools"))
    selection = parse_tool_choice(body.get("tool_choice"), tools)
    metadata = read_texts(body, "metadata")
    request = CompletionRequest(
        messages=parse_anthropic_messages(body.get("system"), body.get("messages")),
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=not _read_is_single(body),
        response_format=_read_format(body),
        sampling=_read_sampling(body, default_max_tokens),
        seed=read_seed(body),
        store=read_flag(body, "store", default=True),
        template_kwargs=_read_template_options(body),
        metadata=metadata,
        tag=tag or metadata.get("agent"),
        id_prefix=ID_PREFIX,
    )
    return ParsedAnthropic(
        request=request, model=read_text(body, "model"), is_stream=read_flag(body, "stream", default=False)
    )


def _read_sampling(body: Mapping[str, Any], default_max_tokens: int) -> Sampling:
    return read_sampling(
        body,
        max_new_tokens=read_integer(body, "max_tokens", default_max_tokens, low=1, high=MAX_TOKENS),
        stop=read_stop(body, "stop_sequences"),
    )


def _read_is_single(body: Mapping[str, Any]) -> bool:
    choice = body.get("tool_choice")
    return isinstance(choice, dict) and read_flag(choice, "disable_parallel_tool_use", default=False)


def _read_format(body: Mapping[str, Any]) -> Grammar | None:
    newer, older = read_mapping(body, "output_config").get("format"), body.get("output_format")
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            "output_config.format and output_format differ; they mean the same, so give one of them.",
            param="output_config",
        )
    return parse_response_format(older if newer is None else newer, param="output_config.format")


def _read_template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the chat template's options; explicit ``chat_template_kwargs`` take precedence over ``thinking``."""
    options = read_mapping(body, "chat_template_kwargs")
    kind = read_mapping(body, "thinking").get("type", "adaptive")
    if not isinstance(kind, str) or (kind not in _THINKING and kind not in _THINKING_BY_TEMPLATE):
        raise wrong("thinking.type", "enabled, disabled or adaptive", kind)
    return {**_THINKING.get(kind, {}), **options}
