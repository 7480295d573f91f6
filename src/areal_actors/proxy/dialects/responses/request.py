"""The body of an OpenAI Responses request: its fields and input items, parsed into a ``CompletionRequest``. Pure.

One answer is several items there (reasoning, a message, calls) and one message here. The items of one answer are
adjacent, and their ids, if a client repeats them, name the answer that they come from; ``format_item_id`` writes those
ids. Accepts the harmless differences between clients: items without type, id or status, and reasoning whose content was
emptied. Summaries of reasoning are ignored: a model is trained on the reasoning that it sampled itself.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from attrs import define, evolve, field

from areal_actors.domain import (
    ChatMessage,
    CompletionRequest,
    InteractionId,
    JsonText,
    Tool,
    ToolCall,
    ToolChoice,
)
from areal_actors.errors import InvalidRequest, PreviousNotFound, UnsupportedParameter
from areal_actors.proxy.dialects.base import Dialect, Parsed, thinking_options
from areal_actors.proxy.dialects.chat.request import join_parts, parse_call, parse_freeform_call
from areal_actors.proxy.dialects.client_tools import (
    CALL_ITEMS,
    OPENAI_TOOLS,
    CallForm,
    Offer,
    find_typed_tool,
    is_offer,
    parse_custom_tool,
    refuse_tool,
    with_additional_tools,
)
from areal_actors.proxy.dialects.fields import (
    ALL_ROUTES,
    CONVERSATIONS,
    EFFORT,
    FLAG,
    MAX_TOKENS,
    OBJECT,
    OBJECTS,
    OPENAI,
    OPENAI_CONVERSATIONS,
    TEXT,
    FieldTable,
    JsonObject,
    Kind,
    honoured,
    inert,
    integer,
    objects_of,
    optional_text,
    read,
    read_instance,
    refused,
    required_text,
    shown,
    without_nulls,
    wrong,
)
from areal_actors.proxy.dialects.structured import (
    TOOL_CHOICE,
    ToolSelection,
    parse_response_format,
    parse_tool,
    parse_tool_choice,
    require_distinct,
)

_LOGPROBS = "message.output_text.logprobs"
_SUMMARIES = ("auto", "concise", "detailed")
RESPONSE_PREFIX = "resp_"
_CALLS = frozenset({"function_call", "custom_tool_call", *CALL_ITEMS})
"""The types of items that are calls of tools."""
_RESULTS = frozenset(f"{kind}_output" for kind in _CALLS)
_ROLES = frozenset({"system", "developer", "user"})
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ITEM_ID = re.compile(r"(?:msg|fc|rs)_\d+_(.+)", re.ASCII)


def format_item_id(kind: str, index: int, interaction: InteractionId) -> str:
    """Return the id of the ``index``-th item of its kind (``msg``, ``fc``, ``rs``) in an answer."""
    return f"{kind}_{index}_{interaction.removeprefix(RESPONSE_PREFIX)}"


def parse_input(value: Any, param: str = "input") -> tuple[ChatMessage, ...]:
    """Parse the messages of a request: a text, or a list of items.

    Raises:
        InvalidRequest: an item is malformed; the error names its index and the problem.
        UnsupportedParameter: an item or a content part that is neither text nor a function.
    """
    if isinstance(value, str):
        return (ChatMessage(role="user", content=value),)
    if not isinstance(value, list) or not value:
        raise wrong(param, "a text or a list of at least one item", value)
    conversation = _Conversation()
    for index, raw in enumerate(value):
        # The tools that an item offers are among those of the request; see ``with_additional_tools``.
        if not is_offer(raw):
            _read_item(conversation, raw, f"{param}[{index}]")
    conversation.close_turn()
    return tuple(conversation.messages)


# --------------------------------------------------------------------------------------- putting items together


@define
class _Turn:
    """The items of one answer so far. ``origin`` is the answer that their ids name, or ``None``."""

    origin: str | None
    texts: list[str] = field(factory=list)
    thoughts: list[str] = field(factory=list)
    calls: list[ToolCall] = field(factory=list)

    def takes(self, kind: str, origin: str | None) -> bool:
        """Return whether the next item belongs to this answer."""
        if origin is not None and self.origin is not None:
            return origin == self.origin
        # Without ids, an item that follows a text and is not a call belongs to the next answer.
        return kind == "function_call" or not self.texts or bool(self.calls)

    def message(self) -> ChatMessage:
        """Return the whole answer as one message."""
        return ChatMessage(
            role="assistant",
            content="".join(self.texts) if self.texts else None,
            tool_calls=tuple(self.calls),
            reasoning="".join(self.thoughts) or None,
        )


@define
class _Conversation:
    """The messages so far, and the answer whose items are still being read."""

    messages: list[ChatMessage] = field(factory=list)
    turn: _Turn | None = None

    def add(self, message: ChatMessage) -> None:
        """Append a message that is not part of an answer."""
        self.close_turn()
        self.messages.append(message)

    def open_turn(self, kind: str, raw: JsonObject) -> _Turn:
        """Return the answer that an item belongs to; start a new one if necessary."""
        found = ITEM_ID.fullmatch(raw["id"]) if isinstance(raw.get("id"), str) else None
        origin = found[1] if found else None
        if self.turn is None or not self.turn.takes(kind, origin):
            self.close_turn()
            self.turn = _Turn(origin)
        self.turn.origin = self.turn.origin or origin
        return self.turn

    def close_turn(self) -> None:
        """Append the open answer, if there is one."""
        if self.turn is not None:
            self.messages.append(self.turn.message())
            self.turn = None


# ------------------------------------------------------------------------------------------------- single items


def _read_item(conversation: _Conversation, raw: Any, where: str) -> None:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    # The type of messages and of references may be missing.
    kind = "item_reference" if is_reference(raw) else raw.get("type")
    match "message" if kind is None else kind:
        case "message" if raw.get("role") == "assistant":
            conversation.open_turn("message", raw).texts.append(_read_content(raw.get("content"), f"{where}.content"))
        case "message":
            role = raw.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise wrong(f"{where}.role", "system, developer, user or assistant", role)
            content = _read_content(raw.get("content"), f"{where}.content")
            conversation.add(ChatMessage(role=role, content=content))
        case "reasoning":
            conversation.open_turn("reasoning", raw).thoughts.append(
                join_parts(raw.get("content") or [], f"{where}.content", {"reasoning_text": "text", "text": "text"})
            )
        case str() if kind in _CALLS:
            conversation.open_turn("function_call", raw).calls.append(_read_call(raw, where))
        case str() if kind in _RESULTS:
            conversation.add(_read_result(raw, where))
        case "item_reference":
            # References to items of the session were replaced before (``stored``).
            raise InvalidRequest(
                f"{where} refers to item {shown(raw.get('id'))}, which no answer of this session has; send the item.",
                param=where,
            )
        case _ if not isinstance(kind, str):
            raise wrong(f"{where}.type", "a string", kind)
        case _:
            raise UnsupportedParameter(
                f"{where} is of type {shown(kind)}; only messages, functions and reasoning are known.", param=where
            )


def is_reference(raw: Any) -> bool:
    """Return whether an item of the input refers to another one by its id. Its type may be missing."""
    return isinstance(raw, dict) and (
        raw.get("type") == "item_reference" or (raw.get("type") is None and "id" in raw and "role" not in raw)
    )


def _read_content(value: Any, where: str) -> str:
    return value if isinstance(value, str) else join_parts(value, where, _PARTS)


def _read_result(raw: JsonObject, where: str) -> ChatMessage:
    # A result of local_shell names its call by ``id`` in the SDK's types.
    named = "id" if raw.get("call_id") is None and raw["type"] == "local_shell_call_output" else "call_id"
    call_id = optional_text(raw, named, where)
    return ChatMessage(role="tool", content=_read_output(raw, f"{where}.output"), tool_call_id=call_id)


def _read_output(raw: JsonObject, where: str) -> str:
    output = raw.get("output")
    match raw["type"]:
        case "shell_call_output" if isinstance(output, list):
            return "\n".join(_read_shell_output(each, f"{where}[{index}]") for index, each in enumerate(output))
        case "apply_patch_call_output":
            status = optional_text(raw, "status", where) or "completed"
            text = "" if output is None else _read_content(output, where)
            # The model reads nothing but the text.
            return text if text and status == "completed" else f"{status}\n{text}".strip()
        case _:
            return _read_content(output, where)


def _read_shell_output(raw: Any, where: str) -> str:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    texts = [optional_text(raw, name, where) or "" for name in ("stdout", "stderr")]
    outcome = OBJECT.read(raw.get("outcome") or {}, f"{where}.outcome")
    if outcome.get("type") == "timeout":
        texts.append("timeout")
    elif outcome.get("exit_code"):
        texts.append(f"exit code {outcome['exit_code']}")
    return "\n".join(text.removesuffix("\n") for text in texts if text)


def _read_call(raw: JsonObject, where: str) -> ToolCall:
    call_id, namespace = required_text(raw, "call_id", where), raw.get("namespace")
    if (typed := CALL_ITEMS.get(raw["type"])) is not None:
        return typed.read_call(raw, call_id, where)
    parse = parse_freeform_call if raw["type"] == "custom_tool_call" else parse_call
    call = parse(raw, where, call_id)
    return evolve(call, name=_join_name(namespace, call.name)) if isinstance(namespace, str) and namespace else call


# ------------------------------------------------------------------------------------------------------- fields


def _parse_instructions(value: Any, name: str) -> tuple[ChatMessage, ...]:
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return (ChatMessage(role="system", content=value),) if value else ()


def _parse_offer(value: Any, name: str) -> Offer:
    """Return the functions that are offered, those of namespaces under joined names."""
    forms: dict[str, CallForm] = {}
    tools: list[Tool] = []
    for each, place in objects_of(value, name):
        namespace, offered = None, [(each, place)]
        if each.get("type") == "namespace":
            namespace = required_text(each, "name", place)
            offered = objects_of(each.get("tools"), f"{place}.tools")
        for raw, where in offered:
            tool, form = _parse_tool(raw, where)
            if namespace is not None:
                form = evolve(form, namespace=namespace)
                tool = evolve(tool, name=_join_name(namespace, tool.name))
            if form != CallForm(name=tool.name):
                forms[tool.name] = form
            tools.append(tool)
    return Offer(tools=require_distinct(tools), forms=forms)


def _parse_tool(raw: dict[str, Any], where: str) -> tuple[Tool, CallForm]:
    kind = raw.get("type")
    typed = find_typed_tool(OPENAI_TOOLS, raw)
    if typed is not None:
        # Calls are items without a name, so that the model's name for the tool is the row's.
        tool = evolve(typed.create_function(raw, where), name=typed.name)
        return tool, CallForm(name=typed.name, typed=typed)
    if kind == "custom":
        tool = parse_custom_tool(raw, where)
        return tool, CallForm(name=tool.name, is_freeform=True)
    if kind not in (None, "function"):
        raise refuse_tool(raw, where, f"functions, custom tools, namespaces and {', '.join(OPENAI_TOOLS)}")
    tool = parse_tool(raw, where, schema="parameters")
    return tool, CallForm(name=tool.name)


def _join_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a function of a namespace, such as ``mcp__files__read``."""
    # Clients route a call by separate ``namespace`` and ``name``; a joined name is an unknown function for Codex.
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _parse_previous(value: Any, name: str) -> InteractionId:
    previous = TEXT.read(value, name)
    if not previous.startswith(RESPONSE_PREFIX):
        # An id without the prefix cannot be a response's.
        raise PreviousNotFound(previous)
    return InteractionId(previous)


