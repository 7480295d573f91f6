"""The wording of Anthropic's answers and streams."""

from __future__ import annotations

import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import (
    Message,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
)
from hypothesis import given
from hypothesis import strategies as st

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
    Usage,
)
from areal_actors.errors import Unavailable
from areal_actors.lib.json_prefix import JsonPrefix
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.messages.request import parse_anthropic_conversation, sign_thought
from areal_actors.rendering import join_deltas

DIALECT = MessagesDialect(model="policy")
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
EVENTS = {
    "message_start": RawMessageStartEvent,
    "content_block_start": RawContentBlockStartEvent,
    "content_block_delta": RawContentBlockDeltaEvent,
    "content_block_stop": RawContentBlockStopEvent,
    "message_delta": RawMessageDeltaEvent,
    "message_stop": RawMessageStopEvent,
}


def _answer(message, *, finish=FinishReason.STOP, stop_sequence=None):
    completion = Completion(
        token_ids=[0, 1], logprobs=[-0.5, 0.0], raw_logprobs=[-1, -1], versions=[3, 3], finish=finish
    )
    return Answer(
        interaction=InteractionId("msg_1"),
        message=message,
        completion=completion,
        usage=Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4),
        stop_sequence=stop_sequence,
    )


def _message_of(answer, **fields):
    document = orjson.loads(orjson.dumps(DIALECT.format_answers(DIALECT.parse(BODY | fields), [answer])))
    Message.model_validate(document, strict=True)
    return document


def _events_of(items):
    """The payloads of a stream; each is valid, and the name of its event is its type."""
    stream = DIALECT.open_stream(DIALECT.parse(BODY | {"stream": True}))
    *events, rest = b"".join([*(stream.feed(item) for item in items), stream.finish()]).split(b"\n\n")
    assert rest == b""
    payloads = []
    for event in events:
        name, data = event.split(b"\n")
        payload = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + payload["type"].encode()
        EVENTS[payload["type"]].model_validate(payload, strict=True)
        payloads.append(payload)
    return payloads


def _accumulate(payloads):
    snapshot, buffers = None, {}
    for payload in payloads:
        event = EVENTS[payload["type"]].model_validate(payload)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


def test_messages_answer_has_all_keys():
    """Id, type, role, model, blocks in order with input as an object, stop reason and usage."""
    call = ToolCall(id="call_1", name="add", arguments='{"a": 1}')
    message = ChatMessage(role="assistant", content="hello", tool_calls=(call,), reasoning="hm")

    assert _message_of(_answer(message), model="my-model") == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "my-model",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": sign_thought("hm")},
            {"type": "text", "text": "hello"},
            {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "output_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("finish", "stop_sequence", "has_call", "expected"),
    [
        (FinishReason.STOP, None, False, "end_turn"),
        (FinishReason.STOP, "###", False, "stop_sequence"),
        (FinishReason.LENGTH, None, False, "max_tokens"),
        (FinishReason.STOP, None, True, "tool_use"),
        (FinishReason.STOP, "###", True, "tool_use"),
        (FinishReason.LENGTH, None, True, "max_tokens"),
    ],
)
def test_messages_stop_reasons(finish, stop_sequence, has_call, expected):
    """In Anthropic's words; the stop string is named where it is the reason."""
    calls = (ToolCall(id="c", name="f", arguments="{}"),) if has_call else ()
    message = ChatMessage(role="assistant", content="x", tool_calls=calls)
    document = _message_of(_answer(message, finish=finish, stop_sequence=stop_sequence))

    assert document["stop_reason"] == expected
    assert document["stop_sequence"] == (stop_sequence if expected == "stop_sequence" else None)


def test_empty_messages_answer_has_a_block():
    """Agents read ``content[0].text`` unasked; an early policy that says nothing is not a reason to crash."""
    message = ChatMessage(role="assistant", content="")
    items = [AnswerStarted(interaction=InteractionId("msg_1")), _answer(message)]

    assert [block["text"] for block in _message_of(_answer(message))["content"]] == [""]
    assert [block["text"] for block in _accumulate(_events_of(items))["content"]] == [""]


def test_aborted_messages_answer_is_an_error():
    """No client learns a reason of the engine's; it may ask again."""
    with pytest.raises(Unavailable):
        _message_of(_answer(ChatMessage(role="assistant", content=""), finish=FinishReason.ABORT))


