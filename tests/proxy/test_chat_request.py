"""Reading the body of a chat completion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import ChatMessage, Exactly, JsonText, OneOf, Tool, ToolCall, ToolChoice
from areal_actors.errors import InvalidRequest, RequestError, UnsupportedParameter
from areal_actors.proxy.dialects.base import Parsed
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.chat.request import CHAT_FIELDS

USER = {"role": "user", "content": "hi"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([p.name for p in CHAT_FIELDS.fields]) | st.text(max_size=12)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", ""])
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url", "input_audio"])},
    optional={"text": json_values, "refusal": json_values},
)
calls = st.fixed_dictionaries(
    {},
    optional={
        "id": json_values,
        "type": st.sampled_from(["function", "custom"]),
        "function": st.fixed_dictionaries({}, optional={"name": json_values, "arguments": json_values}),
    },
)
raw_messages = st.fixed_dictionaries(
    {"role": roles},
    optional={
        "content": json_values | st.lists(parts, max_size=3),
        "tool_calls": st.lists(calls, max_size=2) | json_values,
        "tool_call_id": json_values,
        "name": json_values,
        "reasoning_content": json_values,
    },
)
tools = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["function", "custom"]),
        "function": st.fixed_dictionaries(
            {}, optional={"name": json_values, "description": json_values, "parameters": json_values}
        )
        | json_values,
    },
)
bodies = st.builds(
    lambda base, extra: base | extra,
    st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(raw_messages, max_size=3) | json_values,
            "tools": st.lists(tools, max_size=2) | json_values,
            "logit_bias": st.dictionaries(st.text("0123456789²-", max_size=14), json_values, max_size=2),
        },
    ),
    st.dictionaries(names, json_values, max_size=4),
)


@given(body=bodies)
def test_chat_body_is_parsed_or_refused(body):
    """Whatever JSON object comes in, nothing but a ``RequestError`` comes out, and its message is short."""
    outcome = _outcome(body)

    assert outcome.request.messages if isinstance(outcome, Parsed) else len(outcome.message) < 500


def _outcome(body):
    try:
        return ChatDialect().parse(body)
    except RequestError as error:
        return error


def _parse(**fields):
    return ChatDialect().parse({"messages": [USER]} | fields)


def test_chat_defaults():
    """A request that names nothing samples from the plain distribution."""
    parsed = _parse()
    sampling = parsed.request.sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.max_new_tokens == 512
    assert (parsed.request.num_choices, parsed.request.seed, parsed.request.store) == (1, None, True)
    assert (parsed.is_stream, parsed.include_usage, parsed.has_logprobs) == (False, False, False)


def test_chat_sampling_fields_are_parsed():
    """Each honoured field is found again in ``Sampling``, under its own meaning."""
    parsed = _parse(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        stop="END",
        stop_token_ids=[7],
        seed=-3,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "2": 1.5},
        logprobs=True,
        top_logprobs=4,
        n=2,
        max_tokens=9.0,
    )
    sampling = parsed.request.sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.stop, sampling.stop_token_ids) == (("END",), (7,))
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert sampling.logit_bias == ((2, 1.5), (5, -100.0))
    assert (sampling.top_logprobs, sampling.max_new_tokens) == (4, 9)
    assert (parsed.request.seed, parsed.request.num_choices, parsed.has_logprobs) == (-3, 2, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"07": 1, "7": 2}}, "logit_bias"),
        ({"logit_bias": {"000000000000999999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "1"),
        ({"seed": 1e300}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}] * 2}, "tools"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_invalid_chat_value_is_refused_by_name(fields, param):
    """The error's ``param`` is the field at fault, with its index, and stands in the message."""
    with pytest.raises(InvalidRequest) as caught:
        _parse(**fields)

    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "grammar"}},
        {"guided_grammar": "root ::= x"},
        {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]},
        {"ignore_eos": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tools": [{"type": "web_search"}]},
    ],
)
def test_unsupported_chat_field_is_refused(fields):
    """What cannot be honoured is a 400 with a code of its own, never silently dropped."""
    with pytest.raises(UnsupportedParameter):
        _parse(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "service_tier": "flex", "prompt_cache_key": "k"},
        {"modalities": ["text"], "ignore_eos": False, "functions": [], "best_of": 1},
        {"temperature": None, "tools": None, "stop": None, "unheard_of": None, "audio": None},
        {"response_format": {"type": "text"}, "tool_choice": "auto"},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ],
)
def test_inert_chat_field_is_accepted(fields):
    """Inert names, neutral values and nulls, which several clients send, are not a reason to refuse."""
    assert _parse(**fields).request.messages == (ChatMessage(role="user", content="hi"),)


def test_chat_response_format_is_parsed():
    """A call, and a form of the text; a strict tool remembers that it is one."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    choice = {"type": "function", "function": {"name": "f"}}
    request = _parse(tools=[tool], tool_choice=choice, response_format={"type": "json_object"}).request

    assert request.tool_choice == "f"
    assert request.tools == (Tool(name="f", parameters={"type": "object"}, is_strict=True),)
    assert request.response_format == JsonText(schema={"type": "object"})
    assert _parse(guided_choice=["a"]).request.response_format == OneOf(parts=(Exactly(text="a"),))


def test_misspelt_chat_field_is_refused_with_the_nearest_name():
    """An unknown name would be missing from everything learnt; its author is told what was probably meant."""
    with pytest.raises(UnsupportedParameter, match="did you mean temperature"):
        _parse(temperatur=0.2)

    assert ChatDialect(inert=("temperatur",)).parse({"messages": [USER], "temperatur": 0.2}).request.messages


def test_chat_messages_of_all_roles_are_parsed():
    """Strings, parts, nulls and absent keys become one kind of message; calls keep the model's exact text."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    parsed = _parse(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "developer", "content": "dev"},
            {"role": "user", "content": "ask", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "annotations": [], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "tool", "name": "f", "content": "43", "extra": {"function_id": "x"}},
            {"role": "assistant", "content": "done", "reasoning_content": "hmm", "tool_calls": []},
        ]
    )

    assert parsed.request.messages == (
        ChatMessage(role="system", content="a\nb"),
        ChatMessage(role="developer", content="dev"),
        ChatMessage(role="user", content="ask", name="ann"),
        ChatMessage(role="assistant", tool_calls=(ToolCall(id="c1", name="f", arguments='{"a":  1}'),)),
        ChatMessage(role="tool", content="42", tool_call_id="c1"),
        ChatMessage(role="tool", content="43", name="f"),
        ChatMessage(role="assistant", content="done", reasoning="hmm"),
    )


def test_chat_tools_are_parsed():
    """Functions keep name, description and schema; the tag of the agent may come from metadata."""
    schema = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "d", "parameters": schema}
    parsed = _parse(
        tools=[{"type": "function", "function": function}],
        tool_choice="none",
        parallel_tool_calls=False,
        metadata={"agent": "critic"},
        stream=True,
        stream_options={"include_usage": True},
    )

    assert parsed.request.tools == (Tool(name="f", description="d", parameters=schema),)
    assert parsed.request.tool_choice is ToolChoice.NONE
    assert parsed.request.tag == "critic"
    assert not parsed.request.parallel_tool_calls
    assert parsed.is_stream
    assert parsed.include_usage
