"""Reading the body of one of OpenAI's Responses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import ChatMessage, JsonText, ToolCall, ToolChoice
from areal_actors.errors import InvalidRequest, PreviousNotFound, RequestError, UnsupportedParameter
from areal_actors.proxy.dialects.base import Parsed
from areal_actors.proxy.dialects.client_tools import CallForm
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors.proxy.dialects.responses.request import (
    RESPONSES_FIELDS,
    parse_input,
)

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
USER = ChatMessage(role="user", content="hi")
CALL = ToolCall(id="call_1", name="add", arguments='{"a": 1}')
RAW_CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
RAW_TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
RAW_REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
_OF_THE_SDK_ALONE = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([p.name for p in RESPONSES_FIELDS.fields]) | st.text(max_size=12)
raw_parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "reasoning_text", "input_image"])},
    optional={"text": json_values},
)
contents = json_values | st.lists(raw_parts, max_size=3)
raw_items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "x"]) | json_values,
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | json_values,
        "id": json_values | st.just("msg_0_a"),
        "content": contents,
        "output": contents,
        "name": json_values,
        "arguments": json_values,
        "call_id": json_values,
    },
)


def _parse(**fields):
    return ResponsesDialect().parse({"input": "hi"} | fields)


def _outcome(body):
    try:
        return ResponsesDialect().parse(body)
    except RequestError as error:
        return error


def _messages(*items):
    return parse_input(list(items))


@given(body=st.dictionaries(names, json_values, max_size=4), items=json_values | st.lists(raw_items, max_size=4))
def test_responses_body_is_parsed_or_refused(body, items):
    """No JSON makes it fail in any other way than by an error that the client can read."""
    outcome = _outcome(body | {"input": items})

    assert outcome.request.messages if isinstance(outcome, Parsed) else len(outcome.message) < 500


def test_responses_defaults():
    """A text is a message of the user; answers are stored, whatever the client says, unless that is honoured."""
    parsed = _parse()

    assert parsed.request.messages == (USER,)
    assert (parsed.request.id_prefix, parsed.request.num_choices, parsed.request.previous) == ("resp_", 1, None)
    assert parsed.request.sampling.max_new_tokens == 512
    assert (parsed.model, parsed.is_stream, parsed.has_logprobs) == (None, False, False)
    assert parsed.request.store


def test_previous_response_must_be_a_response_id():
    """A chat completion's id is not a response's, as it is not at OpenAI."""
    with pytest.raises(PreviousNotFound, match="chatcmpl-1"):
        _parse(previous_response_id="chatcmpl-1")


def test_responses_store_false_is_honoured_if_configured():
    """The setting decides, because clients of Responses send ``store: false`` by habit."""
    body = {"input": "hi", "store": False}

    assert not ResponsesDialect(honours_store=True).parse(body).request.store
    assert ResponsesDialect(honours_store=False).parse(body).request.store


def test_responses_fields_are_parsed():
    """Bounds, sampling, tools, forms, names."""
    parsed = _parse(
        model="m",
        stream=True,
        max_output_tokens=7,
        temperature=0.5,
        top_k=3,
        stop="END",
        seed=4,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        metadata={"agent": "planner"},
        chat_template_kwargs={"enable_thinking": False},
        previous_response_id="resp_0",
    )
    request, sampling = parsed.request, parsed.request.sampling

    assert (parsed.model, parsed.is_stream, parsed.has_logprobs) == ("m", True, True)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (7, 0.5, 3, ("END",))
    assert [(tool.name, tool.parameters) for tool in request.tools] == [("add", {"type": "object"})]
    assert (request.tool_choice, request.parallel_tool_calls, request.seed) == ("add", False, 4)
    assert request.response_format == JsonText(schema={"type": "object"}, is_strict=True)
    assert (request.tag, request.template_kwargs, request.previous) == ("planner", {"enable_thinking": False}, "resp_0")


def test_responses_instructions_come_first():
    """They are a system message, which those who follow the answer do not inherit; system items are not."""
    system = {"role": "system", "content": "A house."}
    house = ChatMessage(role="system", content="A house.")
    marked, bare = _parse(instructions="Be kind.", input=[system]).request, _parse(input=[system]).request

    assert marked.messages == (ChatMessage(role="system", content="Be kind."), house)
    assert (bare.messages, bare.has_instructions, marked.has_instructions) == ((house,), False, True)


# ------------------------------------------------------------------------------------------------------- items


@pytest.mark.parametrize(
    "raw",
    [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "user", "content": "hi", "id": "msg_9", "status": "completed"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
)
def test_responses_messages_have_many_forms(raw):
    """With type, id and status or without; as a text or as parts."""
    assert _messages(raw) == (USER,)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_responses_system_messages_may_be_anywhere(role):
    """As in chat completions."""
    assert _messages({"role": "user", "content": "hi"}, {"role": role, "content": "x"}) == (
        USER,
        ChatMessage(role=role, content="x"),
    )


def test_responses_items_of_an_answer_are_one_message():
    """Thinking, text and parallel calls; then the results, as text or as parts."""
    answer = ChatMessage(
        role="assistant",
        content="Let me see.",
        reasoning="hm",
        tool_calls=(CALL, ToolCall(id="call_2", name="add", arguments="{}")),
    )
    second = RAW_CALL | {"call_id": "call_2", "arguments": {}}
    results = (
        {"type": "function_call_output", "call_id": "call_1", "output": "4"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "5"}]},
    )

    assert _messages(RAW_REASONING, RAW_TEXT, RAW_CALL, second, *results) == (
        answer,
        ChatMessage(role="tool", content="4", tool_call_id="call_1"),
        ChatMessage(role="tool", content="5", tool_call_id="call_2"),
    )


@pytest.mark.parametrize("content", [None, []])
def test_responses_reasoning_may_be_empty(content):
    """Some clients repeat the item without its text; summaries are not read."""
    emptied = RAW_REASONING | {"content": content, "summary": [{"type": "summary_text", "text": "x"}]}

    assert _messages(emptied, RAW_TEXT) == (ChatMessage(role="assistant", content="Let me see."),)


def test_responses_consecutive_answers_are_separate():
    """Ids tell them apart; without ids, what follows a text and is not a call does."""
    first, second = RAW_TEXT | {"id": "msg_0_a"}, RAW_CALL | {"id": "fc_0_b"}
    text = ChatMessage(role="assistant", content="Let me see.")

    assert _messages(first, second) == (text, ChatMessage(role="assistant", tool_calls=(CALL,)))
    assert _messages(RAW_TEXT, RAW_TEXT) == (text, text)
    assert _messages(RAW_TEXT, RAW_REASONING, RAW_CALL) == (
        text,
        ChatMessage(role="assistant", reasoning="hm", tool_calls=(CALL,)),
    )


def test_responses_split_text_is_joined_by_ids():
    """A stream may give an answer's text in two items, around a call; read back, it is one text."""
    pieces = [RAW_TEXT | {"id": "msg_0_a"}, RAW_CALL | {"id": "fc_0_a"}, RAW_TEXT | {"id": "msg_1_a"}]

    assert [m.content for m in _messages(*pieces)] == ["Let me see.Let me see."]