json_objects = st.dictionaries(st.text(max_size=3), st.integers(-5, 5) | st.text(max_size=3), max_size=3)
arguments = json_objects.map(lambda value: orjson.dumps(value).decode()) | st.sampled_from(
    ["", "[1]", "{", "NaN", '{"a": "x ', '{"a": 1, ', '{"a": "b"} ', ' {"a"']
)


@st.composite
def delta_lists(draw):
    """What any model may say: thinking, text and calls in any order, each in pieces, some of them empty."""
    deltas, num_calls = [], 0
    for kind in draw(st.lists(st.sampled_from(["thought", "text", "call"]), max_size=6)):
        if kind != "call":
            delta = ReasoningDelta if kind == "thought" else TextDelta
            deltas += [delta(text=piece) for piece in draw(st.lists(st.text(max_size=4), max_size=3))]
            continue
        deltas.append(ToolCallStarted(index=num_calls, id=f"call_{num_calls}", name=draw(st.sampled_from("fg"))))
        text = draw(arguments)
        cut = draw(st.integers(0, len(text)))
        deltas += [ToolArgumentsDelta(index=num_calls, text=piece) for piece in (text[:cut], text[cut:])]
        num_calls += 1
    return deltas


def _joined(blocks):
    """What blocks say, whatever their order among kinds."""
    return (
        "".join(block.get("thinking", "") for block in blocks),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
    )


@given(delta_lists())
def test_messages_stream_adds_up_to_the_answer(deltas):
    """Every sequence of deltas is a valid sequence of events, and the SDK joins them to what JSON would have said."""
    started = AnswerStarted(interaction=InteractionId("msg_1"), num_prompt_tokens=5)
    answer = _answer(join_deltas(deltas))
    whole, joined = _message_of(answer), _accumulate(_events_of([started, *deltas, answer]))

    assert _joined(joined["content"]) == _joined(whole["content"])
    assert {**joined, "content": None, "stop_details": None} == {**whole, "content": None, "stop_details": None}
    kinds = [block["type"] for block in joined["content"]]
    if sorted(set(kinds), key=["thinking", "text", "tool_use"].index) == list(dict.fromkeys(kinds)) and all(
        kinds.count(kind) <= 1 for kind in ("thinking", "text")
    ):
        assert [block | {"citations": None} for block in joined["content"]] == [
            block | {"citations": None} for block in whole["content"]
        ]


@given(delta_lists())
def test_echoed_messages_answer_is_parsed_unchanged(deltas):
    """Echoed block for block, streamed or not, an answer is read as the message that it was: nothing is lost."""
    message = join_deltas(deltas)
    items = [AnswerStarted(interaction=InteractionId("msg_1")), *deltas, _answer(message)]
    for document in (_message_of(_answer(message)), _accumulate(_events_of(items))):
        history = [*BODY["messages"], {"role": "assistant", "content": document["content"]}, *BODY["messages"]]
        _, echoed, _ = parse_anthropic_conversation(None, history)

        assert (echoed.content or "", echoed.reasoning or "") == (message.content or "", message.reasoning or "")
        assert [(call.id, call.name) for call in echoed.tool_calls] == [(c.id, c.name) for c in message.tool_calls]
        for ours, theirs in zip(message.tool_calls, echoed.tool_calls, strict=True):
            assert theirs.arguments == ours.arguments or orjson.loads(theirs.arguments) == orjson.loads(
                ours.arguments or "{}"
            )


@given(arguments)
def test_messages_tool_input_is_streamed(text):
    """Character by character; a client can parse what it has at any time, also of an input that breaks off."""
    started = AnswerStarted(interaction=InteractionId("msg_1"))
    call = ToolCallStarted(index=0, id="call_0", name="f")
    deltas = [call, *[ToolArgumentsDelta(index=0, text=char) for char in text]]
    events = _events_of([started, *deltas, _answer(join_deltas(deltas))])
    pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    prefix = JsonPrefix()

    assert "".join(pieces).startswith(prefix.feed(text))
    assert _accumulate(events)["content"][0]["name"] == "f"
    if prefix.is_complete and len(text) > 2:
        assert len(pieces) > 1
