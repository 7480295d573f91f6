"""The wording of answers and streams."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    ChatMessage,
    Completion,
    FinishReason,
    InteractionId,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
    TopLogprob,
    Usage,
)
from areal_actors.errors import Unavailable
from areal_actors.proxy.dialects.chat.answer import ChatDialect

DIALECT = ChatDialect(
    model="policy",
    clock=lambda: 1700000000.5,
    token_bytes=lambda ids, **_: [b"\xc3\xa9" if i else b"\xc3" for i in ids],
)
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def _answer(message, *, name="chatcmpl-1", finish=FinishReason.STOP, tops=()):
    completion = Completion(
        token_ids=[0, 1], logprobs=[-0.5, 0.0], raw_logprobs=[-1, -1], versions=[3, 3], finish=finish, top_logprobs=tops
    )
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    return Answer(interaction=InteractionId(name), message=message, completion=completion, usage=usage)


def _completion_of(*answers, **fields):
    document = orjson.loads(orjson.dumps(DIALECT.format_answers(DIALECT.parse(BODY | fields), answers)))
    ChatCompletion.model_validate(document, strict=True)
    return document


def _chunks_of(items, **fields):
    stream = DIALECT.open_stream(DIALECT.parse(BODY | {"stream": True} | fields))
    events = b"".join([*(stream.feed(item) for item in items), stream.finish()])
    *lines, done, rest = events.split(b"\n\n")
    chunks = [orjson.loads(line.removeprefix(b"data: ")) for line in lines]
    assert (done, rest) == (b"data: [DONE]", b"")
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return chunks


def test_chat_answer_has_all_keys():
    """Id, object, created, model, index, role, a known finish reason and usage with cached tokens."""
    assert _completion_of(_answer(ChatMessage(role="assistant", content="hello")), model="my-model") == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "my-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_chat_tool_calls_have_null_content_and_string_arguments():
    """The shape that all clients run tools on."""
    call = ToolCall(id="call_1", name="f", arguments='{"a":  1}')
    choice = _completion_of(_answer(ChatMessage(role="assistant", content="", tool_calls=(call,))))["choices"][0]

    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    ]


def test_empty_chat_answer_is_empty_text():
    """Early policies say nothing; the answer is a string all the same."""
    document = _completion_of(_answer(ChatMessage(role="assistant"), finish=FinishReason.LENGTH))

    assert document["choices"][0]["message"]["content"] == ""
    assert document["choices"][0]["finish_reason"] == "length"


def test_chat_choices_share_one_prompt_count():
    """With n = 2, usage counts the common prompt once, and each choice can be rewarded by its own id."""
    document = _completion_of(
        _answer(ChatMessage(role="assistant", content="a")),
        _answer(ChatMessage(role="assistant", content="b"), name="chatcmpl-1-1"),
        n=2,
    )

    assert [choice["interaction_id"] for choice in document["choices"]] == ["chatcmpl-1", "chatcmpl-1-1"]
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    assert document["usage"]["prompt_tokens"] == 5
    assert document["usage"]["completion_tokens"] == 4


def test_chat_logprobs_are_the_captured_ones():
    """One entry per sampled token; a part of a character has the bytes of that part."""
    tops = ((TopLogprob(token_id=1, logprob=-0.1),), ())
    document = _completion_of(
        _answer(ChatMessage(role="assistant", content="é"), tops=tops), logprobs=True, top_logprobs=1
    )

    assert document["choices"][0]["logprobs"]["content"] == [
        {
            "token": "�",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [{"token": "é", "logprob": -0.1, "bytes": [0xC3, 0xA9]}],
        },
        {"token": "é", "logprob": 0.0, "bytes": [0xC3, 0xA9], "top_logprobs": []},
    ]


def test_aborted_chat_answer_is_an_error():
    """An aborted generation is an error that may be retried, not an unknown finish reason."""
    with pytest.raises(Unavailable):
        _completion_of(_answer(ChatMessage(role="assistant", content="a"), finish=FinishReason.ABORT))


def test_chat_stream_says_role_and_names_once():
    """Role in the first delta, a call's id and name in its first, then a finish reason, usage, and the end."""
    call = ToolCall(id="call_1", name="f", arguments="{}")
    chunks = _chunks_of(
        [
            AnswerStarted(interaction=InteractionId("chatcmpl-1")),
            ToolCallStarted(index=0, id="call_1", name="f"),
            ToolArgumentsDelta(index=0, text="{"),
            ToolArgumentsDelta(index=0, text="}"),
            _answer(ChatMessage(role="assistant", tool_calls=(call,))),
        ],
        stream_options={"include_usage": True},
    )
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]

    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}
    assert deltas == [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
    ]
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]] == [None] * 4 + ["tool_calls"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 7


def test_chat_usage_is_streamed_on_request():
    """A chunk without choices surprises clients that did not ask for one."""
    items = [AnswerStarted(interaction=InteractionId("c")), _answer(ChatMessage(role="assistant"), name="c")]
    chunks = _chunks_of(items)

    assert all(chunk["choices"] for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@given(texts=st.lists(st.tuples(st.booleans(), st.text(max_size=6)), max_size=8), num_choices=st.integers(1, 3))
def test_chat_deltas_join_to_the_message(texts, num_choices):
    """However text and thinking are cut, and whatever line breaks they hold, each choice's parts arrive in order."""
    items = []
    for choice in range(num_choices):
        name = InteractionId(f"c-{choice}")
        items.append(AnswerStarted(interaction=name, choice=choice))
        for is_reasoning, text in texts:
            items.append((ReasoningDelta if is_reasoning else TextDelta)(text=text, choice=choice))
        items.append(_answer(ChatMessage(role="assistant"), name=name))
    choices = [choice for chunk in _chunks_of(items, n=num_choices) for choice in chunk["choices"]]

    for index in range(num_choices):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert "".join(delta.get("content") or "" for delta in deltas) == "".join(t for r, t in texts if not r)
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "".join(t for r, t in texts if r)
        assert next(delta.get("role") for delta in deltas) == "assistant"
        assert sum("role" in delta for delta in deltas) == 1