@pytest.mark.parametrize(
    ("item", "kind", "words"),
    [
        ({"type": "item_reference", "id": "msg_1"}, InvalidRequest, "refers to item 'msg_1'"),
        ({"id": "msg_1"}, InvalidRequest, "refers to item 'msg_1'"),
        ({"type": "web_search_call"}, UnsupportedParameter, "'web_search_call'"),
        ({"role": "user", "content": [{"type": "input_image"}]}, UnsupportedParameter, "'input_image'"),
        ({"role": "tool", "content": "x"}, InvalidRequest, r"input\[0\].role"),
        ({"role": "user"}, InvalidRequest, r"input\[0\].content"),
        (RAW_CALL | {"name": ""}, InvalidRequest, r"input\[0\].name"),
        (RAW_CALL | {"call_id": None}, InvalidRequest, r"input\[0\].call_id"),
        (RAW_CALL | {"arguments": 3}, InvalidRequest, r"input\[0\].arguments"),
        ({"type": "function_call_output", "call_id": 3, "output": ""}, InvalidRequest, r"input\[0\].call_id"),
        ({"type": "function_call_output", "call_id": "c"}, InvalidRequest, r"input\[0\].output"),
        ("hi", InvalidRequest, r"input\[0\] must be an object"),
    ],
)
def test_invalid_responses_item_is_refused_by_name(item, kind, words):
    """The error says which item, and what to do."""
    with pytest.raises(kind, match=words):
        _messages(item)


