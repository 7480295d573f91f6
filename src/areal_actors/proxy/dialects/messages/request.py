"""The body of an Anthropic Messages request: its fields, messages and tools, parsed into a ``CompletionRequest``. Pure.

One Anthropic turn may become several domain messages: tool results are blocks next to text in a user turn there, and
separate messages here, in the same order. Accepts the harmless differences between clients: a string or text blocks,
``cache_control`` anywhere, additional keys. Content that would otherwise be dropped silently (an image, a document, a
tool that Anthropic's servers run) is rejected by name.

Text blocks of an answer are joined without a separator, because the model wrote them as one text; text blocks that a
client composed are joined by newlines, as the parts of a chat message are.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from typing import Any

from areal_actors.domain import UNPARSED_ARGUMENTS, ChatMessage, Tool, ToolCall
from areal_actors.errors import InvalidRequest, PreviousNotFound, UnsupportedParameter
from areal_actors.lib.exact_json import dump_json, load_json
from areal_actors.lib.json_prefix import JsonPrefix
from areal_actors.proxy.dialects.base import Dialect, Parsed, split_begun, thinking_options
from areal_actors.proxy.dialects.client_tools import ANTHROPIC_TOOLS, find_typed_tool, refuse_tool
from areal_actors.proxy.dialects.fields import (
    ALL_ROUTES,
    CONVERSATIONS,
    EFFORT,
    FLAG,
    MAX_TOKENS,
    OBJECT,
    OBJECTS,
    REASONING,
    REASONING_EFFORT,
    STOP_SEQUENCES,
    TEXT,
    FieldTable,
    JsonObject,
    Kind,
    honoured,
    inert,
    integer,
    objects_of,
    read,
    refused,
    required_text,
    shown,
    turns_of,
    wrong,
)
from areal_actors.proxy.dialects.structured import (
    TOOL_CHOICE,
    parse_response_format,
    parse_tool,
    parse_tool_choice,
    require_distinct,
)

ID_PREFIX = "msg_"
_BILLING = "x-anthropic-billing-header:"
"""Start of a line that Claude Code adds for Anthropic's billing.

It changes with each request and is not meant for the model.
"""


def format_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as the object that clients expect. ``parse_anthropic_conversation`` reads it back.

    It is the object that a stream adds up to. Text that is not the beginning of an object is under
    ``UNPARSED_ARGUMENTS``; so is an object that breaks off, next to the members that arrived.
    """
    prefix = JsonPrefix()
    # White space at the end may be within a string that breaks off.
    certain = prefix.feed(arguments.lstrip() or "{}")
    if not certain or (prefix.is_complete and prefix.pending.strip()):
        return {UNPARSED_ARGUMENTS: arguments}
    whole = certain if prefix.is_complete else certain + prefix.complete(UNPARSED_ARGUMENTS, arguments)
    value: dict[str, Any] = load_json(whole.encode())
    return value


def sign_thought(thought: str) -> str:
    """Return the ``signature`` of a thinking block: a digest of its text, so that an echo can be checked by eye."""
    # Nothing relies on the signature, because some clients encode it anew; altered thinking is detected by its text.
    return blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------------------------- messages


def parse_anthropic_conversation(system: Any, messages: Any) -> tuple[ChatMessage, ...]:
    """Parse a conversation that may end with an answer, with the system messages first.

    Raises:
        InvalidRequest: a message is malformed; the error names its index and the problem.
        UnsupportedParameter: a block that is not text, thinking, a tool call or a tool result.
    """
    turns = _parse_turns(messages, "messages")
    return (*_parse_instructions(system, "system"), *turns)


def _parse_turns(value: Any, where: str) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise wrong(where, "a list of at least one message", value)
    turns = (_parse_turn(raw, f"{where}[{index}]") for index, raw in enumerate(value))
    return tuple(chain.from_iterable(turns))


def _parse_instructions(value: Any, where: str) -> tuple[ChatMessage, ...]:
    return tuple(_parse_system(value, where)) if value else ()


def _parse_system(value: Any, where: str) -> Iterator[ChatMessage]:
    texts = [value] if isinstance(value, str) else [_text_of(block, at) for block, at in _blocks(value, where)]
    texts = [text for text in texts if not text.startswith(_BILLING)]
    if texts:
        yield ChatMessage(role="system", content="\n".join(texts))


