"""The body of an OpenAI chat completion: its fields, messages and tools, parsed into a ``CompletionRequest``. Pure.

Accepts the harmless differences between clients: content as a string or as text parts, ``null`` or absent keys, tool
results without a call id, arguments as an object, additional keys. Content that would otherwise be dropped silently (an
image, a custom tool) is rejected by name. ``cache`` decides which conversations continue which.

The Responses API joins content parts and describes functions in nearly the same way, and uses the functions here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.domain import ChatMessage, Grammar, Tool, ToolCall
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.lib.exact_json import dump_json
from areal_actors.proxy.dialects.base import Dialect, Parsed, split_begun, thinking_options
from areal_actors.proxy.dialects.client_tools import (
    CallForm,
    Offer,
    format_freeform,
    parse_custom_tool,
    refuse_tool,
)
from areal_actors.proxy.dialects.fields import (
    ALL_ROUTES,
    CONVERSATIONS,
    FLAG,
    MAX_TOKENS,
    OBJECTS,
    OPENAI,
    OPENAI_CHUNKS,
    OPENAI_CONVERSATIONS,
    REASONING,
    REASONING_EFFORT,
    FieldTable,
    JsonObject,
    Kind,
    flag_in,
    honoured,
    inert,
    integer,
    objects_of,
    refused,
    required_text,
    shown,
    turns_of,
    unread,
    wrong,
)
from areal_actors.proxy.dialects.structured import (
    EXTENSIONS,
    RESPONSE_FORMAT,
    TOOL_CHOICE,
    parse_tool,
    parse_tool_choice,
    require_distinct,
)

# ----------------------------------------------------------------------------------------------------- messages

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


def parse_messages(value: Any, param: str = "messages") -> tuple[ChatMessage, ...]:
    """Parse the conversation of a request.

    Raises:
        InvalidRequest: a message is malformed; the error names its index and the problem.
        UnsupportedParameter: a content part that is not text, or a call that is not a function call.
    """
    if not isinstance(value, list) or not value:
        raise wrong(param, "a list of at least one message", value)
    return tuple(_parse_message(raw, f"{param}[{index}]") for index, raw in enumerate(value))


def _parse_message(raw: Any, where: str) -> ChatMessage:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    role = raw.get("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", "system, developer, user, assistant or tool", role)
    for name in ("name", "tool_call_id"):
        if not isinstance(raw.get(name), str | None):
            raise wrong(f"{where}.{name}", "a string", raw[name])
    content = raw.get("content")
    if content is not None and not isinstance(content, str):
        content = join_parts(content, f"{where}.content", _TEXT_PARTS)
    if role == "assistant":
        return _parse_answer(raw, content, where)
    if content is None and role != "tool":
        raise wrong(f"{where}.content", "text", None)
    call_id = raw.get("tool_call_id") if role == "tool" else None
    return ChatMessage(role=role, content=content or "", tool_call_id=call_id or None, name=raw.get("name") or None)


def _parse_answer(raw: JsonObject, content: str | None, where: str) -> ChatMessage:
    if raw.get("function_call") is not None:
        raise UnsupportedParameter(f"{where}.function_call is deprecated; send tool_calls.", param=where)
    calls = raw.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", "a list", calls)
    # Servers, and the clients that echo their answers, disagree on the name of this field.
    reasoning = raw.get("reasoning_content")
    if reasoning is None:
        reasoning = raw.get("reasoning")
    return ChatMessage(
        role="assistant",
        content=content,
        tool_calls=tuple(_parse_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or ())),
        name=raw.get("name") or None,
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _parse_call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    call_id = raw.get("id") if isinstance(raw, dict) else None
    call_id = call_id if isinstance(call_id, str) else ""
    if isinstance(function, dict):
        return parse_call(function, f"{where}.function", call_id)
    if isinstance(raw, dict) and raw.get("type") == "custom":
        return parse_freeform_call(raw.get("custom"), f"{where}.custom", call_id)
    if isinstance(raw, dict) and raw.get("type") not in (None, "function"):
        raise UnsupportedParameter(
            f"{where} is of type {shown(raw['type'])}; only functions and custom tools are known.", param=where
        )
    raise wrong(where, "an object with a function", raw)


def parse_freeform_call(raw: Any, where: str, call_id: str) -> ToolCall:
    """Return the call of a freeform tool, whose ``input`` is a text. Raises ``InvalidRequest``."""
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    name, text = required_text(raw, "name", where), raw.get("input")
    if not isinstance(text, str):
        raise wrong(f"{where}.input", "a text", text)
    return ToolCall(id=call_id, name=name, arguments=format_freeform(text))


def parse_call(function: JsonObject, where: str, call_id: str) -> ToolCall:
    """Return the call of the function that ``function`` names; ``arguments`` are a JSON text or an object.

    Raises:
        InvalidRequest: an invalid value; the error names it.
    """
    name, arguments = required_text(function, "name", where), function.get("arguments")
    if isinstance(arguments, dict):
        arguments = dump_json(arguments).decode()
    if not isinstance(arguments, str | None):
        raise wrong(f"{where}.arguments", "a JSON text", arguments)
    return ToolCall(id=call_id, name=name, arguments=arguments or "")


def join_parts(parts: Any, where: str, kinds: Mapping[str, str]) -> str:
    """Return the text of a content list, with one part per line. ``kinds`` maps part types to the keys of their text.

    Raises:
        InvalidRequest: a part is malformed; the error names its index and the problem.
        UnsupportedParameter: a part that is not text.
    """
    if not isinstance(parts, list):
        raise wrong(where, "a string or a list of text parts", parts)
    texts: list[str] = []
    for index, part in enumerate(parts):
        text, at = part, f"{where}[{index}]"
        if not isinstance(part, str):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str):
                raise wrong(at, "a text part", part)
            if kind not in kinds:
                raise UnsupportedParameter(f"{at} is of type {shown(kind)}; this model reads text only.", param=at)
            text = part.get(kinds[kind])
            if not isinstance(text, str):
                raise wrong(f"{at}.{kind}", "a string", text)
        texts.append(text)
    return "\n".join(texts)


def parse_tools(value: Any, param: str = "tools") -> Offer:
    """Parse the offered functions and freeform tools.

    Raises:
        InvalidRequest: a tool is malformed; the error names its index and the problem.
        UnsupportedParameter: a tool of another type.
    """
    forms: dict[str, CallForm] = {}
    tools: list[Tool] = []
    for raw, at in objects_of([] if value is None else value, param):
        kind = "function" if raw.get("type") is None else raw["type"]
        if kind not in ("function", "custom"):
            raise refuse_tool(raw, at, "functions and custom tools")
        described, where = raw.get(kind), f"{at}.{kind}"
        if not isinstance(described, dict):
            raise wrong(where, "an object", described)
        if kind == "function":
            tools.append(parse_tool(described, where, schema="parameters"))
        else:
            tools.append(parse_custom_tool(described, where))
            forms[tools[-1].name] = CallForm(name=tools[-1].name, is_freeform=True)
    return Offer(tools=require_distinct(tools), forms=forms)


# ------------------------------------------------------------------------------------------------------- fields

_NO_EBNF = "use response_format, guided_json, guided_regex or guided_choice"
CHAT_FIELDS = FieldTable(
    "chat completions",
    (
        honoured(
            "messages",
            unread(turns_of(*_ROLES), is_raw=True),
            "content parts of type text are joined by newlines; images, audio and files as unsupported_blocks says",
            is_required=True,
        ),
        honoured("max_tokens", integer(1, MAX_TOKENS), "512 without it; bounded by the context length"),
        honoured(
            "max_completion_tokens",
            integer(1, MAX_TOKENS),
            "the newer name of max_tokens; both may be given if they agree",
        ),
        *ALL_ROUTES,
        *CONVERSATIONS,
        *OPENAI,
        *OPENAI_CONVERSATIONS,
        *OPENAI_CHUNKS,
        honoured(
            "logprobs",
            FLAG,
            "of the tokens that were sampled, end-of-turn token included; in a stream, of the tokens of each chunk",
            default=False,
        ),
        honoured("top_logprobs", integer(0, 20), "0 to 20, with logprobs", default=0),
        honoured(
            "tools",
            Kind(OBJECTS, parse_tools),
            "functions, and custom tools, whose format is described to the model; with strict, a call that tool_choice "
            "demands satisfies all of the schema or is refused",
            default=Offer(),
        ),
        honoured(
            "tool_choice",
            TOOL_CHOICE,
            "auto, none, required, a function, allowed_tools; what is demanded is enforced",
        ),
        honoured(
            "parallel_tool_calls",
            FLAG,
            "false: only the first call of an answer counts, and a call that is demanded is the only one",
            default=True,
        ),
        honoured(
            "response_format",
            RESPONSE_FORMAT,
            "text, json_object and json_schema, enforced; with tools, the answer is a call or matches",
        ),
        *EXTENSIONS,
        REASONING_EFFORT,
        REASONING,
        honoured(
            "usage", flag_in("include"), "OpenRouter's name: include as include_usage of stream_options", default=False
        ),
        inert("prediction", "would save time only"),
        inert("verbosity", "a hint that no chat template takes; ask for it in the prompt"),
        refused("audio", "this model writes text only"),
        refused("modalities", "this model writes text only", ["text"]),
        refused("function_call", "deprecated; use tool_choice", "auto", "none"),
        refused("functions", "deprecated; use tools"),
        refused("web_search_options", "the model sees the messages only"),
        refused("include_reasoning", "thinking was sampled, and is always sent", True),
        refused("separate_reasoning", "thinking has a field of its own", True),
        refused("stream_reasoning", "thinking is streamed as it is sampled", True),
        refused("bad_words", "use logit_bias"),
        honoured(
            "continue_final_message",
            FLAG,
            "true: the model continues the last message, an answer without calls; otherwise that is a finished turn",
            default=False,
        ),
        honoured("add_generation_prompt", FLAG, "the opposite of continue_final_message, if given", default=None),
        refused("chat_template", "the model's own template is what it is trained with"),
        refused("documents", "put them into the messages"),
        refused("guided_grammar", _NO_EBNF),
        refused("ebnf", _NO_EBNF),
    ),
)


# ------------------------------------------------------------------------------------------------------ requests


def parse_chat_request(dialect: Dialect, body: JsonObject, *, tag: str | None = None) -> Parsed:
    """Parse the body of a request; see ``Dialect.parse``."""
    values = CHAT_FIELDS.read(body, inert=dialect.inert)
    has_logprobs, top_logprobs = values["logprobs"], values["top_logprobs"]
    if top_logprobs and not has_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    old, new = values["max_tokens"], values["max_completion_tokens"]
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, so give one of them.",
            param="max_completion_tokens",
        )
    offer: Offer = values["tools"]
    messages, begun = _split_messages(values)
    response_format = _select_format(values)
    selection = parse_tool_choice(values["tool_choice"], offer.tools)
    request = dialect.create_request(
        values,
        tag=tag,
        max_new_tokens=new or old,
        has_logprobs=has_logprobs,
        top_logprobs=top_logprobs,
        messages=messages,
        begun=begun,
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=values["parallel_tool_calls"],
        response_format=response_format,
        num_choices=values["n"],
        template_kwargs=thinking_options(values),
    )
    return Parsed(
        request=request,
        forms=offer.forms,
        model=values["model"],
        is_stream=values["stream"],
        include_usage=values["stream_options"] or values["usage"],
        has_logprobs=has_logprobs,
    )


def _split_messages(values: JsonObject) -> tuple[tuple[ChatMessage, ...], ChatMessage | None]:
    """Return the messages to be answered, and the beginning of the answer if the last one is to be continued."""
    messages, is_continued = parse_messages(values["messages"]), values["continue_final_message"]
    if values["add_generation_prompt"] is not None and values["add_generation_prompt"] == is_continued:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are opposites; give one of them.",
            param="add_generation_prompt",
        )
    if not is_continued:
        return messages, None
    messages, begun = split_begun(messages)
    if begun is None:
        raise InvalidRequest(
            "continue_final_message needs an answer with text as the last message.", param="continue_final_message"
        )
    return messages, begun


def _select_format(values: JsonObject) -> Grammar | None:
    """Return the required output format, from OpenAI's ``response_format`` or from other servers' fields."""
    form = values["response_format"]
    extensions = {each.name: values[each.name] for each in EXTENSIONS if values[each.name] is not None}
    if len(extensions) > 1:
        names = " and ".join(extensions)
        raise InvalidRequest(f"{names} both say what the answer must match; give one of them.")
    extension = next(iter(extensions.values()), None)
    if form is not None and extension is not None:
        raise InvalidRequest(
            "response_format and another field both say what the answer must match; give one of them.",
            param="response_format",
        )
    return form or extension