RESPONSES_FIELDS = FieldTable(
    "responses",
    (
        honoured(
            "input",
            Kind({"type": ["string", "array"], "items": {"type": "object"}, "minItems": 1}, parse_input, is_raw=True),
            "a text, or items: messages, reasoning, calls of tools that can be offered, and their results; images and "
            "files as unsupported_blocks says; an item_reference names an item of an answer of the session",
            is_required=True,
        ),
        honoured(
            "instructions",
            Kind({"type": ["string", "null"]}, _parse_instructions),
            "a system message before all others, for this request alone",
            default=(),
        ),
        honoured(
            "previous_response_id",
            Kind({**TEXT.schema, "pattern": f"^{RESPONSE_PREFIX}"}, _parse_previous),
            "follows an answer of the same session: its history, without its instructions",
        ),
        honoured(
            "max_output_tokens",
            integer(1, MAX_TOKENS),
            "512 without it; bounded by the context length; thinking counts",
        ),
        *ALL_ROUTES,
        *CONVERSATIONS,
        *OPENAI,
        *OPENAI_CONVERSATIONS,
        honoured(
            "include",
            Kind({"type": ["array", "null"], "items": {"type": "string"}}, partial(read_instance, list, "a list")),
            "message.output_text.logprobs: those of all sampled tokens; in a stream, of the tokens up to each delta; "
            "whatever else is ignored",
            default=(),
        ),
        honoured("top_logprobs", integer(0, 20), "0 to 20; asks for logprobs, too", default=0),
        honoured(
            "tools",
            Kind(OBJECTS, _parse_offer),
            "functions and custom tools, also in namespaces, local_shell, shell and apply_patch; those of OpenAI's "
            "servers are left out beside these",
            default=Offer(),
        ),
        honoured("tool_choice", TOOL_CHOICE, "auto, none, required, a tool, or allowed_tools"),
        honoured("parallel_tool_calls", FLAG, "false: only the first call of an answer counts", default=True),
        honoured(
            "text",
            OBJECT,
            "format text, json_object or json_schema; verbosity is ignored: ask for it in the prompt",
            default={},
        ),
        honoured(
            "reasoning",
            OBJECT,
            "effort as reasoning_effort of chat completions; summary and context are ignored",
            default={},
        ),
        inert("stream_options", "nothing needs obfuscation here"),
        inert("truncation", "nothing is ever dropped: a conversation that is too long is refused"),
        inert("max_tool_calls", "counts calls of OpenAI's own tools"),
        inert("client_metadata", "identifies the client"),
        inert("access_programs", "every client of a session has access"),
        inert("image", "there are no images to compress"),
        refused("background", "an answer is waited for; hanging up cancels it", False),
        refused("conversation", "a session remembers its conversations; send previous_response_id"),
        refused("context_management", "nothing is compacted; send what the model shall read"),
        refused("prompt", "there are no stored prompts; send instructions and input"),
        refused("n", "an answer is one; ask again", 1),
        refused("max_tokens", "use max_output_tokens"),
        refused("messages", "use input"),
        refused("logprobs", "use include"),
        refused("response_format", "use text.format"),
        refused("reasoning_effort", "use reasoning"),
    ),
)


