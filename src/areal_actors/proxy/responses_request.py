"""Parsing of the body of an OpenAI Responses request, field by field. Pure; raises only ``RequestError``.

``responses_parameters`` decides which fields exist; ``responses_items`` reads input items.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import ChatMessage, CompletionRequest, Grammar, InteractionId, JsonText, Sampling, ToolChoice
from areal_actors.errors import PreviousNotFound, UnsupportedParameter
from areal_actors.proxy.chat_messages import parse_tools
from areal_actors.proxy.fields import read_flag, read_integer, read_mapping, read_text, read_texts, shown, wrong
from areal_actors.proxy.responses_items import ID_PREFIX, parse_input
from areal_actors.proxy.responses_parameters import RESPONSES_PARAMETERS
from areal_actors.proxy.sampling_fields import (
    DEFAULT_MAX_TOKENS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    read_sampling,
    read_seed,
    read_stop,
)
from areal_actors.proxy.structured import Selection, parse_response_format, parse_tool_choice

__all__ = ["ParsedResponse", "parse_response_request"]

_LOGPROBS = "message.output_text.logprobs"
_SUMMARIES = ("auto", "concise", "detailed")


@frozen(kw_only=True)
class ParsedResponse:
    """A parsed Responses request: the ``CompletionRequest`` to sample, and ``echo``, which the answer repeats.

    ``model`` is the name that the client sent, or ``None``.
    """

    request: CompletionRequest
    echo: Mapping[str, Any]
    model: str | None = None
    is_stream: bool = False
    has_logprobs: bool = False


def parse_response_request(
    body: Mapping[str, Any],
    *,
    tag: str | None = None,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    inert: Collection[str] = (),
    honours_store: bool = True,
) -> ParsedResponse:
    """Parse the body of a request. The arguments are those of ``parse_chat_request``.

    Raises:
        UnsupportedParameter: a parameter that cannot be honoured.
        InvalidRequest: an invalid value; ``param`` names the field.
    """
    RESPONSES_PARAMETERS.check(body, inert=inert)
    selection = parse_tool_choice(body.get("tool_choice"), parse_tools(body.get("tools"), is_flat=True))
    instructions = _read_instructions(body)
    metadata = read_texts(body, "metadata")
    request = CompletionRequest(
        messages=(*instructions, *parse_input(body.get("input"))),
        has_instructions=bool(instructions),
        previous=_read_previous(body),
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
        response_format=_read_format(body),
        sampling=_read_sampling(body, default_max_tokens),
        seed=read_seed(body),
        store=read_flag(body, "store", default=True) or not honours_store,
        template_kwargs=read_mapping(body, "chat_template_kwargs"),
        metadata=metadata,
        tag=tag or metadata.get("agent"),
        id_prefix=ID_PREFIX,
    )
    return ParsedResponse(
        request=request,
        echo=_echo(body, request, selection),
        model=read_text(body, "model"),
        is_stream=read_flag(body, "stream", default=False),
        has_logprobs=_includes_logprobs(body) or request.sampling.top_logprobs > 0,
    )


def _read_sampling(body: Mapping[str, Any], default_max_tokens: int) -> Sampling:
    return read_sampling(
        body,
        max_new_tokens=read_integer(body, "max_output_tokens", default_max_tokens, low=1, high=MAX_TOKENS),
        stop=read_stop(body),
        top_logprobs=read_integer(body, "top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS),
    )


def _read_instructions(body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    value = body.get("instructions")
    if not isinstance(value, str | None):
        raise wrong("instructions", "a text", value)
    return (ChatMessage(role="system", content=value),) if value else ()


def _read_previous(body: Mapping[str, Any]) -> InteractionId | None:
    previous = read_text(body, "previous_response_id")
    if previous is None:
        return None
    if not previous.startswith(ID_PREFIX):
        raise PreviousNotFound(previous)  # an id without the prefix cannot be a response's
    return InteractionId(previous)


def _read_format(body: Mapping[str, Any]) -> Grammar | None:
    text, reasoning = read_mapping(body, "text"), read_mapping(body, "reasoning")
    if text.get("verbosity") not in (None, "medium"):
        raise UnsupportedParameter(
            f"text.verbosity cannot be {shown(text['verbosity'])}: ask for it in the prompt.", param="text.verbosity"
        )
    if reasoning.get("effort") is not None:
        raise UnsupportedParameter(
            "reasoning.effort is not supported: models differ in how they think; "
            "pass chat_template_kwargs for a template that has a switch.",
            param="reasoning.effort",
        )
    return parse_response_format(text.get("format"), param="text.format")


def _includes_logprobs(body: Mapping[str, Any]) -> bool:
    value = body.get("include")
    if not isinstance(value, list | None):
        raise wrong("include", "a list", value)
    return _LOGPROBS in (value or ())


# ------------------------------------------------------------------------------------------- echoed parameters


def _echo(body: Mapping[str, Any], request: CompletionRequest, selection: Selection) -> Mapping[str, Any]:
    """Return the parameters that the answer repeats, in the SDK's own types."""
    sampling = request.sampling
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens") and sampling.max_new_tokens,
        "max_tool_calls": None,
        "metadata": dict(request.metadata),
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous,
        "reasoning": {"effort": None, "summary": _read_summary(body)},
        "service_tier": "default",
        "store": request.store,
        "temperature": sampling.temperature,
        "text": {"format": _echo_format(body, request.response_format), "verbosity": "medium"},
        "tool_choice": _echo_choice(body.get("tool_choice"), selection),
        "tools": [_echo_tool(raw) for raw in body.get("tools") or ()],
        "top_logprobs": sampling.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _read_summary(body: Mapping[str, Any]) -> str | None:
    summary = read_mapping(body, "reasoning").get("summary")
    return summary if summary in _SUMMARIES else None


def _echo_format(body: Mapping[str, Any], form: Grammar | None) -> Mapping[str, Any]:
    asked = read_mapping(read_mapping(body, "text"), "format")
    if asked.get("type") != "json_schema" or not isinstance(form, JsonText):
        return {"type": asked.get("type", "text")}
    named = asked.get("json_schema", asked).get("name")
    return {
        "type": "json_schema",
        "name": named if isinstance(named, str) else "answer",
        "schema": form.schema,
        "strict": form.is_strict,
    }


def _echo_choice(asked: Any, selection: Selection) -> Any:
    if isinstance(asked, dict) and asked.get("type") == "allowed_tools":
        tools = [{"type": "function", "name": tool.name} for tool in selection.tools]
        return {"type": "allowed_tools", "mode": str(selection.choice), "tools": tools}
    if isinstance(selection.choice, ToolChoice):
        return str(selection.choice)
    return {"type": "function", "name": selection.choice}


def _echo_tool(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    strict = raw.get("strict")
    return {
        "type": "function",
        "name": raw["name"],
        "description": raw.get("description"),
        "parameters": raw.get("parameters"),
        "strict": strict if isinstance(strict, bool) else None,
    }
