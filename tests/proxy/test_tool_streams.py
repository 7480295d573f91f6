"""Calls of tools arrive as they are sampled, on every route; only the engine is scripted."""

from __future__ import annotations

import json

import httpx
import orjson
import pytest
from tests.proxy.stack import open_stack, sampled

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


ARGUMENTS = '{"path": "a.py", "text": "x = 1\\nprint(x)"}'
ANSWER = f'Writing.\n<tool_call>\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>'
QUESTION = {"role": "user", "content": "Write it."}
SCHEMA = {"type": "object", "properties": {}}
CHAT = {"messages": [QUESTION], "tools": [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]}
BODIES = {
    "chat/completions": CHAT | {"max_tokens": 256},
    "responses": {"input": "Write it.", "tools": [{"type": "function", "name": "write", "parameters": SCHEMA}]},
    "messages": {"messages": [QUESTION], "max_tokens": 256, "tools": [{"name": "write", "input_schema": SCHEMA}]},
}


async def stream_events(http, url, body):
    answer = await http.post(url, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [orjson.loads(line) for line in lines]


def pieces_of(route, events):
    """The name of the call when it was said, and the pieces of its arguments."""
    if route == "responses":
        (item,) = [e["item"] for e in events if e["type"] == "response.output_item.added" and "name" in e["item"]]
        return item["name"], [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    if route == "messages":
        (block,) = [e["content_block"] for e in events if e.get("content_block", {}).get("type") == "tool_use"]
        return block["name"], [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", {})]
    calls = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
    return calls[0]["function"]["name"], [call["function"]["arguments"] for call in calls[1:]]


@pytest.mark.parametrize("route", BODIES)
async def test_tool_arguments_are_streamed(route):
    """The name, then the arguments in many pieces, which join to those of the answer without a stream."""
    async with open_stack(sampled(ANSWER), sampled(ANSWER)) as stack, httpx.AsyncClient() as http:
        url = f"{stack.session.base_url}/{route}"
        events = await stream_events(http, url, BODIES[route])
        whole = (await http.post(url, json=BODIES[route])).json()
        streamed, unstreamed = await stack.record()
    name, pieces = pieces_of(route, events)

    assert (name, "".join(pieces)) == ("write", ARGUMENTS)
    assert len([piece for piece in pieces if piece]) > 3
    assert streamed.output.tool_calls[0].arguments == unstreamed.output.tool_calls[0].arguments
    assert json.loads(ARGUMENTS)["path"] in json.dumps(whole)


ENDS = {
    "chat/completions": lambda events: events[-1]["choices"][0]["finish_reason"],
    "responses": lambda events: events[-1]["response"]["output"][-1]["status"],
    "messages": lambda events: events[-2]["delta"]["stop_reason"],
}


@pytest.mark.parametrize(
    ("route", "cut", "whole"),
    [
        ("chat/completions", "stop", "tool_calls"),
        ("responses", "incomplete", "completed"),
        ("messages", "stop_sequence", "tool_use"),
    ],
)
async def test_call_cut_by_a_stop_string_is_marked(route, cut, whole):
    """The end of the stream tells it from a whole call, after which the stop string came."""
    stop = {"stop_sequences" if route == "messages" else "stop": ["print", "Done"]}
    after = ANSWER.replace("print(x)", "x") + "\nDone."
    async with open_stack(sampled(ANSWER), sampled(after)) as stack, httpx.AsyncClient() as http:
        url = f"{stack.session.base_url}/{route}"
        ends = [ENDS[route](await stream_events(http, url, BODIES[route] | stop)) for _ in range(2)]

    assert ends == [cut, whole]


async def test_echo_of_a_cut_call_finds_its_parent():
    """The stream's client has the beginning of a call. It is what was stored, so its echo finds its parent."""
    cut = sampled(ANSWER)[:-16]
    async with open_stack(cut, sampled("Sorry.")) as stack, httpx.AsyncClient() as http:
        url = f"{stack.session.base_url}/chat/completions"
        events = await stream_events(http, url, CHAT | {"max_tokens": len(cut) - 1})
        name, pieces = pieces_of("chat/completions", events)
        call = {"id": "x", "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
        call["id"] = next(
            c["id"] for e in events for d in e["choices"] for c in d["delta"].get("tool_calls", ()) if "id" in c
        )
        echo = {"role": "assistant", "content": "Writing.", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Malformed arguments."}
        await http.post(url, json=CHAT | {"messages": [QUESTION, echo, result]})
        first, second = await stack.record()

    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert ARGUMENTS.startswith("".join(pieces))
    assert second.parent == first.id
