"""Bodies of Anthropic's Messages, as clients send them."""

from __future__ import annotations

import pytest

from areal_actors.domain import ChatMessage, JsonText, ToolCall, ToolChoice
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy.dialects.messages.answer import MessagesDialect

_OF_THE_SDK_ALONE = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
USER = {"role": "user", "content": "hi"}
BODY = {"model": "m", "messages": [USER], "max_tokens": 9}
TOOL = {"name": "f", "description": "Does.", "input_schema": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def _request(**fields):
    return MessagesDialect().parse(BODY | fields).request


def _messages(*messages, **fields):
    return _request(messages=list(messages), **fields).messages


def test_messages_fields_are_parsed():
    """Sampling and names end up where they belong."""
    parsed = MessagesDialect().parse(
        BODY
        | {
            "system": "Be brief.",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "stop_sequences": ["x"],
            "seed": 3,
            "stream": True,
            "metadata": {"user_id": '{"device": 1}', "agent": "planner"},
        }
    )
    request = parsed.request

    assert (parsed.model, parsed.is_stream) == ("m", True)
    assert request.messages == (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="hi"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 5, ("x",))
    assert (sampling.max_new_tokens, request.seed, request.tag, request.id_prefix) == (9, 3, "planner", "msg_")


def test_messages_default_limit():
    """Anthropic demands ``max_tokens``; the house has a default under every protocol."""
    body = {"messages": [USER]}

    assert MessagesDialect(default_max_tokens=7).parse(body).request.sampling.max_new_tokens == 7


def test_messages_text_and_blocks_are_equal():
    """Clients change the shape of earlier messages when the cache mark moves; what is said stays the same."""
    blocks = [{"type": "text", "text": "hi", **CACHED, "citations": None}]
    answer = [{"type": "text", "text": "yes"}]

    assert _messages({"role": "user", "content": blocks}) == _messages(USER)
    assert _messages(USER, {"role": "assistant", "content": answer}, USER) == _messages(
        USER, {"role": "assistant", "content": "yes"}, USER
    )
    assert _messages(USER, system=[{"type": "text", "text": "a", **CACHED}]) == _messages(USER, system="a")


def test_messages_tool_results_become_messages_in_order():
    """Several results in one turn, with text before, between and after them."""
    content = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": False, **CACHED},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "after"},
        {"type": "text", "text": "all"},
    ]

    assert [(m.role, m.content, m.tool_call_id) for m in _messages({"role": "user", "content": content})] == [
        ("user", "before", None),
        ("tool", "1", "a"),
        ("tool", "Error: 2", "b"),
        ("tool", "", "c"),
        ("user", "after\nall", None),
    ]


def test_messages_answer_blocks_are_parsed():
    """Thinking, text and calls; what only Anthropic can read is left out."""
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "whatever"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "Let me "},
        {"type": "text", "text": "see."},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}, "caller": {"type": "direct"}},
    ]
    _, answer, _ = _messages(USER, {"role": "assistant", "content": content}, USER)

    assert (answer.reasoning, answer.content) == ("hm", "Let me see.")
    assert answer.tool_calls == (ToolCall(id="a", name="f", arguments='{"x":1}'),)


def test_claude_code_request_is_parsed():
    """Instructions among the messages, adaptive thinking, edits of the context, a large body, a billing line."""
    tools = [TOOL | {"name": f"tool_{n}", "description": "word " * 500, "defer_loading": n > 9} for n in range(12)]
    request = _request(
        max_tokens=32000,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "Be kind.", **CACHED},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>x</system-reminder>"},
                    {"type": "text", "text": "hi"},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "env"}]},
        ],
        tools=tools,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        metadata={"user_id": '{"device_id": "x"}'},
        stream=True,
    )

    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "You are an agent.\nBe kind."),
        ("user", "<system-reminder>x</system-reminder>\nhi"),
        ("system", "env"),
    ]
    assert (len(request.tools), request.template_kwargs, request.response_format) == (
        12,
        {"reasoning_effort": "medium"},
        None,
    )


@pytest.mark.parametrize(
    ("thinking", "options", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {}, {"enable_thinking": True}),
        ({"type": "disabled"}, {}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}, {}),
        ({"type": "disabled"}, {"enable_thinking": True, "x": 1}, {"enable_thinking": True, "x": 1}),
    ],
)
def test_messages_thinking_sets_the_template(thinking, options, expected):
    """On and off are the template's option; who names the option outweighs the switch."""
    assert _request(thinking=thinking, chat_template_kwargs=options).template_kwargs == expected


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        (None, ToolChoice.AUTO, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice.AUTO, False),
        ({"type": "any"}, ToolChoice.REQUIRED, True),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, "f", False),
        ({"type": "none"}, ToolChoice.NONE, True),
    ],
)
def test_messages_tool_choices(choice, expected, is_parallel):
    """Anthropic's four words."""
    request = _request(tools=[TOOL, TOOL | {"name": "g", "type": "custom", "strict": True}], tool_choice=choice)

    assert (request.tool_choice, request.parallel_tool_calls) == (expected, is_parallel)
    assert [(tool.name, tool.is_strict) for tool in request.tools] == [("f", False), ("g", True)]


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_messages_output_format_is_parsed(field):
    """The newer name and the older one."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = _request(**{field: {"format": form, "effort": "low"} if field == "output_config" else form})

    assert isinstance(request.response_format, JsonText)
    assert request.response_format.schema == {"type": "object"}


@pytest.mark.parametrize(("value", "arguments"), [(None, ""), ("", ""), ('{"a": 1', '{"a": 1'), ({"a": 1}, '{"a":1}')])
def test_cut_tool_input_is_parsed(value, arguments):
    """Clients that join its deltas send the text as it came, or nothing."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": value}
    request = MessagesDialect().parse({"messages": [USER, {"role": "assistant", "content": [call]}, USER]}).request

    assert [call.arguments for call in request.messages[1].tool_calls] == [arguments]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": "no"}]}
                ]
            },
            "messages[0].content[0].is_error",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": [1]}]}]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "", "input": {}}]}]},
            "messages[0].content[0].name",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
            "messages",
        ),
        ({"system": 7}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"metadata": {"user_id": 7}}, "metadata"),
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
        ({"tools": [TOOL | {"description": 7}]}, "tools[0].description"),
        ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_format": {"type": "text"}, "output_config": {"format": {"type": "json_object"}}}, "output_config"),
    ],
)
def test_invalid_messages_value_is_refused_by_name(fields, param):
    """The error says which field."""
    with pytest.raises(InvalidRequest) as caught:
        _request(**fields)

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
    ],
)
def test_unsupported_messages_field_is_refused(fields, param):
    """Before anything is sampled; empty lists ask for nothing."""
    with pytest.raises(UnsupportedParameter) as caught:
        _request(**fields)

    assert caught.value.param == param
    _request(mcp_servers=[], container=None)
