"""The wording of Responses: the object, the events, and how both are read back."""

from __future__ import annotations

import orjson
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from openai._models import construct_type
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

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
from areal_actors.errors import CapacityExhausted, Unavailable
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors.proxy.dialects.responses.request import parse_input
from areal_actors.proxy.failures import describe_failure

DIALECT = ResponsesDialect(
    clock=lambda: 1700000000.5,
    token_bytes=lambda ids, **_: [(*["é".encode(), b"\xc3"], *(char.encode() for char in "abcdef"))[i] for i in ids],
)
STARTED = AnswerStarted(interaction=InteractionId("resp_1"))
EVENTS = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "add", "description": None, "parameters": {"type": "object"}, "strict": True}

texts = st.sampled_from(["", "a", " b\n"])
arguments = st.lists(texts, max_size=2)
parts = st.one_of(
    st.builds(lambda text: [TextDelta(text=text)], texts),
    st.builds(lambda text: [ReasoningDelta(text=text)], texts),
    st.builds(lambda name, pieces: (name, pieces), st.sampled_from(["add", "look"]), arguments),
)
finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


def _answer(message, *, finish=FinishReason.STOP, tops=(), tokens=(0, 1)):
    completion = Completion(
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        raw_logprobs=[-1] * len(tokens),
        versions=[3] * len(tokens),
        finish=finish,
        top_logprobs=tops,
    )
    usage = Usage(prompt_tokens=5, completion_tokens=len(tokens), cached_tokens=4)
    return Answer(interaction=STARTED.interaction, message=message, completion=completion, usage=usage)


def _response_of(answer, **fields):
    """The JSON object, which the SDK's own model takes without converting anything."""
    document = orjson.loads(orjson.dumps(DIALECT.format_answers(DIALECT.parse({"input": "hi"} | fields), [answer])))
    Response.model_validate(document, strict=True)
    return document


def _read_events(data):
    """The payloads of server-sent events, each of which is strictly one of the SDK's, under its own name."""
    *events, rest = data.split(b"\n\n")
    assert rest == b""
    payloads = []
    for event in events:
        name, payload = event.split(b"\n")
        payloads.append(orjson.loads(payload.removeprefix(b"data: ")))
        assert name == b"event: " + payloads[-1]["type"].encode()
        EVENTS.validate_json(payload.removeprefix(b"data: "), strict=True)
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    return payloads


def _events_of(items, **fields):
    stream = DIALECT.open_stream(DIALECT.parse({"input": "hi", "stream": True} | fields))
    return _read_events(b"".join([*(stream.feed(item) for item in items), stream.finish()]))


def _accumulate(payloads):
    """What the SDK's accumulator makes of the events; it raises for sequences that make no sense."""
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for payload in payloads:
        state.handle_event(construct_type(type_=ResponseStreamEvent, value=payload))
    return state


def _deltas_of(drawn):
    """Deltas as a parser gives them, with calls numbered, and the message that they join to."""
    deltas, calls = [], []
    for part in drawn:
        if isinstance(part, list):
            deltas += part
            continue
        name, pieces = part
        index = len(calls)
        calls.append(ToolCall(id=f"call_{index}", name=name, arguments="".join(pieces)))
        deltas.append(ToolCallStarted(index=index, id=f"call_{index}", name=name))
        deltas += [ToolArgumentsDelta(index=index, text=piece) for piece in pieces]
    message = ChatMessage(
        role="assistant",
        content="".join(d.text for d in deltas if isinstance(d, TextDelta)) or None,
        tool_calls=tuple(calls),
        reasoning="".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) or None,
    )
    return deltas, message


def _is_in_order(deltas):
    """Whether thinking comes before text and text before calls, each in one piece."""
    ranks = {ReasoningDelta: 0, TextDelta: 1, ToolCallStarted: 2, ToolArgumentsDelta: 2}
    order = [ranks[type(delta)] for delta in deltas if getattr(delta, "text", True)]
    return order == sorted(order)