# ------------------------------------------------------------------------------------------------------ requests


def parse_response_request(dialect: Dialect, body: JsonObject, *, tag: str | None = None) -> Parsed:
    """Parse the body of a request; see ``Dialect.parse``."""
    body = with_additional_tools(body)
    values = RESPONSES_FIELDS.read(body, inert=dialect.inert)
    offer: Offer = values["tools"]
    selection = parse_tool_choice(values["tool_choice"], offer.tools)
    instructions, top_logprobs = values["instructions"], values["top_logprobs"]
    effort = read(values["reasoning"], "effort", EFFORT, {})
    has_logprobs = _LOGPROBS in values["include"] or top_logprobs > 0
    request = dialect.create_request(
        values,
        tag=tag,
        max_new_tokens=values["max_output_tokens"],
        has_logprobs=has_logprobs,
        top_logprobs=top_logprobs,
        messages=(*instructions, *values["input"]),
        has_instructions=bool(instructions),
        previous=values["previous_response_id"],
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=values["parallel_tool_calls"],
        response_format=parse_response_format(values["text"].get("format"), "text.format"),
        template_kwargs={**effort, **thinking_options({**values, "reasoning": None})},
        id_prefix=RESPONSE_PREFIX,
    )
    return Parsed(
        request=request,
        echo=_echo(body, values, request, selection),
        forms=offer.forms,
        model=values["model"],
        is_stream=values["stream"],
        has_logprobs=has_logprobs,
    )