def _parse_turn(raw: Any, where: str) -> Iterator[ChatMessage]:
    if not isinstance(raw, dict):
        raise wrong(where, "an object", raw)
    role, content = raw.get("role"), raw.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", "user, assistant or system", role)
    where = f"{where}.content"
    if role == "assistant":
        yield _parse_answer(content, where)
    elif role == "system":
        yield from _parse_system(content, where)
    elif isinstance(content, str):
        yield ChatMessage(role="user", content=content)
    else:
        # Tool results are separate messages, with the text before, between and after them in its place.
        texts: list[str] = []
        is_empty = True
        for block, at in _blocks(content, where):
            is_empty = False
            if block.get("type") != "tool_result":
                texts.append(_text_of(block, at))
                continue
            if texts:
                yield ChatMessage(role="user", content="\n".join(texts))
                texts = []
            yield _parse_result(block, at)
        if texts or is_empty:
            yield ChatMessage(role="user", content="\n".join(texts))


def _parse_result(block: JsonObject, where: str) -> ChatMessage:
    call_id, content = required_text(block, "tool_use_id", where), block.get("content")
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise wrong(f"{where}.is_error", "true or false", is_error)
    if not isinstance(content, str):
        blocks = _blocks(content or [], f"{where}.content")
        content = "\n".join(_text_of(part, at) for part, at in blocks)
    if is_error and "error" not in content.lower():
        # ``is_error`` must be said in the text, because the model reads nothing else.
        content = f"Error: {content}"
    return ChatMessage(role="tool", content=content, tool_call_id=call_id)


def _parse_answer(content: Any, where: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, at in _blocks(content, where):
        match block.get("type"):
            case "tool_use":
                call_id, name = block.get("id"), required_text(block, "name", at)
                text = _read_input(block.get("input"), f"{at}.input")
                calls.append(ToolCall(id=call_id if isinstance(call_id, str) else "", name=name, arguments=text))
            case "thinking":
                thoughts.append(_string(block, "thinking", at))
            case "redacted_thinking":
                # It is encrypted: only Anthropic can read it.
                pass
            case _:
                texts.append(_text_of(block, at))
    return ChatMessage(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        tool_calls=tuple(calls),
        reasoning="".join(thoughts) or None,
    )


def _read_input(value: Any, where: str) -> str:
    """Return the arguments of a call as text."""
    # Clients that join the deltas of a call that was cut send its text, and none at all as null.
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, dict):
        raise wrong(where, "an object", value)
    # The text of a call that is not a JSON object comes back as it was sampled; see ``format_input``.
    unparsed = value.get(UNPARSED_ARGUMENTS)
    return unparsed if isinstance(unparsed, str) else dump_json(value).decode()


def _blocks(value: Any, where: str) -> Iterator[tuple[JsonObject, str]]:
    """Yield the blocks of a content list, each with its path for error messages."""
    if not isinstance(value, list):
        raise wrong(where, "a string or a list of blocks", value)
    for index, block in enumerate(value):
        at = f"{where}[{index}]"
        if not isinstance(block, dict):
            raise wrong(at, "an object with a type", block)
        yield block, at


def _text_of(block: JsonObject, where: str) -> str:
    kind = block.get("type")
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", "the type of a block", kind)
    if kind != "text":
        raise UnsupportedParameter(f"{where} is of type {shown(kind)}; this model reads text only.", param=where)
    return _string(block, "text", where)


def _string(block: JsonObject, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "a string", value)
    return value


# ---------------------------------------------------------------------------------------------------------- tools


def parse_anthropic_tools(value: Any, param: str = "tools") -> tuple[Tool, ...]:
    """Parse the offered functions.

    Raises:
        InvalidRequest: a tool is malformed; the error names its index and the problem.
        UnsupportedParameter: a tool that Anthropic's servers run, or of an unknown type.
    """
    tools: list[Tool] = []
    for raw, where in objects_of([] if value is None else value, param):
        typed = find_typed_tool(ANTHROPIC_TOOLS, raw)
        if typed is not None:
            tools.append(typed.create_function(raw, where))
        elif raw.get("type") not in (None, "custom"):
            raise refuse_tool(raw, where, "custom tools, bash, text_editor and memory")
        else:
            tools.append(parse_tool(raw, where, schema="input_schema", needs_schema=True))
    return require_distinct(tools)


# ------------------------------------------------------------------------------------------------------- fields

_UNEDITED = "the history is read as it is sent"