# -------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "stored prompts"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"messages": [USER]}, "use input"),
        ({"max_tokens": 3}, "max_output_tokens"),
        ({"n": 2}, "n is not supported"),
    ],
)
def test_unsupported_responses_field_is_refused(fields, words):
    """With the reason, and what to do instead."""
    with pytest.raises(UnsupportedParameter, match=words):
        _parse(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": []},
        {"instructions": ["x"]},
        {"include": "x"},
        {"max_output_tokens": 0},
        {"previous_response_id": 3},
        {"tool_choice": "required"},
        {"tools": [TOOL, TOOL]},
        {"tools": [{"type": "function", "name": ""}]},
    ],
)
def test_invalid_responses_value_is_refused(fields):
    """The error names the field."""
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        _parse(**fields)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(None, ToolChoice.AUTO), ("none", ToolChoice.NONE), ("required", ToolChoice.REQUIRED)],
)
def test_responses_tool_choices(choice, expected):
    """As words; named functions are tested above."""
    assert _parse(tools=[TOOL], tool_choice=choice).request.tool_choice == expected


# --------------------------------------------------------------------------------------------------- coding agents


def test_codex_request_is_parsed():
    """Metadata of the client, an effort, a verbosity, hints of caches: nothing of it ends the session."""
    parsed = _parse(
        client_metadata={"x-codex-installation-id": "1"},
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        store=False,
    )

    assert parsed.request.template_kwargs == {"reasoning_effort": "high"}
    assert (parsed.echo["reasoning"]["effort"], parsed.echo["text"]["verbosity"]) == ("high", "low")


@pytest.mark.parametrize("effort", ["huge", 3, []])
def test_unknown_effort_is_refused(effort):
    """With the words that there are."""
    with pytest.raises(InvalidRequest, match="minimal"):
        _parse(reasoning={"effort": effort})


def test_tool_namespaces_are_flattened():
    """The model sees functions under joined names; a call that comes back with its namespace has the same name."""
    inner = {"type": "function", "name": "read", "parameters": {}}
    tools = [TOOL, {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [inner]}]
    call = {**RAW_CALL, "name": "read", "namespace": "mcp__files"}
    parsed = _parse(tools=tools, input=[{"role": "user", "content": "hi"}, call])

    assert [tool.name for tool in parsed.request.tools] == ["add", "mcp__files__read"]
    assert parsed.forms == {"mcp__files__read": CallForm(name="read", namespace="mcp__files")}
    assert parsed.request.messages[-1].tool_calls[0].name == "mcp__files__read"
    assert parsed.echo["tools"][1] == tools[1]


@pytest.mark.parametrize("rest", [{}, {"name": "n"}, {"name": "n", "tools": [3]}])
def test_malformed_namespace_is_refused(rest):
    """With its place."""
    with pytest.raises(InvalidRequest, match="tools"):
        _parse(tools=[{"type": "namespace", **rest}])


def test_top_p_zero_is_greedy():
    """``top_p: 0`` is valid for OpenAI's endpoint, and echoed as it was sent."""
    parsed = _parse(top_p=0)

    assert (parsed.request.sampling.top_k, parsed.request.sampling.top_p, parsed.echo["top_p"]) == (1, 1.0, 0.0)