_TEXTS_OF_CLIENTS = ("prompt_cache_key", "safety_identifier", "user")
"""Fields without an effect that an answer repeats."""
ECHO: JsonObject = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""What an answer repeats of a request that says nothing. Strict clients require every key in every answer."""


def _echo(body: JsonObject, values: JsonObject, request: CompletionRequest, selection: ToolSelection) -> JsonObject:
    """Return the parameters that the answer repeats, in the SDK's own types."""
    summary = values["reasoning"].get("summary")
    asked = read(values["text"], "format", OBJECT, {})
    form: dict[str, Any] = {"type": asked.get("type", "text")}
    if form["type"] == "json_schema" and isinstance(grammar := request.response_format, JsonText):
        name = asked.get("json_schema", asked).get("name")
        name = name if isinstance(name, str) else "answer"
        form |= {"name": name, "schema": grammar.schema, "strict": grammar.is_strict}
    of_client = {name: body.get(name) for name in _TEXTS_OF_CLIENTS}
    return {
        **ECHO,
        **{name: values[name] for name in ECHO if name in values and name not in _TEXTS_OF_CLIENTS},
        **{name: text for name, text in of_client.items() if isinstance(text, str)},
        "instructions": body.get("instructions"),
        "reasoning": {
            "effort": values["reasoning"].get("effort"),
            "summary": summary if summary in _SUMMARIES else None,
        },
        "store": request.store,
        "text": {"format": form, "verbosity": values["text"].get("verbosity") or "medium"},
        **_echo_tools(body, selection),
    }


def _echo_tools(body: JsonObject, selection: ToolSelection) -> JsonObject:
    """Return the tools as they were offered, with every key that the SDK's types have, and the choice among them."""
    choice, tools = without_nulls(body.get("tool_choice")), []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        choice = {"type": "allowed_tools", "mode": str(selection.choice), "tools": allowed["tools"]}
    elif isinstance(selection.choice, ToolChoice):
        choice = str(selection.choice)
    elif not (isinstance(choice, dict) and (choice.get("type") == "custom" or choice.get("type") in OPENAI_TOOLS)):
        choice = {"type": "function", "name": selection.choice}
    for raw in without_nulls(body.get("tools")) or ():
        kind, strict = raw.get("type"), raw.get("strict")
        if kind == "custom":
            tools.append({"format": {"type": "text"}, "description": None, **raw})
            continue
        function = {
            "type": "function",
            "name": raw.get("name"),
            "description": raw.get("description"),
            "parameters": raw.get("parameters"),
            "strict": strict if isinstance(strict, bool) else None,
        }
        tools.append(function if kind in (None, "function") else raw)
    return {"tool_choice": choice, "tools": tools}