def _parse_thread(value: Any, name: str) -> None:
    """Ignore that a thread begins. Raises ``PreviousNotFound`` if it continues: clients then send the history."""
    thread = OBJECT.read(value, name)
    match thread.get("type"):
        case "create":
            return
        case "continue":
            previous = TEXT.read(thread.get("previous_message_id"), f"{name}.previous_message_id")
            raise PreviousNotFound(previous)
        case kind:
            raise wrong(f"{name}.type", "create or continue", kind)


_INSTRUCTIONS = Kind({"type": ["string", "array", "null"], "items": {"type": "object"}}, _parse_instructions)
MESSAGES_FIELDS = FieldTable(
    "messages",
    (
        honoured(
            "messages",
            Kind(turns_of("system", "user", "assistant"), _parse_turns, is_raw=True),
            "text, tool_use, tool_result and thinking blocks, and role system anywhere; images and documents "
            "as unsupported_blocks says",
            is_required=True,
        ),
        honoured(
            "system",
            _INSTRUCTIONS,
            "a string or text blocks, joined by newlines; Claude Code's billing line is left out",
            default=(),
        ),
        honoured("max_tokens", integer(1, MAX_TOKENS), "512 without it; bounded by the context length"),
        *ALL_ROUTES,
        *CONVERSATIONS,
        STOP_SEQUENCES,
        honoured(
            "tools",
            Kind(OBJECTS, parse_anthropic_tools),
            "custom tools, and bash, text_editor and memory of any date; those of Anthropic's servers are left out "
            "beside these; defer_loading is ignored",
            default=(),
        ),
        honoured(
            "tool_choice",
            TOOL_CHOICE,
            "auto, none, any and tool; disable_parallel_tool_use: only the first call counts",
        ),
        REASONING_EFFORT,
        REASONING,
        honoured(
            "output_config",
            OBJECT,
            "format of type json_schema; effort as reasoning_effort of chat completions",
            default={},
        ),
        honoured(
            "output_format", Kind(OBJECT.schema, lambda value, _: value), "the older name of output_config.format"
        ),
        inert("cache_control", "prefixes are cached without it; here, and in every block"),
        inert("context_management", _UNEDITED),
        inert("service_tier", "there is one"),
        inert("speed", "there is one"),
        inert("inference_geo", "the engine is where it is"),
        inert("diagnostics", "nothing is diagnosed"),
        inert("betas", "what they switch on is judged by its own fields"),
        inert("billing_policy", "nothing is billed"),
        inert("user_profile_id", "sessions identify who asks"),
        inert("workspace_id", "sessions identify who asks"),
        inert("fallbacks", "the session's policy answers"),
        inert("fallback_credit_token", "the session's policy answers"),
        refused("container", "no code is run here"),
        refused("mcp_servers", "no server is called from here; offer their tools in tools"),
        refused("compaction", _UNEDITED),
        honoured(
            "thread",
            Kind({"type": ["object", "null"], "properties": {"type": {"enum": ["create", "continue"]}}}, _parse_thread),
            "create is ignored; continue is refused as thread_not_found, and SDKs then send the history",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ requests


def parse_anthropic_request(dialect: Dialect, body: JsonObject, *, tag: str | None = None) -> Parsed:
    """Parse the body of a request; see ``Dialect.parse``.

    ``max_tokens`` may be missing although Anthropic requires it, because requests to count tokens are parsed here as
    well.
    """
    values = MESSAGES_FIELDS.read(body, inert=dialect.inert)
    choice = values["tool_choice"]
    selection = parse_tool_choice(choice, values["tools"])
    is_single = isinstance(choice, dict) and read(choice, "disable_parallel_tool_use", FLAG, default=False)
    newer, older = values["output_config"].get("format"), values["output_format"]
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            "output_config.format and output_format differ; they mean the same, so give one of them.",
            param="output_config",
        )
    effort = read(values["output_config"], "effort", EFFORT, {})
    messages, begun = split_begun((*values["system"], *values["messages"]))
    request = dialect.create_request(
        values,
        tag=tag,
        max_new_tokens=values["max_tokens"],
        messages=messages,
        begun=begun,
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=not is_single,
        response_format=parse_response_format(older if newer is None else newer, "output_config.format"),
        template_kwargs={**effort, **thinking_options(values)},
        id_prefix=ID_PREFIX,
    )
    return Parsed(request=request, model=values["model"], is_stream=values["stream"])