@given(drawn=st.lists(parts, max_size=6), finish=finishes, has_logprobs=st.booleans(), num_lost=st.integers(0, 3))
def test_responses_stream_ends_in_the_whole_answer(drawn, finish, has_logprobs, num_lost):
    """Whatever is said in whatever order: strict events, an accumulation that holds, and the message read back.

    Deltas that never came are made up for; where thinking, text and calls come in this order, the last event holds
    exactly what the answer in one piece would be.
    """
    deltas, message = _deltas_of(drawn)
    heard = deltas[: len(deltas) - num_lost] if _is_in_order(deltas) else deltas
    fields = {"include": ["message.output_text.logprobs"]} if has_logprobs else {}
    answer = _answer(message, finish=finish)

    events = _events_of([STARTED, *heard, answer], **fields)
    state = _accumulate(events)
    whole = _response_of(answer, **fields)

    final = events[-1]["response"]
    expected = evolve(message, content=message.content or (None if message.tool_calls else ""))
    assert (expected,) == parse_input(whole["output"]) == parse_input(final["output"])
    assert {**final, "output": []} == {**whole, "output": []}
    if _is_in_order(deltas):
        assert final["output"] == whole["output"]
    if finish is FinishReason.STOP:
        assert state._completed_response.to_dict()["output"][0]["id"] == final["output"][0]["id"]
    _check_items(events)


def _check_items(events):
    """Every item is added once, done once, grows only in between, and is in the end what its done event says."""
    final = events[-1]["response"]["output"]
    for position, item in enumerate(final):
        own = [event for event in events if event.get("output_index") == position]
        pieces = [event["delta"] for event in own if event["type"].endswith(".delta")]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
        assert sum(event["type"].startswith("response.output_item") for event in own) == 2
        assert "".join(pieces) == said
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}


def test_responses_events_of_an_answer():
    """Thinking, text, and a call: each item is added, grows, and is done before the next one begins."""
    deltas, message = _deltas_of([[ReasoningDelta(text="hm")], [TextDelta(text="a")], ("add", ["{", "}"])])

    assert [event["type"].removeprefix("response.") for event in _events_of([STARTED, *deltas, _answer(message)])] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", {"type": "function", "name": "add"}),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}},
            "tool_choice",
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            "text",
            {"format": {"type": "json_object"}, "verbosity": "medium"},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
            "text",
            {
                "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
                "verbosity": "medium",
            },
        ),
        ({"previous_response_id": "resp_0"}, "previous_response_id", "resp_0"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", {"effort": None, "summary": "auto"}),
    ],
)
def test_response_repeats_the_request(fields, name, expected):
    """In the SDK's own types, which the strict validation checks."""
    assert _response_of(_answer(ChatMessage(role="assistant", content="a")), tools=[TOOL], **fields)[name] == expected


def test_cut_response_is_incomplete():
    """It is incomplete, and so is its last item."""
    message = ChatMessage(role="assistant", content="a", reasoning="hm")
    response = _response_of(_answer(message, finish=FinishReason.LENGTH))

    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_response_counts_reasoning_tokens():
    """They are counted from the text; where it cannot be found, nothing is made up."""
    found = _answer(ChatMessage(role="assistant", content="d", reasoning="bc"), tokens=(2, 3, 4, 5))
    lost = _answer(ChatMessage(role="assistant", content="d", reasoning="xy"), tokens=(2, 3, 4, 5))

    assert _response_of(found)["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert _response_of(lost)["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable("gone"), "server_error"), (CapacityExhausted("full"), "rate_limit_exceeded")]
)
def test_failed_responses_stream(error, code):
    """The response has failed, with what it had said; then comes what the SDK raises."""
    stream = DIALECT.open_stream(DIALECT.parse({"input": "hi"}))
    data = stream.feed(STARTED) + stream.feed(TextDelta(text="a")) + stream.fail(describe_failure(error, "req_1"))
    *_, failed, raised = _read_events(data)

    assert failed["response"]["error"] == {"code": code, "message": str(error)}
    assert failed["response"]["status"] == "failed"
    assert [item["status"] for item in failed["response"]["output"]] == ["incomplete"]
    assert raised["message"] == raised["error"]["message"] == str(error)


def test_responses_stream_that_fails_before_it_begins():
    """There is no response to speak of, only the error."""
    stream = DIALECT.open_stream(DIALECT.parse({"input": "hi"}))

    assert [e["type"] for e in _read_events(stream.fail(describe_failure(Unavailable("x"), "req_1")))] == ["error"]


def test_aborted_response_is_an_error():
    """Half an answer is never passed off as a whole one."""
    answer = _answer(ChatMessage(role="assistant", content="a"), finish=FinishReason.ABORT)

    with pytest.raises(Unavailable):
        _response_of(answer)
    with pytest.raises(Unavailable):
        _events_of([STARTED, answer])
